"""One rank, two tensor ranks and two pipeline stages, by each executor: the same work on the same cores, run in turn.

    python benchmarks/executors.py --rounds 5 --json result.json --markdown result.md

A round runs every side, in an order that turns, so that a change of the machine's speed meets everybody; ratios are
taken within a round. Each side is started for it and alone on the machine: five idle engines and two idle Ray clusters
beside it cost those with two cores a sixth of their speed. Two ranks have one core each; one rank has one core or both,
and whatever else a side runs (engine, front end) has the same cores. In float32 the tokens of all sides must be equal.

decode1    one stream, 128 tokens in, 128 out: (tokens - 1) / (last - first token)
batch32    32 at once, 128 in, 64 out: output tokens / wall time
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import setting, shown, summary, write
from benchmarks.peer_engines import prompts

WORKLOADS = {"decode1": (1, 128, 128), "batch32": (32, 128, 64)}
FIGURES = {"decode1": "decode_tok_s", "batch32": "e2e_tok_s"}

SIDES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank, one core": (1, {"distributed_executor_backend": "inprocess"}),
    "one rank, two cores": (2, {"distributed_executor_backend": "inprocess"}),
    "mp tp 2": (2, {"distributed_executor_backend": "mp", "tensor_parallel_size": 2}),
    "ray tp 2": (2, {"distributed_executor_backend": "ray", "tensor_parallel_size": 2}),
    "mp pp 2": (2, {"distributed_executor_backend": "mp", "pipeline_parallel_size": 2}),
    "ray pp 2": (2, {"distributed_executor_backend": "ray", "pipeline_parallel_size": 2}),
}
"""By name: cores and options."""

RATIOS = {
    ("mp tp 2", "one rank, one core"): {"decode1": 1.7, "batch32": 1.7},
    ("mp tp 2", "one rank, two cores"): {"decode1": 0.85, "batch32": 0.95},
    ("ray tp 2", "mp tp 2"): {"decode1": 0.95, "batch32": 0.95},
    ("mp pp 2", "one rank, two cores"): {"batch32": 0.9},
    ("ray pp 2", "mp pp 2"): {"batch32": 0.95},
}
"""What is compared, and the least that is hoped for."""


MOST = max(count for count, _, _ in WORKLOADS.values())
"""Requests at once. With more, a cache of this size would be short, and stages cut for the largest cache instead of for
speed."""

SETTLE_S = 3.0
"""After the start: an engine without work makes the beginning of its cache resident, for some seconds at most."""


class Engine:
    def __init__(self, cores: int, options: dict[str, Any]):
        from phalanx import AsyncEngine, EngineConfig

        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])  # the engine and its ranks inherit it
        self._loop = asyncio.new_event_loop()
        config = EngineConfig.from_options(
            max_model_len=2048, kv_cache_memory_bytes="512M", max_num_seqs=MOST, **options
        )
        self._engine = AsyncEngine(config)
        self._loop.run_until_complete(self._engine.start())
        time.sleep(SETTLE_S)

    def run(self, prompts: list[list[int]], output_len: int) -> dict[str, Any]:
        return self._loop.run_until_complete(self._run(prompts, output_len))

    async def _run(self, prompts: list[list[int]], output_len: int) -> dict[str, Any]:
        from phalanx import SamplingParams

        params = SamplingParams(max_tokens=output_len, temperature=0, ignore_eos=True)
        times: list[float] = []
        begin = asyncio.get_running_loop().time()

        async def one(prompt: list[int]) -> list[int]:
            tokens: list[int] = []
            async for delta in self._engine.generate(prompt, params):
                if delta.outputs[0].token_ids:
                    times.append(asyncio.get_running_loop().time() - begin)
                    tokens += delta.outputs[0].token_ids
            return tokens

        tokens = await asyncio.gather(*(one(prompt) for prompt in prompts))
        return {"first": times[0], "last": times[-1], "tokens": tokens}

    def close(self) -> None:
        self._loop.run_until_complete(self._engine.close())


def child(name: str, dtype: str, sides: dict[str, tuple[int, dict[str, Any]]] = SIDES) -> None:
    """Serve runs: a JSON line in, a JSON line out."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints must not get between the answers
    cores, options = sides[name]
    engine = Engine(cores, {"dtype": dtype, **options})
    print("ready", file=answers)
    for line in sys.stdin:
        print(json.dumps(engine.run(**json.loads(line))), file=answers)
    engine.close()


class Side:
    """One executor in its process."""

    def __init__(self, name: str, dtype: str, script: str):
        """`script` calls `child` when it is told to."""
        self._name = name
        environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        self._process = subprocess.Popen(
            [sys.executable, script, "--child", name, "--dtype", dtype],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**environment, "RAY_ADDRESS": "local"},
        )  # fmt: skip
        if self._line() != "ready":
            raise SystemExit(f"{name} did not start")

    def run(self, workload: str, seed: int) -> tuple[float, list[list[int]]]:
        """The workload's figure in tokens a second, and the tokens."""
        count, input_len, output_len = WORKLOADS[workload]
        order = {"prompts": prompts(count, input_len, seed), "output_len": output_len}
        self._process.stdin.write(json.dumps(order) + "\n")  # type: ignore[union-attr]
        self._process.stdin.flush()  # type: ignore[union-attr]
        seen = json.loads(self._line())
        if FIGURES[workload] == "decode_tok_s":
            return (output_len - 1) / (seen["last"] - seen["first"]), seen["tokens"]
        return sum(map(len, seen["tokens"])) / seen["last"], seen["tokens"]

    def close(self) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait(60)

    def _line(self) -> str:
        line = self._process.stdout.readline().strip()  # type: ignore[union-attr]
        if not line:
            raise SystemExit(f"{self._name} ended with exit code {self._process.wait()}")
        return line


def run_in_turns(
    names: list[str], workloads: list[str], rounds: int, dtype: str, script: str = __file__
) -> dict[str, dict[str, list[float]]]:
    """The figures of each workload, by side."""
    figures: dict[str, dict[str, list[float]]] = {w: {name: [] for name in names} for w in workloads}
    for number in range(rounds):
        answers: dict[str, list[list[list[int]]]] = {w: [] for w in workloads}
        for name in names[number % len(names) :] + names[: number % len(names)]:
            with contextlib.closing(Side(name, dtype, script)) as side:
                for workload in workloads:
                    side.run(workload, seed=rounds)  # one that does not count
                    figure, tokens = side.run(workload, seed=number)
                    figures[workload][name].append(figure)
                    answers[workload].append(tokens)
        if dtype == "float32" and any(tokens != of[0] for of in answers.values() for tokens in of):
            raise SystemExit("the sides' tokens differ")
    return figures


def measure(names: list[str], workloads: list[str], rounds: int, dtype: str) -> dict[str, Any]:
    figures = run_in_turns(names, workloads, rounds, dtype)
    ratios = {
        f"{a} / {b}": {
            workload: {
                **summary([x / y for x, y in zip(figures[workload][a], figures[workload][b], strict=True)]),
                "hoped": hoped[workload],
            }
            for workload in workloads
            if workload in hoped
        }
        for (a, b), hoped in RATIOS.items()
        if a in names and b in names
    }
    tokens_s = {w: {name: summary(values) for name, values in of.items()} for w, of in figures.items()}
    return {
        "benchmark": "executors",
        "dtype": dtype,
        "rounds": rounds,
        "tok_s": tokens_s,
        "ratios": ratios,
        **setting(),
    }


def markdown(result: dict[str, Any]) -> str:
    workloads = list(result["tok_s"])
    lines = [f"Tokens per second, {result['dtype']}, median of {result['rounds']} rounds (least to most).", ""]
    lines += ["| | " + " | ".join(workloads) + " |", "|---|" + "---|" * len(workloads)]
    for name in result["tok_s"][workloads[0]]:
        lines.append(f"| {name} | " + " | ".join(shown(result["tok_s"][w][name]) for w in workloads) + " |")
    lines += ["", "| ratio | workload | median (least to most) | hoped for |", "|---|---|---|---|"]
    for pair, of in result["ratios"].items():
        lines += [f"| {pair} | {w} | {shown(ratio, 2)} | {ratio['hoped']:.2f} |" for w, ratio in of.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--side", action="append", choices=SIDES, help="only these (repeatable)")
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="only these (repeatable)")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--markdown", metavar="FILE")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.dtype)
        return
    result = measure(args.side or list(SIDES), args.workload or list(WORKLOADS), args.rounds, args.dtype)
    write(result, args.json)
    text = markdown(result)
    if args.markdown:
        Path(args.markdown).write_text(text)
    print(text)


if __name__ == "__main__":
    main()

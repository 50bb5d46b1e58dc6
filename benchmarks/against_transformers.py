"""Phalanx against `transformers` on the demo model: the same work, the same type, the same machine, run in turn.

Each engine has a process of its own that stays loaded; the runs alternate A B A B, so that a change of the machine's
speed meets both. Prompts are distinct and random, answers greedy and of an exact length, tokens counted on both sides.

    python benchmarks/against_transformers.py --runs 5 --json result.json

decode1    one stream, 128 tokens in, 128 out: (tokens - 1) / (last - first token)
batch32    32 at once, 128 in, 64 out: output tokens / wall time
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import demo_for_transformers, setting, shown, summary, write

WORKLOADS = {"decode1": (1, 128, 128), "batch32": (32, 128, 64)}
FIGURES = {"decode1": "decode_tok_s", "batch32": "e2e_tok_s"}
LEAST_TOKEN, MOST_TOKEN = 100, 40_000


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randint(LEAST_TOKEN, MOST_TOKEN) for _ in range(length)] for _ in range(count)]


class Engine(Protocol):
    def run(self, prompts: list[list[int]], output_len: int) -> dict[str, float]:
        """`first`, `last` (seconds since the start of the run) and `tokens` (of answers)."""
        ...


class TransformersEngine:
    def __init__(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(demo_for_transformers(), dtype=torch.bfloat16).eval()

    def run(self, prompts: list[list[int]], output_len: int) -> dict[str, float]:
        from transformers import LogitsProcessor, LogitsProcessorList

        times: list[float] = []

        class Clock(LogitsProcessor):
            """Called once for each new token, when its logits are there."""

            def __call__(self, input_ids: Any, scores: Any) -> Any:
                times.append(time.perf_counter())
                return scores

        ids = self._torch.tensor(prompts)
        begin = time.perf_counter()
        with self._torch.inference_mode():
            out = self._model.generate(
                input_ids=ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=output_len,
                min_new_tokens=output_len,
                do_sample=False,
                logits_processor=LogitsProcessorList([Clock()]),
            )
        end = time.perf_counter()
        return {"first": times[0] - begin, "last": end - begin, "tokens": (out.shape[1] - ids.shape[1]) * len(prompts)}


class PhalanxEngine:
    def __init__(self) -> None:
        from phalanx import AsyncEngine, EngineConfig

        self._loop = asyncio.new_event_loop()
        # Distinct prompts find nothing in the prefix cache; it stays on, as people have it.
        config = EngineConfig.from_options(dtype="bfloat16", max_model_len=2048, kv_cache_memory_bytes="1G")
        self._engine = AsyncEngine(config)
        self._loop.run_until_complete(self._engine.start())

    def run(self, prompts: list[list[int]], output_len: int) -> dict[str, float]:
        return self._loop.run_until_complete(self._run(prompts, output_len))

    async def _run(self, prompts: list[list[int]], output_len: int) -> dict[str, float]:
        from phalanx import SamplingParams

        params = SamplingParams(max_tokens=output_len, temperature=0, ignore_eos=True)
        first, last, tokens = 0.0, 0.0, 0
        begin = time.perf_counter()

        async def one(prompt: list[int]) -> None:
            nonlocal first, last, tokens
            async for delta in self._engine.generate(prompt, params):
                if delta.outputs[0].token_ids:
                    last = time.perf_counter() - begin
                    first = first or last
                    tokens += len(delta.outputs[0].token_ids)

        await asyncio.gather(*(one(prompt) for prompt in prompts))
        return {"first": first, "last": last, "tokens": tokens}


ENGINES: dict[str, type[Engine]] = {"phalanx": PhalanxEngine, "transformers": TransformersEngine}


def child(name: str) -> None:
    """Serve runs: a JSON line in, a JSON line out."""
    engine = ENGINES[name]()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints must not get between the answers
    print("ready", file=answers)
    for line in sys.stdin:
        print(json.dumps(engine.run(**json.loads(line))), file=answers)


class Side:
    """One engine in its process."""

    def __init__(self, name: str):
        self.name = name
        command = [sys.executable, __file__, "--child", name]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        if self._line() != "ready":
            raise SystemExit(f"{name} did not start")

    def run(self, workload: str, seed: int) -> float:
        """The workload's figure in tokens a second."""
        count, input_len, output_len = WORKLOADS[workload]
        order = {"prompts": prompts(count, input_len, seed), "output_len": output_len}
        self._process.stdin.write(json.dumps(order) + "\n")  # type: ignore[union-attr]
        self._process.stdin.flush()  # type: ignore[union-attr]
        seen = json.loads(self._line())
        if seen["tokens"] != count * output_len:
            raise SystemExit(f"{self.name} gave {seen['tokens']} tokens where {count * output_len} were asked for")
        if FIGURES[workload] == "decode_tok_s":
            return (output_len - 1) / (seen["last"] - seen["first"])
        return seen["tokens"] / seen["last"]

    def close(self) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait(timeout=30)

    def _line(self) -> str:
        line = self._process.stdout.readline().strip()  # type: ignore[union-attr]
        if not line:
            raise SystemExit(f"{self.name} ended with exit code {self._process.wait()}")
        return line


def compare(runs: int, workloads: list[str]) -> dict[str, Any]:
    demo_for_transformers()
    sides = [Side(name) for name in ENGINES]
    result: dict[str, Any] = {"benchmark": "against transformers", "dtype": "bfloat16", "runs": runs, **setting()}
    try:
        for workload in workloads:
            samples: dict[str, list[float]] = {side.name: [] for side in sides}
            for number in range(runs + 1):  # the first one warms up
                for side in sides:
                    rate = side.run(workload, seed=number)
                    if number:
                        samples[side.name].append(round(rate, 2))
                    print(f"{workload} {side.name:<13}{rate:8.1f} tok/s", file=sys.stderr)
            pairs = [a / b for a, b in zip(samples["phalanx"], samples["transformers"], strict=True)]
            result[workload] = {
                "figure": FIGURES[workload],
                **{name: {**summary(values), "samples": values} for name, values in samples.items()},
                "ratio": {key: round(value, 3) for key, value in summary(pairs).items()},
            }
    finally:
        for side in sides:
            side.close()
    return result


def markdown(result: dict[str, Any]) -> str:
    rows = ["| work | Phalanx, tok/s | transformers, tok/s | ratio |", "|---|---:|---:|---:|"]
    for workload in filter(result.__contains__, WORKLOADS):
        row = result[workload]
        rows.append(
            f"| {workload} | {shown(row['phalanx'])} | {shown(row['transformers'])} | {shown(row['ratio'], 2)} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="default: all")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--child", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child)
        return
    result = compare(args.runs, args.workload or list(WORKLOADS))
    write(result, args.json)
    print(markdown(result))


if __name__ == "__main__":
    main()

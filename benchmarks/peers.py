"""Phalanx against other engines on the demo model: the same file, the same work, the same machine, run in turn.

    python benchmarks/peers.py --peers DIR --runs 5 --json result.json

`DIR` has an environment for each of them (DIR/vllm, DIR/llamacpp, DIR/openvino: a Python each with that engine and
nothing of ours); nothing is installed here. Without it the engines are Phalanx and `transformers`. Each engine has a
process of its own that stays loaded and stands still (SIGSTOP) while another one runs; the runs alternate, so that a
change of the machine's speed meets all, and the machine's own limits are measured in each round beside them.

decode1      one stream, 128 tokens in, 128 out: 127 / (seconds of the whole - seconds with one token out)
prefill1024  1,024 tokens in, one out: tokens in / seconds
batch8, batch32   that many streams, 128 in, 64 out: tokens out / seconds
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import demo_for_transformers, setting, shown, summary, write
from phalanx.checkpoint.locate import locate


@dataclass(frozen=True)
class Workload:
    count: int
    input_len: int
    output_len: int
    figure: str

    def rate(self, side: Side, seed: int) -> float:
        """Tokens a second."""
        seconds = side.seconds(self.count, self.input_len, self.output_len, seed)
        if self.figure == "decode":
            first = side.seconds(self.count, self.input_len, 1, seed)
            return self.count * (self.output_len - 1) / (seconds - first)
        return self.count * (self.input_len if self.figure == "prefill" else self.output_len) / seconds


WORKLOADS = {
    "decode1": Workload(1, 128, 128, "decode"),
    "prefill1024": Workload(1, 1024, 1, "prefill"),
    "batch8": Workload(8, 128, 64, "e2e"),
    "batch32": Workload(32, 128, 64, "e2e"),
}
BF16, FILE = "bf16", "Q4_1"
SIDES = {
    "phalanx bf16": ("phalanx expanded", "", BF16),
    "phalanx Q4_1": ("phalanx", "", FILE),
    "transformers": ("transformers", "", BF16),
    "vllm": ("vllm", "vllm", BF16),
    "llama.cpp": ("llama.cpp", "llamacpp", FILE),
    "openvino": ("openvino", "openvino", FILE),
}
"""By name: the engine, the folder of its environment (empty: ours), and the type of weights that it computes with."""
GOALS = {
    "decode1": {("phalanx bf16", "vllm"): 2.2, ("phalanx Q4_1", "llama.cpp"): 2.2, ("phalanx Q4_1", "openvino"): 2.2},
    "prefill1024": {("phalanx bf16", "vllm"): 1.0, ("phalanx Q4_1", "openvino"): 1.2, ("phalanx Q4_1", "llama.cpp"): 5},
    "batch8": {},
    "batch32": {("phalanx bf16", "vllm"): 1.15, ("phalanx Q4_1", "openvino"): 1.3},
}
BYTES = {BF16: 269e6, FILE: 96.5e6}
"""Of weights that one token reads."""
FLOPS = 0.21e9
"""Of a token in the layers, attention not counted."""


SETTLE_S = 2.0
"""After the start, for what an engine without work still does: Phalanx makes the beginning of its cache resident."""


class Side:
    """One engine in its process."""

    def __init__(self, name: str, engine: str, python: str, model: str):
        self.name = name
        began = time.perf_counter()
        self._process = subprocess.Popen(
            [python, "-P", str(Path(__file__).with_name("peer_engines.py")), engine, model],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        )  # fmt: skip
        self.ready_s = self._answer()["ready_s"]
        self.start_s = time.perf_counter() - began
        time.sleep(SETTLE_S)
        self._signal(signal.SIGSTOP)

    @contextmanager
    def awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def seconds(self, count: int, input_len: int, output_len: int, seed: int) -> float:
        order = {"count": count, "input_len": input_len, "output_len": output_len, "seed": seed}
        self._process.stdin.write(json.dumps(order) + "\n")  # type: ignore[union-attr]
        self._process.stdin.flush()  # type: ignore[union-attr]
        answer = self._answer()
        if answer["tokens"] != count * output_len:
            raise SystemExit(f"{self.name} gave {answer['tokens']} tokens where {count * output_len} were asked for")
        return float(answer["seconds"])

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait(timeout=30)

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline().strip()  # type: ignore[union-attr]
        if not line:
            raise SystemExit(f"{self.name} ended with exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def compare(names: list[str], peers: Path | None, runs: int, workloads: list[str]) -> dict[str, Any]:
    models = {BF16: str(demo_for_transformers()), FILE: str(locate(None).weight_files[0])}
    result: dict[str, Any] = {"benchmark": "peers", "runs": runs, **setting(), "start": {}}
    sides: list[Side] = []
    limits = Side("limits", "limits", sys.executable, "")
    try:
        for name in names:
            engine, folder, kind = SIDES[name]
            python = str(peers / folder / "bin" / "python") if peers is not None and folder else sys.executable
            sides.append(Side(name, engine, python, models[FILE if engine.startswith("phalanx") else kind]))
            result["start"][name] = {"command": round(sides[-1].start_s, 2), "engine": round(sides[-1].ready_s, 2)}
            print(f"{name:<14} ready after {sides[-1].start_s:.1f} s", file=sys.stderr)
        for workload in workloads:
            result[workload] = _measure(sides, limits, workload, runs)
    finally:
        for side in [*sides, limits]:
            side.close()
    return result


def _measure(sides: list[Side], limits: Side, workload: str, runs: int) -> dict[str, Any]:
    rates: dict[str, list[float]] = {side.name: [] for side in sides}
    memory, products = [], []
    for number in range(runs + 1):  # the first one warms up
        with limits.awake():
            read, computed = limits.seconds(1, 1, 1, 0), limits.seconds(2, 1, 4, 0)
        if number:
            memory.append((1 << 29) / read / 1e9)
            products.append(4 * 2 * 2048**3 / computed / 1e9)
        for side in sides:
            with side.awake():
                rate = WORKLOADS[workload].rate(side, seed=number)
            if number:
                rates[side.name].append(round(rate, 2))
            print(f"{workload} {side.name:<14}{rate:8.1f} tok/s", file=sys.stderr)
    ratios = {
        f"{ours} / {theirs}": {
            **summary([a / b for a, b in zip(rates[ours], rates[theirs], strict=True)]), "goal": goal,
        }
        for (ours, theirs), goal in GOALS[workload].items() if ours in rates and theirs in rates
    }  # fmt: skip
    return {
        "rates": {name: {**summary(values), "samples": values} for name, values in rates.items()},
        "ratios": ratios,
        "limits": {"memory_gb_s": summary(memory), "bf16_gflop_s": summary(products)},
    }


def markdown(result: dict[str, Any]) -> str:
    names = list(result["start"])
    rows = ["| work | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for workload in filter(result.__contains__, WORKLOADS):
        rates = result[workload]["rates"]
        rows.append(f"| {workload}, tok/s | " + " | ".join(shown(rates[name]) for name in names) + " |")
    starts = (f"{result['start'][name]['command']:.1f} s" for name in names)
    rows += [
        f"| command to first token | {' | '.join(starts)} |",
        "",
        "| ratio | work | median | goal |",
        "|---|---|---:|---:|",
    ]
    for workload in filter(result.__contains__, WORKLOADS):
        for pair, ratio in result[workload]["ratios"].items():
            rows.append(f"| {pair} | {workload} | {shown(ratio, 2)} | {ratio['goal']} |")
    rows += ["", "| of the machine's limit in that run | decode1 | prefill1024 |", "|---|---:|---:|"]
    for name in names:
        shares = [_share(result, name, workload) for workload in ("decode1", "prefill1024")]
        rows.append(f"| {name} | {' | '.join(shares)} |")
    return "\n".join(rows)


def _share(result: dict[str, Any], name: str, workload: str) -> str:
    if workload not in result:
        return ""
    limits, rate = result[workload]["limits"], result[workload]["rates"][name]["median"]
    if workload == "decode1":
        limit = limits["memory_gb_s"]["median"] * 1e9 / BYTES[SIDES[name][2]]
        return f"{rate / limit:.0%} of {limit:.0f} tok/s (reading {limits['memory_gb_s']['median']:.0f} GB/s)"
    limit = limits["bf16_gflop_s"]["median"] * 1e9 / FLOPS
    return f"{rate / limit:.0%} of {limit:.0f} tok/s (bf16 {limits['bf16_gflop_s']['median']:.0f} GFLOP/s)"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peers", type=Path, metavar="DIR", help="where the other engines' environments are")
    parser.add_argument("--engine", choices=SIDES, action="append", help="default: all that are there")
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="default: all")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    here = [
        name for name, (_, folder, _) in SIDES.items() if not folder or (args.peers and (args.peers / folder).exists())
    ]
    result = compare(args.engine or here, args.peers, args.runs, args.workload or list(WORKLOADS))
    write(result, args.json)
    print(markdown(result))


if __name__ == "__main__":
    main()

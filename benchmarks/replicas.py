"""Two replicas with a core each against one replica with both cores: 32 streams, the same work, run in turn.

    python benchmarks/replicas.py --rounds 5 --json result.json

Each side is started for it, alone on the machine; in a round both run, one after the other and in turns the first, and
the ratio is taken within the round. The figure is that of `batch32` in executors.py: output tokens over wall
time of 32 requests at once, 128 tokens in, 64 out. In float32 the tokens must be equal.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import setting, shown, summary, write
from benchmarks.executors import child, run_in_turns

ONE, TWO = "one replica, two cores", "two replicas, one core each"
SIDES: dict[str, tuple[int, dict[str, Any]]] = {ONE: (2, {}), TWO: (2, {"data_parallel_size": 2})}
"""By name: cores and options."""
WORKLOAD = "batch32"
HOPED = 0.95


def measure(rounds: int, dtype: str) -> dict[str, Any]:
    figures = run_in_turns([ONE, TWO], [WORKLOAD], rounds, dtype, __file__)[WORKLOAD]
    ratios = [two / one for one, two in zip(figures[ONE], figures[TWO], strict=True)]
    return {
        "benchmark": "replicas",
        "workload": WORKLOAD,
        "dtype": dtype,
        "rounds": rounds,
        "tok_s": {name: summary(values) for name, values in figures.items()},
        "ratio": {**summary(ratios), "hoped": HOPED},
        **setting(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.dtype, SIDES)
        return
    result = measure(args.rounds, args.dtype)
    write(result, args.json)
    for name, figures in result["tok_s"].items():
        print(f"{name}: {shown(figures)} tokens/s")
    print(f"ratio: {shown(result['ratio'], 2)}, hoped for {HOPED}")


if __name__ == "__main__":
    main()

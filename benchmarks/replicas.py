"""Two replicas with a core each against one replica with both cores: 32 streams, the same work, run in turn.

    python benchmarks/replicas.py --rounds 5 --json result.json

Each side is a process of its own with the demo model loaded; in a round both run, one after the other and in turns the
first, and the ratio is taken within the round. The figure is that of `batch32` in executors.py: output tokens over wall
time of 32 requests at once, 128 tokens in, 64 out. In float32 the tokens must be equal.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import setting, shown, summary, write
from benchmarks.executors import Side, child

ONE, TWO = "one replica, two cores", "two replicas, one core each"
SIDES: dict[str, tuple[int, dict[str, Any]]] = {ONE: (2, {}), TWO: (2, {"data_parallel_size": 2})}
"""By name: cores and options."""
WORKLOAD = "batch32"
HOPED = 0.95


def measure(rounds: int, dtype: str) -> dict[str, Any]:
    sides = [Side(name, dtype, __file__) for name in SIDES]
    figures: dict[str, list[float]] = {name: [] for name in SIDES}
    try:
        for number in range(-1, rounds):  # one that does not count
            answers = []
            for side in sides if number % 2 else sides[::-1]:
                figure, tokens = side.run(WORKLOAD, seed=number + 1)
                answers.append(tokens)
                if number >= 0:
                    figures[side.name].append(figure)
            if dtype == "float32" and answers[0] != answers[1]:
                raise SystemExit("the sides' tokens differ")
    finally:
        for side in sides:
            side.close()
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

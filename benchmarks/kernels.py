"""Products with packed weights beside PyTorch's, and beside what the machine can do at all.

For each shape of the demo model and each number of rows: our product and PyTorch's best (oneDNN with weights packed
beforehand in bfloat16, `F.linear` in float32), in turns within one process. As in a model, each product has weights
that no cache holds: it goes from matrix to matrix of a set larger than the cache, until there are so many rows that
weights no longer matter. The limits, in turns with them too: bytes per second of a sum over such a set, and operations
per second of the best product of 2048³ that either side has.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import setting, summary, write
from phalanx.kernels.library import choice, native, use_threads
from phalanx.kernels.matmul import PackedMatrix
from phalanx.kernels.weight_memory import WeightMemory

SHAPES = {"qkv": (960, 576), "out": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 1024)
TYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

_SET_BYTES = 1 << 27
"""Of the matrices that a product goes through."""
_SMALL = 64
"""Products of fewer rows wait for weights."""


class Limit:
    """What the machine can do, by type: a stream of reads, and a product without anything to wait for."""

    def __init__(self, dtype: torch.dtype):
        self.memory = WeightMemory().empty((_SET_BYTES // 4,), torch.float32).fill_(1.0)
        self.x = torch.randn(2048, 2048).to(dtype)
        self.ours = PackedMatrix(2048, 2048, dtype, WeightMemory())
        self.ours.fill(self.x)

    def read(self) -> None:
        self.memory.sum()

    def multiply(self) -> None:
        self.ours.multiply(self.x)

    def multiply_torch(self) -> None:
        F.linear(self.x, self.x)


class Products:
    """x times each of a set of matrices, by us and by PyTorch."""

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype):
        self.outputs, self.inputs, self.dtype = outputs, inputs, dtype
        self.nbytes = outputs * inputs * dtype.itemsize
        memory = WeightMemory()
        self.ours, self.theirs = [], []
        for _ in range(max(2, _SET_BYTES // self.nbytes)):
            plain = torch.randn(outputs, inputs).to(dtype)
            matrix = PackedMatrix(outputs, inputs, dtype, memory)
            matrix.fill(plain)
            self.ours.append(matrix)
            self.theirs.append(torch.ops.mkldnn._reorder_linear_weight(plain) if dtype == torch.bfloat16 else plain)

    def sides(self, rows: int) -> tuple[int, Callable[[], None], Callable[[], None]]:
        """How many matrices a call goes through, and the two calls."""
        x = torch.randn(rows, self.inputs).to(self.dtype)
        operations = 2 * rows * self.outputs * self.inputs
        count = len(self.ours) if rows < _SMALL else max(1, min(len(self.ours), int(4e9) // operations))

        def ours() -> None:
            for matrix in self.ours[:count]:
                matrix.multiply(x)

        def theirs() -> None:
            for weight in self.theirs[:count]:
                if self.dtype == torch.bfloat16:
                    torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
                else:
                    F.linear(x, weight)

        return count, ours, theirs


def options(description: str | None, runs: int) -> argparse.ArgumentParser:
    """What every comparison of kernels takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=runs)
    parser.add_argument("--json", metavar="FILE")
    return parser


def use_kernels(threads: int) -> None:
    if native() is None:
        raise SystemExit("the native library was not built")
    torch.set_num_threads(threads)
    use_threads(threads)
    print(choice().reason)


def seconds(call: Callable[[], None], cpu: bool) -> float:
    clock = time.process_time if cpu else time.perf_counter
    begun = clock()
    call()
    return clock() - begun


def in_turns(calls: dict[str, Callable[[], None]], runs: int, cpu: bool) -> dict[str, list[float]]:
    for call in calls.values():
        call()
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(runs):
        for name, call in calls.items():
            found[name].append(seconds(call, cpu))
    return found


def measure(dtype: torch.dtype, runs: int, cpu: bool) -> list[dict[str, Any]]:
    results, limit = [], Limit(dtype)
    for shape, (outputs, inputs) in SHAPES.items():
        products = Products(outputs, inputs, dtype)
        for rows in ROWS:
            count, ours, theirs = products.sides(rows)
            calls = {"ours": ours, "torch": theirs, "read": limit.read}
            if rows >= _SMALL:
                calls |= {"best": limit.multiply, "best_torch": limit.multiply_torch}
            found = in_turns(calls, runs, cpu)
            us = summary([1e6 * s / count for s in found["ours"]])
            read_rate = _SET_BYTES / summary(found["read"])["median"]
            result: dict[str, Any] = {
                "shape": shape,
                "outputs": outputs,
                "inputs": inputs,
                "rows": rows,
                "us": us,
                "torch_us": summary([1e6 * s / count for s in found["torch"]]),
                "gbytes_per_s": products.nbytes / us["median"] / 1e3,
                "gflops": 2 * rows * outputs * inputs / us["median"] / 1e3,
                "read_limit_gbytes_per_s": read_rate / 1e9,
            }
            result["times_torch"] = result["torch_us"]["median"] / us["median"]
            result["of_read_limit"] = result["gbytes_per_s"] * 1e9 / read_rate
            if rows >= _SMALL:
                best = 2 * 2048**3 / min(summary(found[side])["median"] for side in ("best", "best_torch"))
                result["product_limit_gflops"] = best / 1e9
                result["of_product_limit"] = result["gflops"] * 1e9 / best
            results.append(result)
            share = f"{result['of_read_limit']:4.0%} of the reads"
            if rows >= _SMALL:
                share = f"{result['of_product_limit']:4.0%} of the best"
            print(
                f"{shape:8}{rows:5} rows {us['median']:9.0f} us {result['gbytes_per_s']:6.1f} GB/s "
                f"{result['gflops']:6.0f} GFLOP/s, {share}, {result['times_torch']:.2f} x torch",
                flush=True,
            )
    return results


def main() -> None:
    parser = options(__doc__, runs=5)
    parser.add_argument("--types", default="bfloat16,float32")
    parser.add_argument("--cpu-time", action="store_true", help="count the process's time, where other work runs too")
    arguments = parser.parse_args()
    use_kernels(arguments.threads)
    products = {}
    for name in arguments.types.split(","):
        print(name)
        products[name] = measure(TYPES[name], arguments.runs, arguments.cpu_time)
    write({**setting(), "kernels": choice().reason, "threads": arguments.threads, "products": products}, arguments.json)


if __name__ == "__main__":
    main()

"""Products with quantised weights, kind by kind: what each costs beside the others, for the same matrix.

All kinds take turns within one process, each going through a set of matrices that no cache holds. Named as the kernels
name them; INT4/128 has a scale and a zero for each 128 inputs, as GPTQ, AWQ and w4a16 checkpoints have. Bytes are those
of the packed matrices.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import setting, shown, summary, write
from benchmarks.kernels import in_turns, options, use_kernels
from phalanx.kernels.block_layout import BLOCK, KINDS, shift_of
from phalanx.kernels.block_matmul import BlockProduct, IntegerRows, PackedBlocks, pack_blocks, pack_integers
from phalanx.kernels.library import choice
from phalanx.kernels.weight_memory import WeightMemory

NAMES = ("Q4_0", "Q4_1", "Q4_K", "INT4/32", "INT4/128", "INT4", "INT8")
ROWS = (1, 4, 32, 256)
OUTPUTS, INPUTS = 3072, 2048
_SET_BYTES = 1 << 27


def matrix(name: str, memory: WeightMemory) -> PackedBlocks:
    kind, _, group = name.partition("/")
    if kind == "INT8":
        integers = torch.randint(-127, 128, (OUTPUTS, INPUTS), dtype=torch.int8)
        return pack_integers(IntegerRows(kind, integers, torch.rand(OUTPUTS, 1)), memory)
    if kind == "INT4":
        sets = -(-INPUTS // BLOCK >> shift_of(kind, int(group or 0)))
        integers, zeros = (torch.randint(0, 16, (OUTPUTS, n), dtype=torch.uint8) for n in (INPUTS, sets))
        return pack_integers(IntegerRows(kind, integers, torch.rand(OUTPUTS, sets), zeros, int(group or 0)), memory)
    width = INPUTS // KINDS[kind].elements * KINDS[kind].nbytes
    return pack_blocks(kind, torch.randint(0, 60, (OUTPUTS, width), dtype=torch.uint8), (0, INPUTS), memory)


def product(matrices: list[BlockProduct], x: torch.Tensor) -> Callable[[], None]:
    def call() -> None:
        for each in matrices:
            each(x, None)

    return call


def main() -> None:
    arguments = options(__doc__, runs=7).parse_args()
    use_kernels(arguments.threads)
    memory, sets = WeightMemory(), {}
    for name in NAMES:
        first = BlockProduct([matrix(name, memory)])
        more = (BlockProduct([matrix(name, memory)]) for _ in range(_SET_BYTES // first.nbytes))
        sets[name] = [first, *more]
    results = []
    for rows in ROWS:
        x = torch.randn(rows, INPUTS).bfloat16()
        taken = {name: found if rows < 32 else found[:2] for name, found in sets.items()}
        found = in_turns({name: product(those, x) for name, those in taken.items()}, arguments.runs, False)
        for name, seconds in found.items():
            nbytes, us = sets[name][0].nbytes, summary([1e6 * s / len(taken[name]) for s in seconds])
            results.append({"kind": name, "rows": rows, "bits": 8 * nbytes / OUTPUTS / INPUTS, "us": us})
            rate = nbytes / us["median"] / 1e3
            print(f"{name:9}{rows:4} rows {shown(us, 0):>22} us, {rate:5.1f} GB/s, {results[-1]['bits']:.2f} bits")
    write({**setting(), "kernels": choice().reason, "threads": arguments.threads, "products": results}, arguments.json)


if __name__ == "__main__":
    main()

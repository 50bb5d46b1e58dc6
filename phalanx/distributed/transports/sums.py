"""What the transports share: sums in rank order, the numbers of dtypes, and the words for what a rank is doing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8, torch.int8, torch.int16,
    torch.float64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
"""A dtype travels as its place in here."""

ALL_REDUCE, GATHER, SCATTER, TO_ALL, BROADCAST, BARRIER, SEND = range(1, 8)
OPERATIONS = ("nothing", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier", "send")

_NARROW = (torch.bfloat16, torch.float16)


def add_up(pieces: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """The sum in the order of `pieces`; narrow floats of more than two ranks are rounded once, at the end.

    With two pieces `out` may be one of them.
    """
    if len(pieces) > 2 and out.dtype in _NARROW:
        total = pieces[0].float()
        for piece in pieces[1:]:
            total += piece
        out.copy_(total)
        return
    torch.add(pieces[0], pieces[1], out=out)
    for piece in pieces[2:]:
        out += piece


def slices(length: int, ranks: int) -> list[tuple[int, int]]:
    """`length` entries in contiguous ranges, one a rank, as equal as can be."""
    return list(pairwise(length * r // ranks for r in range(ranks + 1)))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory. (A single entry counts as contiguous whatever its stride, hence `as_strided`.)"""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def matrix(shape: torch.Size, dim: int) -> tuple[int, int]:
    """A shape seen as rows, one for each index before `dim`: how many, and how many entries each index of `dim` has in
    a row. Raises ValueError for a dimension that there is not."""
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"a tensor of {len(shape)} dimensions has no dimension {dim}")
    dim %= len(shape)
    return shape[:dim].numel(), shape[dim + 1 :].numel()


def described(operation: int, dtype: int, nbytes: int) -> str:
    """For messages about ranks that disagree."""
    name = OPERATIONS[operation] if operation < len(OPERATIONS) else "garbage"
    if name in ("nothing", "barrier", "garbage"):
        return name
    kind = str(DTYPES[dtype]).removeprefix("torch.") if dtype < len(DTYPES) else "garbage"
    return f"{name} of {nbytes} bytes of {kind}"

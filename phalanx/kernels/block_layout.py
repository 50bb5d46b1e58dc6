"""Sizes of packed block matrices (native/block_matmul.hpp has the layout), without torch, for planning memory."""

from __future__ import annotations

from typing import NamedTuple

BLOCK = 32
"""Inputs that share an activation's scale; blocks of matrices are multiples of it."""

_LANES = 16


class BlockKind(NamedTuple):
    """One kind of packed matrix; it is named as the file's type."""

    number: int
    elements: int
    """Of a block in a file."""
    nbytes: int
    """Of a block in a file."""
    bits: int
    scale_bytes: int
    """Of 32 inputs and 16 outputs."""
    super_bytes: int
    """Of 256 inputs and 16 outputs."""
    tail_bytes: int
    """Of 16 outputs."""


KINDS: dict[str, BlockKind] = {
    "Q4_0": BlockKind(0, 32, 18, 4, 32, 0, 0),
    "Q4_1": BlockKind(1, 32, 20, 4, 64, 0, 0),
    "Q5_0": BlockKind(2, 32, 22, 5, 32, 0, 0),
    "Q5_1": BlockKind(3, 32, 24, 5, 64, 0, 0),
    "Q8_0": BlockKind(4, 32, 34, 8, 32, 0, 0),
    "Q4_K": BlockKind(5, 256, 144, 4, 32, 64, 0),
    "Q5_K": BlockKind(6, 256, 176, 5, 32, 64, 0),
    "Q6_K": BlockKind(7, 256, 210, 6, 32, 32, 0),
    "INT8": BlockKind(8, 32, 32, 8, 0, 0, 64),
}


def packed_bytes(kind: str, outputs: int, columns: tuple[int, int]) -> int:
    """Bytes of a packed matrix of `outputs` rows and the columns `columns` of a file's matrix. Blocks of 32 that are
    cut are whole in it."""
    layout = KINDS[kind]
    blocks = -(-columns[1] // BLOCK) - columns[0] // BLOCK
    if columns[0] == columns[1]:
        blocks = 0
    phase = columns[0] % layout.elements // BLOCK
    group = blocks * (64 * layout.bits + layout.scale_bytes)
    group += -(-(blocks + phase) // 8) * layout.super_bytes + layout.tail_bytes
    return -(-outputs // _LANES) * (-(-group // 64) * 64)

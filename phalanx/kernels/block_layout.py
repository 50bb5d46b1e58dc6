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
    """Of the inputs that share it and 16 outputs."""
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
    "INT4": BlockKind(9, 32, 32, 4, 0, 80, 0),
}

_ALL = 31
"""The shift at which all inputs of a row share what belongs to several blocks."""


def shift_of(kind: str, group: int = 0) -> int:
    """The logarithm of the blocks that share what is kept for several of them. INT4 with scales for each `group` inputs
    keeps them for the largest power of two of blocks that a group is a multiple of; 0 is a group of all inputs."""
    if kind != "INT4":
        return 3
    blocks = group // BLOCK
    return (blocks & -blocks).bit_length() - 1 if blocks else _ALL


def place_in_group(kind: str, start: int, group: int = 0) -> tuple[int, int]:
    """Where column `start` of a matrix is in the inputs that share something: blocks of 32 before it, and its place in
    a block."""
    if kind == "INT4":
        return (start % (BLOCK << shift_of(kind, group)) // BLOCK, start % BLOCK) if group else (0, 0)
    return start % KINDS[kind].elements // BLOCK, start % BLOCK if kind != "INT8" else 0


def packed_bytes(kind: str, outputs: int, columns: tuple[int, int], group: int = 0) -> int:
    """Bytes of a packed matrix of `outputs` rows and the columns `columns` of a file's matrix; INT4 has scales for each
    `group` of these (0: one). Blocks of 32 that are cut are whole in it."""
    layout, (start, stop) = KINDS[kind], columns
    phase, lead = place_in_group(kind, start, group) if start < stop else (0, 0)
    blocks = -(-(lead + stop - start) // BLOCK)
    each = blocks * (64 * layout.bits + layout.scale_bytes)
    each += -(-(blocks + phase) >> shift_of(kind, group)) * layout.super_bytes + layout.tail_bytes
    return -(-outputs // _LANES) * (-(-each // 64) * 64)

"""Products with quantised weights that stay as small integers, and rows of such matrices as numbers.

Activations are rounded to int8, one scale for each block of 32 numbers of a row; the integers of a block are multiplied
and added exactly, and blocks are added in float32 along the row. A row's result depends on no other row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F

from phalanx.kernels.block_layout import BLOCK, KINDS, packed_bytes, place_in_group, shift_of
from phalanx.kernels.library import native
from phalanx.kernels.weight_memory import WeightMemory

NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True)
class IntegerRows:
    """Rows of a matrix as small integers, scale · (integer - zero): INT8, whose zero is 0, or INT4."""

    kind: str
    integers: torch.Tensor
    """int8 for INT8, uint8 below 16 for INT4: [outputs, inputs], and in front of them for INT4 in groups the numbers
    between the last multiple of 32 columns and `start`."""
    scales: torch.Tensor
    """float32 [outputs, 1]; for INT4 in groups [outputs, as many sets of 2^shift blocks as the columns are in]."""
    zeros: torch.Tensor | None = None
    """uint8, shaped as the scales; None for INT8."""
    group: int = 0
    """Inputs that share a scale, a multiple of 32; 0 for all of them."""
    start: int = 0
    """Column of the whole matrix that is the first of these."""
    order: torch.Tensor | None = None
    """int64 [inputs of the integers]: the column of the activations that belongs to each; -1 for none, where the
    integer is its zero."""


@dataclass(frozen=True)
class PackedBlocks:
    """A matrix [outputs, inputs] in the kernels' order."""

    data: torch.Tensor
    """uint8, 64-byte aligned."""
    kind: str
    outputs: int
    inputs: int
    lead: int
    """Numbers of the first block that are before the matrix's first column."""
    phase: int
    """Blocks of 32 that belong with the first to what several share, and are before it."""
    shift: int
    """The logarithm of the blocks that share something."""
    order: torch.Tensor | None = None
    """As in `IntegerRows`; the inputs are then the integers'."""


def pack_blocks(
    kind: str, raw: torch.Tensor, columns: tuple[int, int], memory: WeightMemory | None = None
) -> PackedBlocks:
    """The columns of `raw`, which holds rows of a file's blocks: uint8 [outputs, bytes], neighbours in a row touching.

    The result is taken from `memory`. Raises ValueError for what does not fit, RuntimeError without the native library.
    """
    layout, (start, stop) = KINDS[kind], columns
    width = raw.shape[1] // layout.nbytes * layout.elements
    whole = raw.shape[1] % layout.nbytes == 0
    if raw.dim() != 2 or raw.dtype is not torch.uint8 or not whole or not 0 <= start <= stop <= width:
        raise ValueError(f"columns {start} to {stop} are not in {kind} rows of {raw.shape[1]} bytes")
    if start >= layout.elements:
        raise ValueError("the first column has to be in the first block")
    return _pack(kind, raw, columns, memory)


def pack_integers(rows: IntegerRows, memory: WeightMemory | None = None) -> PackedBlocks:
    """The same of integers that come one in a byte."""
    integers, scales, zeros, start, group = rows.integers, rows.scales, rows.zeros, rows.start, rows.group
    phase, lead = place_in_group(rows.kind, start, group)
    inputs = integers.shape[1] - lead
    blocks = -(-integers.shape[1] // BLOCK) + phase
    sets = 1 if rows.kind == "INT8" else -(-blocks >> shift_of(rows.kind, group))
    expected = torch.int8 if rows.kind == "INT8" else torch.uint8
    if integers.dim() != 2 or integers.dtype is not expected or inputs < 0 or group % BLOCK:
        raise ValueError(f"{rows.kind} takes {expected} [outputs, inputs] in groups of a multiple of {BLOCK}")
    if scales.shape != (len(integers), sets) or scales.dtype is not torch.float32:
        raise ValueError(f"{rows.kind} needs {sets} float32 scale(s) for each output")
    if (zeros is None) != (rows.kind == "INT8"):
        raise ValueError("INT4 has zeros, INT8 none")
    if zeros is not None and (zeros.shape != scales.shape or zeros.dtype is not torch.uint8):
        raise ValueError("zeros are uint8, as many as scales")
    if rows.order is not None and (rows.order.shape != (inputs,) or rows.order.dtype is not torch.int64):
        raise ValueError("the order has an int64 for each input")
    beside = scales.contiguous(), None if zeros is None else zeros.contiguous()
    return _pack(rows.kind, integers, (start, start + inputs), memory, group, beside, rows.order)


def _pack(
    kind: str, raw: torch.Tensor, columns: tuple[int, int], memory: WeightMemory | None, group: int = 0,
    beside: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None), order: torch.Tensor | None = None,
) -> PackedBlocks:  # fmt: skip
    library = _library()
    if raw.stride(1) != 1 or raw.device.type != "cpu":
        raw = raw.cpu().contiguous()
    outputs, inputs = raw.shape[0], columns[1] - columns[0]
    phase, lead = place_in_group(kind, columns[0], group) if inputs else (0, 0)
    shift = shift_of(kind, group)
    data = (memory or WeightMemory()).empty((packed_bytes(kind, outputs, columns, group),), torch.uint8)
    if data.numel():
        scales, zeros = (0 if tensor is None else tensor.data_ptr() for tensor in beside)
        step = raw.stride(0) if outputs > 1 else raw.shape[1]
        width = lead + inputs if inputs else 0
        library.block_pack(
            KINDS[kind].number, raw.data_ptr(), step, outputs, width, phase, shift, scales, zeros, data.data_ptr()
        )
    return PackedBlocks(data, kind, outputs, inputs, lead, phase, shift, order)


def same_columns(one: PackedBlocks, other: PackedBlocks) -> bool:
    """Whether two matrices can be multiplied together: the same inputs, in the same order."""
    if (one.inputs, one.lead) != (other.inputs, other.lead) or (one.order is None) != (other.order is None):
        return False
    return one.order is other.order or (
        one.order is not None and other.order is not None and torch.equal(one.order, other.order)
    )


class BlockProduct:
    """Matrices that are multiplied with the same activations; their outputs stand side by side in the result."""

    def __init__(self, matrices: Sequence[PackedBlocks]):
        """Raises ValueError when the matrices have not the same columns, RuntimeError without the native library."""
        self.matrices = tuple(matrices)
        first = matrices[0]
        self.inputs, self.lead = first.inputs, first.lead
        self._inner = first.inputs
        if not all(same_columns(first, m) for m in matrices):
            raise ValueError("all matrices of a product have the same columns")
        self._order, self._gaps = first.order, False
        if first.order is not None:
            self.inputs, self._gaps = int(first.order.max()) + 1, bool((first.order < 0).any())
            # Gaps take the column of zeros that is put behind the others.
            self._order = first.order.where(first.order >= 0, self.inputs)
        self._library = _library()
        parts, column = [], 0
        for m in matrices:
            parts.append([m.data.data_ptr(), KINDS[m.kind].number, m.outputs, column, m.phase, m.shift])
            column += m.outputs
        self.outputs = column
        self._parts = torch.tensor(parts, dtype=torch.int64)
        self.parts = self._parts.data_ptr(), len(parts)
        """Where they are described, for the library, and how many."""

    @property
    def nbytes(self) -> int:
        return sum(m.data.nbytes for m in self.matrices)

    @property
    def reorders(self) -> bool:
        """Its inputs are taken in another order than that in which they come."""
        return self._order is not None

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """x [T, inputs] of any type in `NUMBERS`, whose rows may lie apart, times the matrices: [T, outputs] in x's
        type, or `dtype`. `bias` is [outputs]. Raises ValueError for what does not fit."""
        if self._order is not None and x.shape[1] == self.inputs:
            x = (F.pad(x, (0, 1)) if self._gaps else x).index_select(1, self._order)
        rows, width = x.shape
        step, one = x.stride()
        if width != self._inner or one != 1 or x.dtype not in NUMBERS or not x.is_cpu:
            raise ValueError(f"x has to be numbers [T, {self.inputs}], each row contiguous")
        address, bias_type = 0, 0
        if bias is not None:
            if bias.numel() != self.outputs or bias.dtype not in NUMBERS or not bias.is_contiguous():
                raise ValueError(f"bias has to be numbers [{self.outputs}]")
            address, bias_type = bias.data_ptr(), NUMBERS[bias.dtype]
        y = torch.empty(rows, self.outputs, dtype=dtype or x.dtype)
        self._library.block_matmul(
            x.data_ptr(), step, rows, width, self.lead, NUMBERS[x.dtype], *self.parts, y.data_ptr(),
            self.outputs, NUMBERS[y.dtype], address, bias_type,
        )  # fmt: skip
        return y

    def rows(self, ids: torch.Tensor, start: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Rows `ids` (int64 [T]) - `start` of the matrices, one below the other, as numbers: [T, inputs], rounded from
        float32 to `dtype`. Zeros for ids outside. Raises ValueError for anything but a vector of int64."""
        if ids.dtype is not torch.int64 or ids.dim() != 1 or not ids.is_contiguous() or not ids.is_cpu:
            raise ValueError("ids have to be a contiguous vector of int64")
        y = torch.empty(len(ids), self._inner, dtype=dtype)
        self._library.block_unpack(
            ids.data_ptr(), len(ids), start, self._inner, self.lead, *self.parts, y.data_ptr(), NUMBERS[dtype]
        )
        if self._order is not None:
            y = y.new_empty(len(ids), self.inputs + 1).index_copy_(1, self._order, y)[:, : self.inputs]
        return y


def block_matmul_twin(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, lead: int = 0, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The same in plain PyTorch, with the matrix's numbers as float32 `weight`; blocks of x begin `lead` before it."""
    held = F.pad(x.float(), (lead, -(lead + x.shape[1]) % BLOCK)).view(x.shape[0], -1, BLOCK)
    most = held.abs().amax(-1, keepdim=True)
    scale = torch.where(most < 1e-30, 0.0, most / 127)
    factor = torch.div(most.new_tensor(127.0), most)  # not 127 / most, which torch computes from the reciprocal
    rounded = torch.where(most < 1e-30, 0.0, (held * factor).round())
    near = (rounded * scale).view(x.shape[0], -1)[:, lead : lead + x.shape[1]]
    return F.linear(near, weight, None if bias is None else bias.float()).to(dtype or x.dtype)


def _library() -> ModuleType:
    library = native()
    if library is None:
        raise RuntimeError("products with quantised weights need the native library")
    return library

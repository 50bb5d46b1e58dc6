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

from phalanx.kernels.block_layout import BLOCK, KINDS, packed_bytes
from phalanx.kernels.library import native
from phalanx.kernels.matmul import WeightMemory

NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


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
    """Blocks of 32 that the first of the file's blocks begins before that."""


def pack_blocks(
    kind: str, raw: torch.Tensor, columns: tuple[int, int], scales: torch.Tensor | None = None,
    memory: WeightMemory | None = None,
) -> PackedBlocks:  # fmt: skip
    """The columns of `raw`, which holds rows of a file's blocks: uint8 [outputs, bytes], neighbours in a row touching.

    For "INT8", `raw` is int8 [outputs, inputs], and `scales` float32 [outputs]. The result is taken from `memory`.
    Raises ValueError for what does not fit, RuntimeError without the native library.
    """
    layout, library = KINDS[kind], _library()
    outputs, (start, stop) = raw.shape[0], columns
    width = raw.shape[1] // layout.nbytes * layout.elements if kind != "INT8" else raw.shape[1]
    whole = kind == "INT8" or raw.shape[1] % layout.nbytes == 0
    if raw.dim() != 2 or raw.element_size() != 1 or not whole or not 0 <= start <= stop <= width:
        raise ValueError(f"columns {start} to {stop} are not in {kind} rows of {raw.shape[1]} bytes")
    if start >= layout.elements or (kind == "INT8" and start % BLOCK):
        raise ValueError("the first column has to be in the first block")
    if raw.stride(1) != 1 or raw.device.type != "cpu":
        raw = raw.cpu().contiguous()
    if kind == "INT8":
        if scales is None or scales.shape != (outputs,) or scales.dtype != torch.float32:
            raise ValueError("INT8 needs a float32 scale for each output")
        scales = scales.contiguous()
    phase, lead = divmod(start, BLOCK) if start < stop else (0, 0)
    data = (memory or WeightMemory()).empty((packed_bytes(kind, outputs, columns),), torch.uint8)
    inputs = stop - start
    if data.numel():
        address = 0 if scales is None else scales.data_ptr()
        step = raw.stride(0) if outputs > 1 else raw.shape[1]
        library.block_pack(
            layout.number,
            raw.data_ptr(),
            step,
            outputs,
            lead + inputs if inputs else 0,
            phase,
            address,
            data.data_ptr(),
        )
    return PackedBlocks(data, kind, outputs, inputs, lead, phase)


class BlockProduct:
    """Matrices that are multiplied with the same activations; their outputs stand side by side in the result."""

    def __init__(self, matrices: Sequence[PackedBlocks]):
        """Raises ValueError when the matrices have not the same columns, RuntimeError without the native library."""
        self.matrices = tuple(matrices)
        first = matrices[0]
        self.inputs, self.lead = first.inputs, first.lead
        if any((m.inputs, m.lead) != (self.inputs, self.lead) for m in matrices):
            raise ValueError("all matrices of a product have the same columns")
        self._library = _library()
        parts, column = [], 0
        for m in matrices:
            parts.append([m.data.data_ptr(), KINDS[m.kind].number, m.outputs, column, m.phase])
            column += m.outputs
        self.outputs = column
        self._parts = torch.tensor(parts, dtype=torch.int64)
        self._address, self._count = self._parts.data_ptr(), len(parts)

    @property
    def nbytes(self) -> int:
        return sum(m.data.nbytes for m in self.matrices)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """x [T, inputs] of any type in `NUMBERS`, whose rows may lie apart, times the matrices: [T, outputs] in x's
        type, or `dtype`. `bias` is [outputs]. Raises ValueError for what does not fit."""
        rows, width = x.shape
        step, one = x.stride()
        if width != self.inputs or one != 1 or x.dtype not in NUMBERS or not x.is_cpu:
            raise ValueError(f"x has to be numbers [T, {self.inputs}], each row contiguous")
        address, bias_type = 0, 0
        if bias is not None:
            if bias.numel() != self.outputs or bias.dtype not in NUMBERS or not bias.is_contiguous():
                raise ValueError(f"bias has to be numbers [{self.outputs}]")
            address, bias_type = bias.data_ptr(), NUMBERS[bias.dtype]
        y = torch.empty(rows, self.outputs, dtype=dtype or x.dtype)
        self._library.block_matmul(
            x.data_ptr(), step, rows, width, self.lead, NUMBERS[x.dtype], self._address, self._count, y.data_ptr(),
            self.outputs, NUMBERS[y.dtype], address, bias_type,
        )  # fmt: skip
        return y

    def rows(self, ids: torch.Tensor, start: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Rows `ids` (int64 [T]) - `start` of the matrices, one below the other, as numbers: [T, inputs], rounded from
        float32 to `dtype`. Zeros for ids outside. Raises ValueError for anything but a vector of int64."""
        if ids.dtype is not torch.int64 or ids.dim() != 1 or not ids.is_contiguous() or not ids.is_cpu:
            raise ValueError("ids have to be a contiguous vector of int64")
        y = torch.empty(len(ids), self.inputs)
        self._library.block_unpack(
            ids.data_ptr(), len(ids), start, self.inputs, self.lead, self._address, self._count, y.data_ptr()
        )
        return y if dtype is torch.float32 else y.to(dtype)


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

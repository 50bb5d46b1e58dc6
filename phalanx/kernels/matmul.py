"""Products with packed weights, y = x Wᵀ + bias, in float32 and bfloat16.

A packed matrix has its numbers in another order, blocks of 32 rows with neighbouring columns together
(native/matmul.hpp), so that a product reads them one after the other. Sums are float32; bfloat16 products of less than
2^-126 may count as zero. A row's result depends on no other row, nor on how many there are.

Without the native library nothing is packed, see `packs`; the twins take the plain matrix.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from phalanx.kernels.library import native
from phalanx.kernels.weight_memory import WeightMemory

_TYPES = {torch.float32: 0, torch.bfloat16: 1}


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether matrices of this type can be packed here."""
    return device.type == "cpu" and dtype in _TYPES and native() is not None


class PackedMatrix:
    """W [outputs, inputs], float32 or bfloat16, on the CPU."""

    __slots__ = ("_address", "_library", "_type", "data", "dtype", "inputs", "outputs")

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype, memory: WeightMemory):
        """What `memory` gives. Raises ValueError where `packs` is false."""
        library = native()
        if library is None or dtype not in _TYPES:
            raise ValueError(f"there is no packed form of {dtype} here")
        self._library = library
        self._type = _TYPES[dtype]
        self.outputs = outputs
        self.inputs = inputs
        self.dtype = dtype
        self.data = memory.empty((outputs * inputs,), dtype)
        self._address = self.data.data_ptr()

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def fill(self, plain: torch.Tensor) -> None:
        """From the plain matrix; its rows may lie apart. Raises ValueError when it does not fit."""
        step, one = plain.stride()
        if plain.dtype is not self.dtype or plain.shape != (self.outputs, self.inputs) or one != 1 or not plain.is_cpu:
            raise ValueError(f"the plain matrix has to be {self.dtype} [{self.outputs}, {self.inputs}]")
        self._library.pack_matrix(plain.data_ptr(), step, self._address, self.outputs, self.inputs, self._type)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None, *, wide: bool = False) -> torch.Tensor:
        """x [T, inputs] · Wᵀ + bias [outputs], all of W's type: [T, outputs] in this type, rounded once, or in float32
        when `wide`. Rows of `x` may lie apart. Raises ValueError for what does not fit."""
        rows, width = x.shape
        step, one = x.stride()
        if width != self.inputs or x.dtype is not self.dtype or one != 1 or not x.is_cpu:
            raise ValueError(f"x has to be {self.dtype} [T, {self.inputs}], each row contiguous")
        address = 0
        if bias is not None:
            if bias.dtype is not self.dtype or bias.numel() != self.outputs or not bias.is_contiguous():
                raise ValueError(f"bias has to be {self.dtype} [{self.outputs}]")
            address = bias.data_ptr()
        y = torch.empty(rows, self.outputs, dtype=torch.float32 if wide else self.dtype)
        self._library.matmul(
            x.data_ptr(), step, self._address, address, y.data_ptr(), self.outputs, rows, width, self.outputs,
            self._type, wide,
        )  # fmt: skip
        return y

    def rows(self, ids: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Rows `ids` - start of W, plain: [T, inputs]. Zeros for ids (int64 [T]) outside of it."""
        if ids.dtype is not torch.int64 or ids.ndim != 1 or not ids.is_contiguous() or not ids.is_cpu:
            raise ValueError("ids have to be a contiguous vector of int64")
        y = torch.empty(len(ids), self.inputs, dtype=self.dtype)
        self._library.packed_rows(
            self._address, ids.data_ptr(), start, y.data_ptr(), len(ids), self.outputs, self.inputs, self._type
        )
        return y


def pack_twin(plain: torch.Tensor) -> torch.Tensor:
    """The numbers of [N, K] in their packed order."""
    together = 4 // plain.dtype.itemsize
    whole = plain.shape[1] // together * together
    numbers = []
    for start in range(0, len(plain), 32):
        block = plain[start : start + 32]
        numbers.append(block[:, :whole].reshape(len(block), -1, together).transpose(0, 1).flatten())
        numbers.append(block[:, whole:].T.flatten())
    return torch.cat(numbers)


def multiply_twin(
    x: torch.Tensor, plain: torch.Tensor, bias: torch.Tensor | None = None, *, wide: bool = False
) -> torch.Tensor:
    y = F.linear(x.float(), plain.float(), None if bias is None else bias.float())
    return y if wide else y.to(x.dtype)


def rows_twin(plain: torch.Tensor, ids: torch.Tensor, start: int = 0) -> torch.Tensor:
    local = ids - start
    outside = (local < 0) | (local >= plain.shape[0])
    return F.embedding(local.masked_fill(outside, 0), plain).masked_fill_(outside[:, None], 0)

"""Weights that stay small integers, as the native library multiplies them: those of quantised checkpoints, and int8.

Rows may come in several pieces, each of its own kind: query, key and value of one layer often differ. What a checkpoint
has as plain numbers stays so, beside the blocks, and is multiplied by the scheme for plain weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec
import torch

from phalanx.kernels.block_matmul import (
    BlockProduct,
    IntegerRows,
    PackedBlocks,
    pack_blocks,
    pack_integers,
    same_columns,
)
from phalanx.kernels.matmul import PackedMatrix
from phalanx.kernels.weight_memory import WeightMemory
from phalanx.quantization.base import Scheme, Storage


class _Rows(NamedTuple):
    """What is noted of rows of a matrix, for who finds them in filled memory."""

    start: int
    kind: str
    """Empty for plain numbers."""
    outputs: int
    nbytes: int = 0
    inputs: int = 0
    lead: int = 0
    phase: int = 0
    shift: int = 0
    ordered: bool = False


@dataclass(frozen=True)
class _Plain:
    """Rows that are numbers, in the storage of another scheme."""

    storage: Storage
    outputs: int


@dataclass
class _Matrix:
    """[outputs, inputs], on its way and when it is finished."""

    inputs: int
    dtype: torch.dtype
    memory: WeightMemory
    filled: dict[int, PackedBlocks | torch.Tensor] = field(default_factory=dict)
    """By first row, in the order in which they came."""
    pieces: list[BlockProduct | _Plain] = field(default_factory=list)
    """In the order of the rows, when all are filled."""

    def note(self) -> None:
        """Of all rows, in the order in which they came; what says the order of their columns is kept behind them."""
        noted = []
        for start, rows in self.filled.items():
            if isinstance(rows, torch.Tensor):
                noted.append(_Rows(start, "", len(rows)))
                continue
            ordered = rows.order is not None
            shape = (rows.outputs, rows.data.nbytes, rows.inputs, rows.lead, rows.phase, rows.shift)
            noted.append(_Rows(start, rows.kind, *shape, ordered))
            if rows.order is not None:
                kept = self.memory.empty(tuple(rows.order.shape), rows.order.dtype).copy_(rows.order)
                self.filled[start] = replace(rows, order=kept)
        self.memory.note(noted)

    def find(self) -> None:
        """As noted."""
        noted = msgspec.convert(self.memory.next_note(), list[_Rows])
        for start, kind, outputs, nbytes, inputs, lead, phase, shift, _ in noted:
            if kind:
                data = self.memory.empty((nbytes,), torch.uint8)
                self.filled[start] = PackedBlocks(data, kind, outputs, inputs, lead, phase, shift)
            else:
                self.filled[start] = torch.empty(outputs, self.inputs, dtype=self.dtype)
        for rows in noted:
            found = self.filled[rows.start]
            if rows.ordered and isinstance(found, PackedBlocks):
                self.filled[rows.start] = replace(found, order=self.memory.empty((rows.inputs,), torch.int64))


@dataclass(frozen=True)
class BlockRows:
    """Where the loader puts rows `start` to `stop` of a matrix."""

    matrix: _Matrix
    start: int
    stop: int
    int8: bool

    @property
    def nbytes(self) -> int:
        """For the progress of loading."""
        return (self.stop - self.start) * self.matrix.inputs

    @property
    def takes_blocks(self) -> bool:
        return not self.int8

    def put_blocks(self, row: int, kind: str, raw: torch.Tensor, columns: tuple[int, int]) -> None:
        """Rows from `row` on (counted from `start`), as a file has them: uint8 [n, bytes], of which `columns` are the
        matrix's."""
        self.matrix.filled[self.start + row] = pack_blocks(kind, raw, columns, memory=self.matrix.memory)

    def put_integers(self, row: int, rows: IntegerRows) -> None:
        """Rows from `row` on, as integers with scales."""
        self.matrix.filled[self.start + row] = pack_integers(rows, self.matrix.memory)

    def put(self, row: int, numbers: torch.Tensor) -> None:
        """Rows from `row` on, as numbers [n, inputs]."""
        self.matrix.filled[self.start + row] = (
            _to_int8(numbers, self.matrix.memory) if self.int8 else numbers.to(self.matrix.dtype)
        )


class PackedBlockScheme:
    """`gguf`, `gptq` and so on: integers as the checkpoint has them. `int8`: every matrix rounded to int8 while it is
    loaded, with a scale for each output."""

    shard_unit = 1
    stores_tables = True

    def __init__(self, name: str, plain: Scheme):
        self.name = name
        self._plain = plain

    def create(self, outputs: int, inputs: int, dtype: torch.dtype, memory: WeightMemory) -> Storage:
        return {"matrix": _Matrix(inputs, dtype, memory)}

    def rows(self, storage: Storage, start: int, stop: int) -> BlockRows:
        return BlockRows(storage["matrix"], start, stop, self.name == "int8")

    def finish(self, storage: Storage) -> None:
        matrix: _Matrix = storage["matrix"]
        if matrix.memory.filled:
            matrix.find()
        else:
            matrix.note()
        together: list[PackedBlocks | torch.Tensor] = []
        for _, rows in sorted(matrix.filled.items(), key=lambda item: item[0]):
            if together and not _go_together(together[0], rows):
                matrix.pieces.append(self._piece(matrix, together))
                together = []
            together.append(rows)
        if together:
            matrix.pieces.append(self._piece(matrix, together))
        matrix.filled.clear()
        storage["run"] = matrix.pieces[0] if len(matrix.pieces) == 1 else None

    def _piece(self, matrix: _Matrix, rows: Sequence[PackedBlocks | torch.Tensor]) -> BlockProduct | _Plain:
        packed = [r for r in rows if isinstance(r, PackedBlocks)]
        if packed:
            return BlockProduct(packed)
        numbers = torch.cat([r for r in rows if isinstance(r, torch.Tensor)])
        storage = self._plain.create(len(numbers), matrix.inputs, matrix.dtype, matrix.memory)
        if not matrix.memory.filled:
            target: Any = self._plain.rows(storage, 0, len(numbers))
            target.copy_(numbers)
        self._plain.finish(storage)
        return _Plain(storage, len(numbers))

    def apply(
        self, storage: Storage, x: torch.Tensor, bias: torch.Tensor | None, *, wide: bool = False
    ) -> torch.Tensor:
        piece = storage["run"]
        if isinstance(piece, BlockProduct):
            return piece(x, bias, torch.float32 if wide else None)
        matrix: _Matrix = storage["matrix"]
        results, start = [], 0
        for piece in matrix.pieces:
            part = None if bias is None else bias[start : start + piece.outputs]
            if isinstance(piece, BlockProduct):
                results.append(piece(x, part, torch.float32 if wide else None))
            else:
                results.append(self._plain.apply(piece.storage, x, part, wide=wide))
            start += piece.outputs
        if not results:
            return torch.empty(len(x), 0, dtype=torch.float32 if wide else x.dtype)
        return results[0] if len(results) == 1 else torch.cat(results, 1)

    def matrices(self, storage: Storage) -> list[PackedMatrix | BlockProduct] | None:
        found: list[PackedMatrix | BlockProduct] = []
        for piece in storage["matrix"].pieces:
            own = [piece] if isinstance(piece, BlockProduct) else self._plain.matrices(piece.storage)
            if own is None or any(isinstance(each, BlockProduct) and each.reorders for each in own):
                return None
            found += own
        return found

    def look_up(self, storage: Storage, ids: torch.Tensor, start: int | None) -> torch.Tensor:
        matrix: _Matrix = storage["matrix"]
        first, found = start or 0, None
        for piece in matrix.pieces:
            if isinstance(piece, BlockProduct):
                rows = piece.rows(ids, first, matrix.dtype)
            else:
                rows = self._plain.look_up(piece.storage, ids, first)
            if len(matrix.pieces) == 1:
                return rows
            found = rows if found is None else found.add_(rows)  # zeros where another piece has the row
            first += piece.outputs
        return torch.empty(len(ids), matrix.inputs, dtype=matrix.dtype) if found is None else found

    def table(self, storage: Storage) -> PackedMatrix | BlockProduct | torch.Tensor | None:
        piece = storage["run"]
        if isinstance(piece, BlockProduct):
            return None if piece.reorders else piece
        return None if piece is None else self._plain.table(piece.storage)

    def nbytes(self, storage: Storage) -> int:
        pieces = storage["matrix"].pieces
        return sum(p.nbytes if isinstance(p, BlockProduct) else self._plain.nbytes(p.storage) for p in pieces)


def _go_together(one: PackedBlocks | torch.Tensor, other: PackedBlocks | torch.Tensor) -> bool:
    if isinstance(one, PackedBlocks) and isinstance(other, PackedBlocks):
        return same_columns(one, other)
    return isinstance(one, PackedBlocks) == isinstance(other, PackedBlocks)


def _to_int8(numbers: torch.Tensor, memory: WeightMemory) -> PackedBlocks:
    """Each row to whole multiples of a 127th of its largest number. What is not finite stays so, in the whole row."""
    values = numbers.float()
    scales = values.abs().amax(1) / 127 if values.numel() else values.new_zeros(len(values))
    whole = values.div(scales[:, None]).nan_to_num(0.0).round_().to(torch.int8)
    return pack_integers(IntegerRows("INT8", whole, scales[:, None]), memory)

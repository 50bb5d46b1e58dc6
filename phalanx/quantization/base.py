"""The seam between a linear layer and the way its weights are stored: one `Scheme` a model.

A layer asks the scheme to `create` storage for its rows and columns, the loader fills the rows, `finish` turns the
storage into the form that computes fastest, and `apply` multiplies; a token table is also looked up in. What stays lies
in a `WeightMemory`; where that is filled already, nothing is loaded, and `finish` finds the form in it. Covers
unquantised weights: as they are, and packed for the native library. Quantised schemes come behind the same protocol.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F

from phalanx.checkpoint.quantized import METHODS
from phalanx.errors import UnsupportedModel
from phalanx.kernels.block_matmul import BlockProduct, IntegerRows
from phalanx.kernels.library import native
from phalanx.kernels.matmul import PackedMatrix, packs, rows_twin
from phalanx.kernels.weight_memory import WeightMemory

Storage = dict[str, Any]

_BLOCKS = ("gguf", "int8", *METHODS)


class RowTarget(Protocol):
    """Rows of a matrix that a scheme does not keep as the numbers they are: the loader hands it what the file has."""

    @property
    def nbytes(self) -> int:
        """For the progress of loading."""
        ...

    @property
    def takes_blocks(self) -> bool: ...

    def put(self, row: int, numbers: torch.Tensor) -> None:
        """Rows from `row` on, as numbers [n, inputs]."""
        ...

    def put_blocks(self, row: int, kind: str, raw: torch.Tensor, columns: tuple[int, int]) -> None:
        """Rows from `row` on, as whole blocks: uint8 [n, bytes], of which `columns` are the matrix's."""
        ...

    def put_integers(self, row: int, rows: IntegerRows) -> None:
        """Rows from `row` on, as integers with scales."""
        ...


class Scheme(Protocol):
    name: str
    shard_unit: int
    """A partition of inputs cuts at multiples of this."""
    stores_tables: bool
    """Whether token tables are stored in this form too."""

    def create(self, outputs: int, inputs: int, dtype: torch.dtype, memory: WeightMemory) -> Storage:
        """Storage of a matrix [outputs, inputs], empty or in filled memory."""
        ...

    def rows(self, storage: Storage, start: int, stop: int) -> torch.Tensor | RowTarget:
        """Where the loader puts rows start to stop, before `finish`."""
        ...

    def finish(self, storage: Storage) -> None:
        """All rows are filled, or the memory is."""
        ...

    def apply(
        self, storage: Storage, x: torch.Tensor, bias: torch.Tensor | None, *, wide: bool = False
    ) -> torch.Tensor:
        """x [T, inputs] times the matrix's transpose, plus bias: [T, outputs], in float32 when `wide`."""
        ...

    def matrices(self, storage: Storage) -> list[PackedMatrix | BlockProduct] | None:
        """What `apply` multiplies with, one below the other; None where it does more than that."""
        ...

    def look_up(self, storage: Storage, ids: torch.Tensor, start: int | None) -> torch.Tensor:
        """Rows `ids` (int64 [T]) - `start` of the matrix, [T, inputs], zeros for those that it does not have; with None
        it has all."""
        ...

    def table(self, storage: Storage) -> PackedMatrix | BlockProduct | torch.Tensor | None:
        """What `look_up` finds rows in; None where it is more than one thing."""
        ...

    def nbytes(self, storage: Storage) -> int: ...


class Unquantized:
    """Weights as they are, multiplied by torch."""

    name = "none"
    shard_unit = 1
    stores_tables = False

    def create(self, outputs: int, inputs: int, dtype: torch.dtype, memory: WeightMemory) -> Storage:
        return {"weight": memory.empty((outputs, inputs), dtype)}

    def rows(self, storage: Storage, start: int, stop: int) -> torch.Tensor:
        weight: torch.Tensor = storage["weight"]
        return weight[start:stop]

    def finish(self, storage: Storage) -> None:
        return None

    def apply(
        self, storage: Storage, x: torch.Tensor, bias: torch.Tensor | None, *, wide: bool = False
    ) -> torch.Tensor:
        y = F.linear(x, storage["weight"], bias)
        return y.float() if wide else y

    def matrices(self, storage: Storage) -> list[PackedMatrix | BlockProduct] | None:
        return None

    def look_up(self, storage: Storage, ids: torch.Tensor, start: int | None) -> torch.Tensor:
        weight = storage["weight"]
        return F.embedding(ids, weight) if start is None else rows_twin(weight, ids, start)

    def table(self, storage: Storage) -> PackedMatrix | BlockProduct | torch.Tensor | None:
        weight: torch.Tensor = storage["weight"]
        return weight

    def nbytes(self, storage: Storage) -> int:
        weight: torch.Tensor = storage["weight"]
        return weight.nbytes


class Packed(Unquantized):
    """float32 and bfloat16 on a CPU, in the order in which the native library reads them. The plain copy is given up
    matrix by matrix."""

    name = "packed"

    def create(self, outputs: int, inputs: int, dtype: torch.dtype, memory: WeightMemory) -> Storage:
        return {"weight": torch.empty(outputs, inputs, dtype=dtype), "memory": memory}

    def finish(self, storage: Storage) -> None:
        plain: torch.Tensor = storage.pop("weight")
        memory: WeightMemory = storage.pop("memory")
        outputs, inputs = plain.shape
        storage["packed"] = matrix = PackedMatrix(outputs, inputs, plain.dtype, memory)
        if not memory.filled:
            matrix.fill(plain)

    def apply(
        self, storage: Storage, x: torch.Tensor, bias: torch.Tensor | None, *, wide: bool = False
    ) -> torch.Tensor:
        matrix: PackedMatrix = storage["packed"]
        return matrix.multiply(x, bias, wide=wide)

    def matrices(self, storage: Storage) -> list[PackedMatrix | BlockProduct] | None:
        return [storage["packed"]]

    def look_up(self, storage: Storage, ids: torch.Tensor, start: int | None) -> torch.Tensor:
        matrix: PackedMatrix = storage["packed"]
        return matrix.rows(ids, start or 0)

    def table(self, storage: Storage) -> PackedMatrix | BlockProduct | torch.Tensor | None:
        matrix: PackedMatrix = storage["packed"]
        return matrix

    def nbytes(self, storage: Storage) -> int:
        held: PackedMatrix | torch.Tensor = storage["packed"] if "packed" in storage else storage["weight"]
        return held.nbytes


def choose_scheme(name: str | None, dtype: torch.dtype, device: torch.device) -> Scheme:
    """The scheme for a model's matrices: plain, or what --quantization (resolved) is, if the native library is there.
    Raises UnsupportedModel for a name we do not have."""
    if name in (None, "none") or (name in _BLOCKS and native() is None):
        return _choose_plain(dtype, device)
    if name not in _BLOCKS:
        raise UnsupportedModel(
            f"The quantisation scheme '{str(name)[:60]}' is not in this version.", fix="Leave it out."
        )
    from phalanx.quantization.packed_blocks import PackedBlockScheme

    return PackedBlockScheme(name, _choose_plain(dtype, device))


def _choose_plain(dtype: torch.dtype, device: torch.device) -> Scheme:
    return Packed() if packs(dtype, device) else Unquantized()

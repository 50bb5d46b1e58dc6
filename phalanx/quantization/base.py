"""The seam between a linear layer and the way its weights are stored: one `Scheme` a model.

A layer asks the scheme to `create` storage for its rows and columns, the loader fills the rows, `finish` turns the
storage into the form that computes fastest, and `apply` multiplies. Covers unquantised weights: as they are, and
packed for oneDNN on CPUs. Quantised schemes come behind the same protocol.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from phalanx.errors import UnsupportedModel

Storage = dict[str, torch.Tensor]


class Scheme(Protocol):
    name: str
    shard_unit: int
    """A partition of inputs cuts at multiples of this."""

    def create(self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Storage:
        """Empty storage of a matrix [outputs, inputs]."""
        ...

    def rows(self, storage: Storage, start: int, stop: int) -> torch.Tensor:
        """Where the loader copies rows start to stop, before `finish`."""
        ...

    def finish(self, storage: Storage) -> None:
        """All rows are filled."""
        ...

    def apply(self, storage: Storage, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, inputs] times the matrix's transpose, plus bias: [T, outputs]."""
        ...

    def nbytes(self, storage: Storage) -> int: ...


class Unquantized:
    """Weights as they are, multiplied by torch."""

    name = "none"
    shard_unit = 1

    def create(self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Storage:
        return {"weight": torch.empty(outputs, inputs, dtype=dtype, device=device)}

    def rows(self, storage: Storage, start: int, stop: int) -> torch.Tensor:
        return storage["weight"][start:stop]

    def finish(self, storage: Storage) -> None:
        return None

    def apply(self, storage: Storage, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, storage["weight"], bias)

    def nbytes(self, storage: Storage) -> int:
        return storage["weight"].nbytes


class PackedBfloat16(Unquantized):
    """bfloat16 on a CPU: weights reordered once into the blocks that oneDNN multiplies from (up to twice as fast for
    few rows, because nothing is reordered in a step). The plain copy is given up."""

    name = "bfloat16-packed"

    def finish(self, storage: Storage) -> None:
        weight = storage["weight"]
        if weight.numel():
            storage["packed"] = torch.ops.mkldnn._reorder_linear_weight(storage.pop("weight"))

    def apply(self, storage: Storage, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        packed = storage.get("packed")
        if packed is None:
            return F.linear(x, storage["weight"], bias)
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return result

    def nbytes(self, storage: Storage) -> int:
        return sum(t.numel() * t.element_size() for t in storage.values())


def choose_scheme(name: str | None, dtype: torch.dtype, device: torch.device) -> Scheme:
    """The scheme for a model's linear layers. Raises UnsupportedModel for a name we do not have."""
    if name not in (None, "none"):
        raise UnsupportedModel(
            f"The quantisation scheme '{str(name)[:60]}' is not in this version.", fix="Leave it out."
        )
    if device.type == "cpu" and dtype == torch.bfloat16 and _packs_bfloat16():
        return PackedBfloat16()
    return Unquantized()


def _packs_bfloat16() -> bool:
    has_mkldnn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())

"""The norm layers. Whole on every rank."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from phalanx.kernels.pointwise import add_norm
from phalanx.kernels.tape import Tape
from phalanx.kernels.weight_memory import WeightMemory
from phalanx.layers.layer import Layer
from phalanx.layers.weights import WeightSlot


class Norm(Layer):
    """RMS or layer norm over the last axis, computed in float32.

    `wide` keeps and applies the weight in float32, before the result is rounded to the input's type.
    """

    def __init__(
        self, name: str, size: int, kind: str, eps: float, *, affine: bool, wide: bool, dtype: torch.dtype,
        memory: WeightMemory,
    ):  # fmt: skip
        self.name = name
        self.size = size
        self.eps = eps
        self.layer = kind == "layer"
        kept = torch.float32 if wide else dtype
        self.weight = memory.full((size,), kept, 1.0) if affine else None
        self.bias = memory.full((size,), kept, 0.0) if affine and self.layer else None

    def slots(self) -> Iterator[WeightSlot]:
        for kind, target in (("weight", self.weight), ("bias", self.bias)):
            if target is not None:
                yield WeightSlot(f"{self.name}.{kind}", target, (0, self.size))

    def finish(self) -> None:
        return None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.weight, self.bias) if t is not None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> the same."""
        if x.dim() != 2:
            return self.forward(x.reshape(-1, self.size).contiguous()).view(x.shape)
        return add_norm(x, None, self.weight, self.bias, self.eps, self.layer)

    def add(self, x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """`x += delta` [T, size] in place, and the norm of that."""
        return add_norm(x, delta, self.weight, self.bias, self.eps, self.layer)

    def record(self, tape: Tape, x: int, delta: int | None, to: int) -> None:
        """`add`, from buffers to a buffer; `forward` without a delta. Raises CannotRecord."""
        tape.norm(x, delta, self.weight, self.bias, self.eps, self.layer, to)

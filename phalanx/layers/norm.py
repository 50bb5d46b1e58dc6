"""RMS norm (arXiv 1910.07467) and layer norm (arXiv 1607.06450). Whole on every rank."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from phalanx.layers.layer import Layer
from phalanx.layers.weights import WeightSlot


class Norm(Layer):
    """Over the last axis, computed in float32.

    `wide` keeps and applies the weight in float32, before the result is rounded to the input's type.
    """

    def __init__(
        self, name: str, size: int, kind: str, eps: float, *, affine: bool, wide: bool, dtype: torch.dtype,
        device: torch.device,
    ):  # fmt: skip
        self.name = name
        self.size = (size,)
        self.eps = eps
        self.layer = kind == "layer"
        kept = torch.float32 if wide else dtype
        self.widen = wide and dtype != torch.float32
        self.weight = torch.ones(size, dtype=kept, device=device) if affine else None
        self.bias = torch.zeros(size, dtype=kept, device=device) if affine and self.layer else None

    def slots(self) -> Iterator[WeightSlot]:
        for kind, target in (("weight", self.weight), ("bias", self.bias)):
            if target is not None:
                yield WeightSlot(f"{self.name}.{kind}", target, (0, self.size[0]))

    def finish(self) -> None:
        return None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.weight, self.bias) if t is not None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.widen:
            return self._norm(x.float()).to(x.dtype)
        return self._norm(x)

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        if self.layer:
            return F.layer_norm(x, self.size, self.weight, self.bias, self.eps)
        return F.rms_norm(x, self.size, self.weight, self.eps)

"""Applies rotary positions (arXiv 2104.09864) to query and key heads, halves rotated against each other."""

from __future__ import annotations

import torch

from phalanx.kernels.pointwise import turns


class Rotary:
    """One rotary embedding: its frequencies, for each class of prompt length. Shared by all layers that use it.

    `inverse_frequencies` float32 [classes, dim / 2]; `factors` multiplies cos and sin, one per class.
    """

    def __init__(self, inverse_frequencies: torch.Tensor, factors: list[float], dtype: torch.dtype):
        self.inverse_frequencies = inverse_frequencies
        self.dtype = dtype
        self.one_class = len(factors) == 1
        self.factors = torch.tensor(factors, dtype=torch.float32, device=inverse_frequencies.device)

    def turn(self, positions: torch.Tensor, classes: torch.Tensor | None) -> Turn:
        """cos and signed sin for tokens at `positions` [T]; `classes` [T] is the prompt class of each, None = 0."""
        own = None if self.one_class else classes
        return Turn(*turns(positions, self.inverse_frequencies, self.factors, own, self.dtype))


class Turn:
    """The rotation of one step's tokens: cos and signed sin, [T, 1, dim], computed once for all layers."""

    def __init__(self, cos: torch.Tensor, signed_sin: torch.Tensor):
        self.cos = cos
        self.signed_sin = signed_sin
        self.dim = cos.shape[-1]
        self.half = self.dim // 2

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """heads [T, heads, head_dim] -> the same, its first `dim` numbers rotated."""
        if heads.shape[-1] == self.dim:
            return self._rotate(heads)
        return torch.cat((self._rotate(heads[..., : self.dim]), heads[..., self.dim :]), -1)

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        swapped = torch.cat((x[..., self.half :], x[..., : self.half]), -1)
        return (x * self.cos).addcmul_(swapped, self.signed_sin)

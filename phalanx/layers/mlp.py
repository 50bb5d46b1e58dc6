"""Feed-forward layers: gated (arXiv 2002.05202) and plain. The inner width is split over the tensor group."""

from __future__ import annotations

import torch

from phalanx.distributed.partition import Partition
from phalanx.kernels.pointwise import activate, activate_gated
from phalanx.layers.layer import Layer
from phalanx.layers.linear import ColumnLinear, LinearContext, Output, RowLinear


class GatedFeedForward(Layer):
    """down(activation(gate(x)) * up(x)): [T, hidden] -> the same."""

    def __init__(self, name: str, hidden: int, inner: Partition, activation: str, bias: bool, context: LinearContext):
        self.activation = activation
        self.gate_up = ColumnLinear((Output(f"{name}.gate", inner), Output(f"{name}.up", inner)), hidden, bias, context)
        self.down = RowLinear(f"{name}.down", inner, hidden, bias, context)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down.forward(activate_gated(self.activation, self.gate_up.forward(x)))


class FeedForward(Layer):
    """down(activation(up(x))): [T, hidden] -> the same."""

    def __init__(self, name: str, hidden: int, inner: Partition, activation: str, bias: bool, context: LinearContext):
        self.activation = activation
        self.up = ColumnLinear((Output(f"{name}.up", inner),), hidden, bias, context)
        self.down = RowLinear(f"{name}.down", inner, hidden, bias, context)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down.forward(activate(self.activation, self.up.forward(x)))

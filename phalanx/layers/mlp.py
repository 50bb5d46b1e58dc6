"""Feed-forward layers: gated (arXiv 2002.05202) and plain. The inner width is split over the tensor group."""

from __future__ import annotations

import torch

from phalanx.distributed.partition import Partition
from phalanx.kernels.pointwise import activate, activate_gated
from phalanx.kernels.tape import INNER, WIDE, Tape
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

    def record(self, tape: Tape, x: int) -> None:
        """`forward`, from a buffer to the delta. Raises CannotRecord."""
        self.gate_up.record(tape, x, WIDE)
        tape.activate(self.activation, WIDE, self.gate_up.width // 2, INNER, gated=True)
        self.down.record(tape, INNER)

    @property
    def widths(self) -> tuple[int, int]:
        """Numbers of a token in the first product, and before the second."""
        return self.gate_up.width, self.gate_up.width // 2


class FeedForward(Layer):
    """down(activation(up(x))): [T, hidden] -> the same."""

    def __init__(self, name: str, hidden: int, inner: Partition, activation: str, bias: bool, context: LinearContext):
        self.activation = activation
        self.up = ColumnLinear((Output(f"{name}.up", inner),), hidden, bias, context)
        self.down = RowLinear(f"{name}.down", inner, hidden, bias, context)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down.forward(activate(self.activation, self.up.forward(x)))

    def record(self, tape: Tape, x: int) -> None:
        """As in GatedFeedForward."""
        self.up.record(tape, x, WIDE)
        tape.activate(self.activation, WIDE, self.up.width, INNER, gated=False)
        self.down.record(tape, INNER)

    @property
    def widths(self) -> tuple[int, int]:
        """As in GatedFeedForward."""
        return self.up.width, self.up.width

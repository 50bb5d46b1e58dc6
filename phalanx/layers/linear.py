"""Linear layers that are split over the ranks of a tensor group, and the loader's view of them.

A column layer splits its outputs; it may hold several matrices as one (query, key and value; gate and up), each with
its own partition. A row layer splits its inputs and sums over the group. A replicated layer is whole on every rank.
How the numbers are stored and multiplied is the quantisation scheme's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from phalanx.distributed.collectives import Group
from phalanx.distributed.partition import Partition
from phalanx.kernels.tape import DELTA, Tape
from phalanx.kernels.weight_memory import WeightMemory
from phalanx.layers.layer import Layer
from phalanx.layers.weights import WeightSlot
from phalanx.quantization.base import Scheme


@dataclass(frozen=True)
class LinearContext:
    """What every linear layer of one rank is built with."""

    rank: int
    """Within the tensor group."""
    group: Group
    scheme: Scheme
    dtype: torch.dtype
    memory: WeightMemory


@dataclass(frozen=True)
class Output:
    """One of the matrices a layer holds: its weight's name without `.weight`, and who has which rows of it."""

    name: str
    partition: Partition


class Linear(Layer):
    """y = x Wᵀ + b for this rank's part. x is [T, this rank's inputs], y [T, this rank's outputs]."""

    def __init__(self, outputs: Sequence[Output], inputs: Partition, bias: bool, context: LinearContext):
        self.outputs = tuple(outputs)
        self.inputs = inputs
        self.context = context
        rows = self.width
        self.storage = context.scheme.create(rows, inputs.length(context.rank), context.dtype, context.memory)
        self.bias = context.memory.full((rows,), context.dtype, 0.0) if bias else None

    def slots(self) -> Iterator[WeightSlot]:
        rank, start = self.context.rank, 0
        for output in self.outputs:
            stop = start + output.partition.length(rank)
            rows = output.partition.ranges[rank]
            target = self.context.scheme.rows(self.storage, start, stop)
            yield WeightSlot(f"{output.name}.weight", target, rows, self.inputs.ranges[rank])
            if self.bias is not None:
                yield WeightSlot(f"{output.name}.bias", self.bias[start:stop], rows)
            start = stop

    def finish(self) -> None:
        self.context.scheme.finish(self.storage)

    @property
    def nbytes(self) -> int:
        return self.context.scheme.nbytes(self.storage) + (0 if self.bias is None else self.bias.nbytes)

    @property
    def width(self) -> int:
        """This rank's outputs."""
        return sum(output.partition.length(self.context.rank) for output in self.outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.context.scheme.apply(self.storage, x, self.bias)

    def record(self, tape: Tape, x: int, to: int) -> None:
        """`forward`, from a buffer to a buffer. Raises CannotRecord."""
        tape.multiply(x, self.context.scheme.matrices(self.storage), self.bias, to)


class ColumnLinear(Linear):
    """Outputs are split, inputs whole; nothing is exchanged. Several `outputs` make a merged layer."""

    def __init__(self, outputs: Sequence[Output], inputs: int, bias: bool, context: LinearContext):
        super().__init__(outputs, Partition.whole(inputs, context.group.size), bias, context)


class RowLinear(Linear):
    """Inputs are split, the partial products summed over the group; the bias is added once, after the sum."""

    def __init__(self, name: str, inputs: Partition, outputs: int, bias: bool, context: LinearContext):
        super().__init__((Output(name, Partition.whole(outputs, context.group.size)),), inputs, bias, context)
        self.split = not inputs.is_whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.split:
            return super().forward(x)
        y = self.context.group.all_reduce(self.context.scheme.apply(self.storage, x, None))
        return y if self.bias is None else y.add_(self.bias)

    def record(self, tape: Tape, x: int, to: int = DELTA) -> None:
        if not self.split:
            super().record(tape, x, to)
            return
        tape.multiply(x, self.context.scheme.matrices(self.storage), None, DELTA)
        tape.sum_delta()
        if self.bias is not None:
            tape.add_bias(self.bias)


class ReplicatedLinear(Linear):
    """Whole on every rank, and without a bias."""

    def __init__(self, name: str, outputs: int, inputs: int, context: LinearContext):
        size = context.group.size
        super().__init__((Output(name, Partition.whole(outputs, size)),), Partition.whole(inputs, size), False, context)

"""The token table, the position table, and the output head. The vocabulary may be split over the tensor group."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from phalanx.distributed.partition import Partition
from phalanx.kernels.tape import LOGITS, Tape
from phalanx.kernels.weight_memory import WeightMemory
from phalanx.layers.layer import Layer
from phalanx.layers.linear import LinearContext
from phalanx.layers.weights import WeightSlot


class VocabularyTable(Layer):
    """This rank's rows of a [vocabulary, width] table: looked up as an embedding, multiplied as an output head.

    A tied model uses one table for both.
    """

    def __init__(self, name: str, vocabulary: Partition, width: int, context: LinearContext, *, bias: bool = False):
        self.name = name
        self.vocabulary = vocabulary
        self.group = context.group
        self.scheme = context.scheme
        self.start, self.stop = vocabulary.ranges[context.rank]
        self.width = width
        self.split = not vocabulary.is_whole
        rows = self.stop - self.start
        self.storage = self.scheme.create(rows, width, context.dtype, context.memory)
        self.bias = context.memory.full((rows,), context.dtype, 0.0) if bias else None

    def slots(self) -> Iterator[WeightSlot]:
        target = self.scheme.rows(self.storage, 0, self.stop - self.start)
        yield WeightSlot(f"{self.name}.weight", target, (self.start, self.stop), (0, self.width))
        if self.bias is not None:
            yield WeightSlot(f"{self.name}.bias", self.bias, (self.start, self.stop))

    def finish(self) -> None:
        self.scheme.finish(self.storage)

    @property
    def nbytes(self) -> int:
        return self.scheme.nbytes(self.storage) + (0 if self.bias is None else self.bias.nbytes)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, width]."""
        if not self.split:
            return self.scheme.look_up(self.storage, token_ids, None)
        return self.group.all_reduce(self.scheme.look_up(self.storage, token_ids, self.start))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, width] -> float32 [R, this rank's part of the vocabulary]."""
        return self.scheme.apply(self.storage, hidden, self.bias, wide=True)

    def record_embed(self, tape: Tape) -> None:
        """`embed`, to the stream. Raises CannotRecord."""
        tape.look_up(self.scheme.table(self.storage), self.start)
        if self.split:
            tape.sum_stream()

    def record_logits(self, tape: Tape, x: int) -> None:
        """`logits`, from a buffer. Raises CannotRecord."""
        tape.multiply(x, self.scheme.matrices(self.storage), self.bias, LOGITS)

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """All ranks' logits side by side: [R, whole vocabulary]."""
        return self.group.all_gather(logits, 1, self.vocabulary.lengths) if self.split else logits


class PositionTable(Layer):
    """Learned positions. Whole on every rank."""

    def __init__(self, name: str, rows: int, width: int, offset: int, dtype: torch.dtype, memory: WeightMemory):
        self.name = name
        self.offset = offset
        self.weight = memory.empty((rows, width), dtype)

    def slots(self) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{self.name}.weight", self.weight, (0, self.weight.shape[0]), (0, self.weight.shape[1]))

    def finish(self) -> None:
        return None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return F.embedding(positions + self.offset if self.offset else positions, self.weight)

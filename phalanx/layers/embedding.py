"""The token table, the position table, and the output head. The vocabulary may be split over the tensor group."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from phalanx.distributed.collectives import Group
from phalanx.distributed.partition import Partition
from phalanx.layers.layer import Layer
from phalanx.layers.weights import WeightSlot


class VocabularyTable(Layer):
    """This rank's rows of a [vocabulary, width] table: looked up as an embedding, multiplied as an output head.

    A tied model uses one table for both.
    """

    def __init__(
        self, name: str, vocabulary: Partition, width: int, group: Group, rank: int, dtype: torch.dtype,
        device: torch.device, *, bias: bool = False,
    ):  # fmt: skip
        self.name = name
        self.vocabulary = vocabulary
        self.group = group
        self.start, self.stop = vocabulary.ranges[rank]
        self.width = width
        self.split = not vocabulary.is_whole
        self.weight = torch.empty(self.stop - self.start, width, dtype=dtype, device=device)
        self.bias = torch.zeros(self.stop - self.start, dtype=dtype, device=device) if bias else None

    def slots(self) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{self.name}.weight", self.weight, (self.start, self.stop), (0, self.width))
        if self.bias is not None:
            yield WeightSlot(f"{self.name}.bias", self.bias, (self.start, self.stop))

    def finish(self) -> None:
        return None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, width]."""
        if not self.split:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self.start
        outside = (local < 0) | (local >= self.stop - self.start)
        rows = F.embedding(local.masked_fill_(outside, 0), self.weight).masked_fill_(outside[:, None], 0)
        return self.group.all_reduce(rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, width] -> float32 [R, this rank's part of the vocabulary]."""
        return F.linear(hidden, self.weight, self.bias).float()

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """All ranks' logits side by side: [R, whole vocabulary]."""
        return self.group.all_gather(logits, 1, self.vocabulary.lengths) if self.split else logits


class PositionTable(Layer):
    """Learned positions. Whole on every rank."""

    def __init__(self, name: str, rows: int, width: int, offset: int, dtype: torch.dtype, device: torch.device):
        self.name = name
        self.offset = offset
        self.weight = torch.empty(rows, width, dtype=dtype, device=device)

    def slots(self) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{self.name}.weight", self.weight, (0, self.weight.shape[0]), (0, self.weight.shape[1]))

    def finish(self) -> None:
        return None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return F.embedding(positions + self.offset if self.offset else positions, self.weight)

"""How ranks of one group exchange tensors: the `Group` protocol, and the group of one.

Every call is made by all ranks of the group, in the same order, with shapes that fit. A result may share memory with
the input of the same rank (in a group of one it is the input). Real transports come behind the same protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch


class Group(Protocol):
    @property
    def rank(self) -> int:
        """This rank's number within the group."""
        ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, everywhere; summed in rank order, so that every rank has the same bits."""
        ...

    def all_gather(self, tensor: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        """All ranks' tensors joined along `dim`, where rank r's has `lengths[r]` entries."""
        ...

    def reduce_scatter(self, tensor: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        """Rank r's `lengths[r]` entries along `dim` of the sum over ranks."""
        ...

    def all_to_all(self, tensors: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        """tensors[r] goes to rank r; the result's entry r came from rank r and has `shapes[r]`."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Rank `source`'s tensor; the others pass one of the same shape and dtype."""
        ...

    def send(self, tensor: torch.Tensor, to: int) -> None: ...

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> torch.Tensor: ...

    def barrier(self) -> None: ...


class SingleGroup:
    """A group of one: every exchange is the identity."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        return tensor

    def reduce_scatter(self, tensor: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        return tensor

    def all_to_all(self, tensors: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        return list(tensors)

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        return tensor

    def send(self, tensor: torch.Tensor, to: int) -> None:
        raise ValueError("a group of one has nobody to send to")

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> torch.Tensor:
        raise ValueError("a group of one has nobody to receive from")

    def barrier(self) -> None:
        return None


@dataclass(frozen=True)
class Groups:
    """One rank's groups, one per axis of the mesh."""

    dp: Group = field(default_factory=SingleGroup)
    pp: Group = field(default_factory=SingleGroup)
    cp: Group = field(default_factory=SingleGroup)
    tp: Group = field(default_factory=SingleGroup)

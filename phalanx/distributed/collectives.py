"""How ranks of one group exchange tensors: the `Group` protocol, the group of one, and handles that outlive an epoch.

Every call is made by all ranks of the group (`send` and `recv` by the two), in the same order, with shapes that fit; a
rank that makes another call than its peers is found out, and everybody gets `transports.abort.GroupBroken`. A result
may share memory with the input of the same rank (in a group of one it is the input), and an exchange may overwrite its
input: whoever needs it afterwards keeps a copy. Real transports come behind the same protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn, Protocol

import torch

from phalanx.distributed.transports.abort import GroupBroken
from phalanx.distributed.transports.rounds import Rounds


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

    def rounds(self, dtype: torch.dtype) -> Rounds | None:
        """Where native code can make small sums of `dtype`, and small gathers of int32, by itself; None where every
        exchange is a call. Every rank may do as it likes. Good until the epoch ends."""
        ...

    def join_round(self) -> None:
        """Wait for the others in the round that native code has begun. Raises as an exchange does."""
        ...

    def describe(self) -> dict[str, Any]:
        """How it exchanges: `transport`, and the sizes in bytes from which it goes about it another way."""
        ...


class OpenGroup(Group, Protocol):
    """One that holds connections or memory."""

    def close(self) -> None:
        """Idempotent."""
        ...


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

    def rounds(self, dtype: torch.dtype) -> Rounds | None:
        return None

    def join_round(self) -> None:
        return None

    def describe(self) -> dict[str, Any]:
        return {"transport": "none"}


def _unbound(self: GroupHandle, *args: Any, **kwargs: Any) -> NoReturn:
    raise GroupBroken("The group is not connected in this epoch.")


class GroupHandle:
    """A group whose transport changes from epoch to epoch, so that layers are built once and keep their reference.

    `bind` puts the bound methods of the epoch's group on the handle itself, so that a call costs nothing extra. An
    unbound handle raises GroupBroken. `rank` and `size` never change. Whoever binds closes the group.
    """

    _OPERATIONS = (
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv", "barrier",
        "rounds", "join_round", "describe",
    )  # fmt: skip

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size

    def bind(self, group: Group) -> None:
        """Raises ValueError for a group of another size, or in which this rank has another number."""
        if (group.rank, group.size) != (self.rank, self.size):
            raise ValueError(f"rank {self.rank} of {self.size} cannot become rank {group.rank} of {group.size}")
        for name in self._OPERATIONS:
            setattr(self, name, getattr(group, name))

    def unbind(self) -> None:
        """Lets go of the epoch's group. Idempotent."""
        for name in self._OPERATIONS:
            self.__dict__.pop(name, None)

    all_reduce = all_gather = reduce_scatter = all_to_all = broadcast = send = recv = barrier = _unbound
    rounds = join_round = describe = _unbound


@dataclass(frozen=True)
class Groups:
    """One rank's groups, one per axis of the mesh."""

    dp: Group = field(default_factory=SingleGroup)
    pp: Group = field(default_factory=SingleGroup)
    cp: Group = field(default_factory=SingleGroup)
    tp: Group = field(default_factory=SingleGroup)

    def handles(self) -> Groups:
        """The same groups behind handles, which `bind` can give other transports; a group of one needs no handle."""
        return Groups(**{axis.name: _handle(getattr(self, axis.name)) for axis in fields(self)})

    def bind(self, groups: Groups) -> None:
        """Give the handles another epoch's groups. Raises ValueError when the sizes or this rank's numbers differ."""
        for axis in fields(self):
            mine, other = getattr(self, axis.name), getattr(groups, axis.name)
            if isinstance(mine, GroupHandle):
                mine.bind(other)
            elif mine is not other and (mine.size, other.size) != (1, 1):
                raise ValueError(f"the {axis.name} group of {mine.size} is not a handle")

    def unbind(self) -> None:
        """Let the handles go: an exchange raises GroupBroken until the next `bind`. Idempotent."""
        for axis in fields(self):
            mine = getattr(self, axis.name)
            if isinstance(mine, GroupHandle):
                mine.unbind()


def _handle(group: Group) -> Group:
    if group.size == 1:
        return group
    handle = GroupHandle(group.rank, group.size)
    handle.bind(group)
    return handle

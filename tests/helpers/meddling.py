"""A rank that does something else than its peers expect, in the middle of a step."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.distributed.collectives import Group
from phalanx.distributed.transports.abort import GroupBroken
from tests.helpers.processes import wait_until
from tests.helpers.rank_spawner import Member


class Calls:
    """A group whose exchanges are calls, so that something can be done before the one of number `at`, of sums and
    gathers, from 1; 0: before none. Where it is done and says so, that one is left out."""

    def __init__(self, group: Group, do: Callable[[], bool | None], at: int = 0):
        self._group, self._do, self.at, self.count = group, do, at, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def rounds(self, dtype: torch.dtype) -> None:
        return None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._left_out() else self._group.all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        if self._left_out():
            return torch.cat([tensor] * len(lengths), dim)
        return self._group.all_gather(tensor, dim, lengths)

    def _left_out(self) -> bool:
        self.count += 1
        return self.count == self.at and bool(self._do())


def asleep(member: Member) -> None:
    """Until rank 0 has fallen asleep: it has waited for longer than native code does, and than Python does awake."""
    shared = member.tp._segment  # type: ignore[attr-defined]
    assert wait_until(lambda: bool(shared.words[shared.sleeping[0]]), 20)


def die(member: Member) -> None:
    asleep(member)
    member.tell("now")
    os.kill(os.getpid(), signal.SIGKILL)


def fall_silent(member: Member) -> None:
    asleep(member)
    member.tell("now")
    member.ask()


def leave(member: Member) -> None:
    asleep(member)
    raise GroupBroken("something else is wrong")


def leave_out(member: Member) -> bool:
    return True


def do_something_else(member: Member) -> None:
    member.tp.barrier()

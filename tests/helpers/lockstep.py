"""A group of threads in one process, in lock step: what real transports will do, for tests of split models."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from phalanx.distributed.collectives import Group, Groups, SingleGroup
from phalanx.distributed.mesh import AXES, Mesh

T = TypeVar("T")


class Meeting:
    """Where the ranks of one group leave what they bring and take what the others left."""

    def __init__(self, size: int):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=30)
        self.left: list[Any] = [None] * size
        self.mail: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.posted = threading.Condition()
        self.calls = 0

    def exchange(self, rank: int, item: Any) -> list[Any]:
        self.left[rank] = item
        if self.barrier.wait() == 0:
            self.calls += 1
        taken = list(self.left)
        self.barrier.wait()
        return taken


class LockstepGroup:
    def __init__(self, meeting: Meeting, rank: int):
        self.meeting = meeting
        self.rank = rank
        self.size = meeting.size

    def _all(self, item: Any) -> list[Any]:
        return self.meeting.exchange(self.rank, item)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._all(tensor.clone())).sum(0)

    def all_gather(self, tensor: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        parts = self._all(tensor.clone())
        assert [p.shape[dim] for p in parts] == list(lengths)
        return torch.cat(parts, dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        return self.all_reduce(tensor).split(list(lengths), dim)[self.rank]

    def all_to_all(self, tensors: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        taken = [sent[self.rank] for sent in self._all([t.clone() for t in tensors])]
        assert [tuple(t.shape) for t in taken] == [tuple(s) for s in shapes]
        return taken

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        result: torch.Tensor = self._all(tensor.clone())[source].clone()  # each rank may change its own
        return result

    def send(self, tensor: torch.Tensor, to: int) -> None:
        with self.meeting.posted:
            self.meeting.mail.setdefault((self.rank, to), []).append(tensor.clone())
            self.meeting.posted.notify_all()

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> torch.Tensor:
        with self.meeting.posted:
            came = self.meeting.posted.wait_for(lambda: self.meeting.mail.get((source, self.rank)), timeout=30)
            assert came, f"nothing came from {source}"
            tensor = self.meeting.mail[source, self.rank].pop(0)
        assert tensor.shape == shape and tensor.dtype == dtype
        return tensor

    def barrier(self) -> None:
        self._all(None)

    def rounds(self, dtype: torch.dtype) -> None:
        return None

    def join_round(self) -> None:
        return None

    def describe(self) -> dict[str, Any]:
        return {"transport": "lockstep"}


def run_ranks(size: int, body: Callable[[LockstepGroup], T]) -> list[T]:
    """`body` on every rank of a group, each on its own thread; the results in rank order, or the first failure."""
    meeting = Meeting(size)
    return _run(size, lambda rank: body(LockstepGroup(meeting, rank)), [meeting])


def run_mesh(mesh: Mesh, body: Callable[[int, Groups], T]) -> list[T]:
    """`body` on every rank of a mesh, with a group for each axis; the results in rank order, or the first failure."""
    meetings = {(axis, ranks): Meeting(len(ranks)) for axis in AXES for ranks in mesh.groups(axis) if len(ranks) > 1}

    def groups_of(rank: int) -> Groups:
        groups: dict[str, Group] = {}
        for axis in AXES:
            ranks = mesh.group(axis, rank)
            meeting = meetings.get((axis, ranks))
            groups[axis] = SingleGroup() if meeting is None else LockstepGroup(meeting, ranks.index(rank))
        return Groups(**groups)

    return _run(mesh.world_size, lambda rank: body(rank, groups_of(rank)), list(meetings.values()))


def _run(size: int, body: Callable[[int], T], meetings: Sequence[Meeting]) -> list[T]:
    results: list[Any] = [None] * size
    failures: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as error:
            failures.append(error)
            for meeting in meetings:
                meeting.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if failures:
        raise next((f for f in failures if not isinstance(f, threading.BrokenBarrierError)), failures[0])
    assert not any(thread.is_alive() for thread in threads), "a rank is stuck"
    return results

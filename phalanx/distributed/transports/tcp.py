"""The group of ranks on several nodes: one authenticated connection a pair.

Every exchange sends and receives on all connections at once, so that two ranks that send each other much never wait
for each other. A frame's kind holds the operation and its number, and its length is known on both sides: ranks that
disagree find out at once. Small tensors go to everybody and each rank adds them up; large ones are added up in
slices, one a rank, which are then shared, so that each link carries about twice the tensor. Sums are taken in rank
order, so that all ranks hold the same bits.
"""

from __future__ import annotations

import select
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from phalanx.distributed.transports.abort import Abort, GroupBroken
from phalanx.distributed.transports.secure_stream import SecureStream

_WHOLE_SUM = 1 << 15
_ALL_REDUCE, _SHARE, _GATHER, _SCATTER, _TO_ALL, _BROADCAST, _BARRIER, _SEND = range(1, 9)


class TcpGroup:
    def __init__(
        self, streams: Mapping[int, SecureStream], rank: int, ranks: Sequence[int], abort: Abort, timeout: float | None
    ):
        """`streams` by the members' rank in the group; `timeout` in seconds bounds every exchange."""
        self.rank, self.size = rank, len(ranks)
        self._streams, self._ranks, self._abort, self._timeout = dict(streams), tuple(ranks), abort, timeout
        self._number = 0
        self._sent = [0] * self.size
        self._received = [0] * self.size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.contiguous().view(-1)
        if flat.numel() * flat.element_size() <= _WHOLE_SUM:
            parts = {r: torch.empty_like(flat) for r in self._streams}
            self._exchange(_ALL_REDUCE, dict.fromkeys(self._streams, flat), parts)
            parts[self.rank] = flat
            return add_up([parts[r] for r in range(self.size)]).view(tensor.shape)
        bounds = [flat.numel() * r // self.size for r in range(self.size + 1)]
        lengths = [b - a for a, b in pairwise(bounds)]
        mine = self.reduce_scatter(flat, 0, lengths)
        return self.all_gather(mine, 0, lengths).view(tensor.shape)

    def all_gather(self, tensor: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        mine = tensor.contiguous()
        parts = {
            r: tensor.new_empty([*tensor.shape[:dim], lengths[r], *tensor.shape[dim + 1 :]]) for r in self._streams
        }
        self._exchange(_GATHER, dict.fromkeys(self._streams, mine), parts)
        parts[self.rank] = mine
        return torch.cat([parts[r] for r in range(self.size)], dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        pieces = [piece.contiguous() for piece in torch.split(tensor, list(lengths), dim)]
        parts = {r: torch.empty_like(pieces[self.rank]) for r in self._streams}
        self._exchange(_SCATTER, {r: pieces[r] for r in self._streams}, parts)
        parts[self.rank] = pieces[self.rank]
        return add_up([parts[r] for r in range(self.size)])

    def all_to_all(self, tensors: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        parts = {r: tensors[0].new_empty(shapes[r]) for r in self._streams}
        self._exchange(_TO_ALL, {r: tensors[r].contiguous() for r in self._streams}, parts)
        parts[self.rank] = tensors[self.rank]
        return [parts[r] for r in range(self.size)]

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        if self.rank == source:
            out = tensor.contiguous()
            self._exchange(_BROADCAST, dict.fromkeys(self._streams, out), {})
        else:
            out = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            self._exchange(_BROADCAST, {}, {source: out})
        return out

    def barrier(self) -> None:
        token = torch.zeros(1, dtype=torch.uint8)
        self._exchange(
            _BARRIER, dict.fromkeys(self._streams, token), {r: torch.empty_like(token) for r in self._streams}
        )

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self._sent[to] += 1
        self._run({to: tensor.contiguous()}, {}, _SEND << 24 | self._sent[to] & 0xFFFFFF)

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> torch.Tensor:
        self._received[source] += 1
        out = torch.empty(shape, dtype=dtype)
        self._run({}, {source: out}, _SEND << 24 | self._received[source] & 0xFFFFFF)
        return out

    def _exchange(
        self, operation: int, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]
    ) -> None:
        self._number += 1
        self._run(outgoing, incoming, operation << 24 | self._number & 0xFFFFFF)

    def _run(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor], kind: int) -> None:
        """Send and receive one frame a peer, all at once. Raises GroupBroken."""
        work = [(r, self._streams[r].outgoing(kind, _bytes(tensor))) for r, tensor in outgoing.items()]
        work += [(r, self._streams[r].incoming(kind, _bytes(tensor))) for r, tensor in incoming.items()]
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        while True:
            self._abort.check()
            waiting: dict[int, int] = {}
            unfinished = []
            for r, steps in work:
                event = next(steps, None)
                if event is not None:
                    unfinished.append((r, steps))
                    waiting[r] = waiting.get(r, 0) | event
            if not unfinished:
                return
            work = unfinished
            poll = select.poll()
            poll.register(self._abort.fileno(), select.POLLIN)
            for r, events in waiting.items():
                poll.register(self._streams[r], events)
            left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
            if not poll.poll(left):
                late = ", ".join(str(self._ranks[r]) for r in waiting)
                raise GroupBroken(f"Rank {self._ranks[self.rank]} waited {self._timeout:g} s for rank {late}.")

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()


def add_up(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum in the order of `pieces`; narrow floats of more than two ranks are rounded once, at the end."""
    if len(pieces) > 2 and pieces[0].dtype in (torch.bfloat16, torch.float16):
        total = pieces[0].float()
        for piece in pieces[1:]:
            total += piece
        return total.to(pieces[0].dtype)
    out = torch.add(pieces[0], pieces[1])
    for piece in pieces[2:]:
        out += piece
    return out


def _bytes(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's memory."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]

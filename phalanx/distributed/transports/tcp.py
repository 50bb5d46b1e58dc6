"""The group of ranks on several nodes: one authenticated connection a pair.

Every exchange sends and receives on all connections at once, so that two ranks that send each other much never wait
for each other. A frame says its operation, dtype and number, and its length is known on both sides: ranks that
disagree find out at once, and hang up, so that the others find out too. Small tensors go to everybody and each rank
adds them up; large ones are added up in slices, one a rank, which are then shared, so that each link carries about
twice the tensor. Sums are taken in rank order, so that all ranks hold the same bits.

`send` and `recv` fit each other by number, apart from the collectives. Ranks that wait for each other in a circle, or
in `send`s that nobody receives, wait until the time-out or the abort.
"""

from __future__ import annotations

import select
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from phalanx.distributed.transports.abort import Abort, GroupBroken, PeerLost
from phalanx.distributed.transports.secure_stream import SecureStream
from phalanx.distributed.transports.sums import (
    ALL_REDUCE,
    BARRIER,
    BROADCAST,
    DTYPES,
    GATHER,
    OPERATIONS,
    SCATTER,
    SEND,
    TO_ALL,
    add_up,
    as_bytes,
    described,
    slices,
)

_WHOLE_SUM = 1 << 15
_COUNT = (1 << 23) - 1
_CHECK_MS = 500.0

_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}

Tensors = Mapping[int, torch.Tensor]
"""One a peer, by its rank in the group."""


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

    @property
    def streams(self) -> Mapping[int, SecureStream]:
        """The members' connections, by their rank in the group."""
        return self._streams

    def describe(self) -> dict[str, Any]:
        sealed = any(stream.encrypted for stream in self._streams.values())
        return {"transport": "tcp", "encrypted": sealed, "sliced_from_bytes": _WHOLE_SUM + 1}

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.contiguous().view(-1)
        if flat.numel() * flat.element_size() <= _WHOLE_SUM:
            parts = {r: torch.empty_like(flat) for r in self._streams}
            self._exchange(ALL_REDUCE, flat.dtype, dict.fromkeys(self._streams, flat), parts)
            return self._sum(parts, flat).view(tensor.shape)
        bounds = slices(flat.numel(), self.size)
        first, last = bounds[self.rank]
        outgoing = {r: flat[a:b] for r, (a, b) in enumerate(bounds) if r != self.rank}
        parts = {r: flat.new_empty(last - first) for r in self._streams}
        self._exchange(ALL_REDUCE, flat.dtype, outgoing, parts)
        mine = self._sum(parts, flat[first:last])
        out = torch.empty_like(flat)
        out[first:last] = mine
        incoming = {r: out[a:b] for r, (a, b) in enumerate(bounds) if r != self.rank}
        self._exchange(ALL_REDUCE, flat.dtype, dict.fromkeys(self._streams, mine), incoming)
        return out.view(tensor.shape)

    def all_gather(self, tensor: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        if tensor.shape[dim] != lengths[self.rank]:
            raise self._broken(f"{self._me} has {tensor.shape[dim]} entries, not the {lengths[self.rank]} expected.")
        mine = tensor.contiguous()
        shape = list(tensor.shape)
        parts = {}
        for r in self._streams:
            shape[dim] = lengths[r]
            parts[r] = tensor.new_empty(shape)
        self._exchange(GATHER, mine.dtype, dict.fromkeys(self._streams, mine), parts)
        return torch.cat([mine if r == self.rank else parts[r] for r in range(self.size)], dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        if tensor.shape[dim] != sum(lengths):
            raise self._broken(f"{self._me} has {tensor.shape[dim]} entries, not the {sum(lengths)} expected.")
        pieces = [piece.contiguous() for piece in torch.split(tensor, list(lengths), dim)]
        parts = {r: torch.empty_like(pieces[self.rank]) for r in self._streams}
        self._exchange(SCATTER, tensor.dtype, {r: pieces[r] for r in self._streams}, parts)
        return self._sum(parts, pieces[self.rank])

    def all_to_all(self, tensors: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        parts = {r: tensors[0].new_empty(shapes[r]) for r in self._streams}
        self._exchange(TO_ALL, tensors[0].dtype, {r: tensors[r].contiguous() for r in self._streams}, parts)
        return [tensors[r] if r == self.rank else parts[r] for r in range(self.size)]

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        if self.rank == source:
            out = tensor.contiguous()
            self._exchange(BROADCAST, out.dtype, dict.fromkeys(self._streams, out), {})
        else:
            out = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            self._exchange(BROADCAST, out.dtype, {}, {source: out})
        return out

    def barrier(self) -> None:
        token = torch.zeros(1, dtype=torch.uint8)
        incoming = {r: torch.empty_like(token) for r in self._streams}
        self._exchange(BARRIER, token.dtype, dict.fromkeys(self._streams, token), incoming)

    def rounds(self, dtype: torch.dtype) -> None:
        return None

    def join_round(self) -> None:
        return None

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self._sent[to] += 1
        self._run(_kind(SEND, tensor.dtype, self._sent[to]), {to: tensor.contiguous()}, {})

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> torch.Tensor:
        self._received[source] += 1
        out = torch.empty(shape, dtype=dtype)
        self._run(_kind(SEND, dtype, self._received[source]), {}, {source: out})
        return out

    def _sum(self, parts: Tensors, mine: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(mine)
        add_up([mine if r == self.rank else parts[r] for r in range(self.size)], out)
        return out

    def _exchange(self, operation: int, dtype: torch.dtype, outgoing: Tensors, incoming: Tensors) -> None:
        self._number += 1
        self._abort.pulse.count += 1
        self._run(_kind(operation, dtype, self._number), outgoing, incoming)

    def _run(self, kind: int, outgoing: Tensors, incoming: Tensors) -> None:
        """Send to and receive from each peer, all at once. Raises GroupBroken; the group is of no more use then."""
        work = [(r, self._streams[r].outgoing(kind, _bytes(tensor))) for r, tensor in outgoing.items()]
        work += [(r, self._streams[r].incoming(kind, _bytes(tensor), _describe)) for r, tensor in incoming.items()]
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        try:
            while True:
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
                self._wait(waiting, deadline, kind)
        except GroupBroken as broken:
            lost = PeerLost if isinstance(broken, PeerLost) else GroupBroken
            raise self._broken(f"{self._me}: {broken.message}", lost) from None

    def _wait(self, waiting: Mapping[int, int], deadline: float | None, kind: int) -> None:
        """Until one of the streams (events by rank) can go on."""
        poll = select.poll()
        poll.register(self._abort.fileno(), select.POLLIN)
        for r, events in waiting.items():
            poll.register(self._streams[r], events)
        pulse = self._abort.pulse
        pulse.waits_for = ", ".join(f"rank {self._ranks[r]}" for r in waiting)
        try:
            while True:
                left = _CHECK_MS if deadline is None else min(_CHECK_MS, (deadline - time.monotonic()) * 1000)
                ready = poll.poll(max(left, 0.0))
                self._abort.check()
                if ready:
                    pulse.count += 1  # bytes of a long exchange over a slow link are progress
                    return
                if left <= 0:
                    late = ", ".join(str(self._ranks[r]) for r in waiting)
                    doing = f"exchange {kind & _COUNT}, {OPERATIONS[kind >> 28]}"
                    raise GroupBroken(f"waited {self._timeout:g} s for rank {late} in {doing}.")
                for r in waiting:
                    self._streams[r].check_answers()
        finally:
            pulse.waits_for = ""

    @property
    def _me(self) -> str:
        return f"Rank {self._ranks[self.rank]}"

    def _broken(self, message: str, kind: type[GroupBroken] = GroupBroken) -> GroupBroken:
        """This rank hangs up, so that nobody waits for it; its error."""
        for stream in self._streams.values():
            stream.shut()
        return kind(message)

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()


def _kind(operation: int, dtype: torch.dtype, number: int) -> int:
    """What a frame says it is: operation, dtype and the number of the exchange, in 32 bits."""
    code = _NUMBERS.get(dtype)
    if code is None:
        raise ValueError(f"{dtype} cannot be exchanged")
    return operation << 28 | code << 23 | number & _COUNT


def _describe(kind: int, nbytes: int) -> str:
    return f"exchange {kind & _COUNT}, {described(kind >> 28, kind >> 23 & 0x1F, nbytes)}"


def _bytes(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's memory."""
    return memoryview(as_bytes(tensor).numpy())  # type: ignore[arg-type]

"""How fast a group is: one rank's side of `phalanx bench comm`.

Times every operation at every size, of several groups of the same ranks in turn, so that what else the machine does
falls on all of them alike. All ranks run the same rounds; the first one's clock says how many. gloo is here as the
yardstick only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import cycle, islice
from typing import Any, NamedTuple, cast

import msgspec
import torch

from phalanx.distributed.address import Address
from phalanx.distributed.bootstrap import Door, Meeting, connect_groups
from phalanx.distributed.collectives import Group
from phalanx.distributed.mailbox import MESSAGE_LIMIT, Mailbox
from phalanx.distributed.mesh import Mesh
from phalanx.distributed.transport import Packed
from phalanx.distributed.transports.abort import Abort
from phalanx.distributed.transports.nccl import TorchGroup
from phalanx.distributed.transports.tcp import TcpGroup

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "message", "barrier")
"""A message goes through a mailbox, where there is one: not the way of tensors."""

_BLOCKS = 4
"""The groups take turns this many times at each size."""

_WARM_UP = 3
_LEAST, _MOST = 2, 250
"""Exchanges a turn."""


class Timing(msgspec.Struct, frozen=True):
    """Seconds of one operation at one size."""

    operation: str
    nbytes: int
    group: str
    median: float
    p90: float
    count: int


class Speed(msgspec.Struct, frozen=True):
    timings: list[Timing]
    copied: dict[int, float]
    """Bytes a second of copying a tensor of so many bytes, with all ranks doing so at once."""
    how: dict[str, dict[str, Any]] = {}
    """What each group says of itself (`Group.describe`), and `message_limit` where messages go another way."""


def one_thread() -> None:
    """A rank uses one core."""
    torch.set_num_threads(1)


class Ways(NamedTuple):
    group: Group
    mailbox: Mailbox | None
    """None: messages are tensors too."""


def connect(
    transport: str, door: Door, roster: Sequence[Address], key: bytes, meeting_file: str, crowded: bool
) -> Ways:
    """From this rank to all; `transport` is shm, tcp, tcp-encrypted, tcp-packed, or gloo (meets in that file)."""
    rank, size = door.address.rank, len(roster)
    if transport == "gloo":
        return Ways(_gloo(rank, size, meeting_file), None)
    if transport != "shm":  # as if every rank were on a node of its own
        roster = [msgspec.structs.replace(address, node=f"{address.node}/{address.rank}") for address in roster]
        door.address = roster[rank]
    packs = Packed() if transport == "tcp-packed" else None
    meeting = Meeting(0, key, transport == "tcp-encrypted", exchange_timeout=60.0, transport=packs)
    group = connect_groups(Mesh(tp=size), door, roster, meeting, Abort(), crowded=crowded).tp
    beside = replace(meeting, epoch=1, sockets=True, transport=None)
    sockets = connect_groups(Mesh(dp=size), door, roster, beside, Abort(), crowded=True).dp
    return Ways(group, Mailbox(cast(TcpGroup, sockets)))


def _gloo(rank: int, size: int, meeting_file: str) -> Group:
    from torch._C._distributed_c10d import FileStore, ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=60)
    backend = ProcessGroupGloo(FileStore(meeting_file, size), rank, size, options)
    return TorchGroup(backend, range(size), Abort())


def measure(ways: Mapping[str, Ways], operations: Sequence[str], sizes: Sequence[int], seconds: float) -> Speed:
    """Times by operation and size; about `seconds` in all. Made by all ranks at once."""
    groups = {name: way.group for name, way in ways.items()}
    own = {"barrier": [0], "message": [nbytes for nbytes in sizes if nbytes <= MESSAGE_LIMIT]}
    cases = [(name, nbytes) for name in operations for nbytes in own.get(name, sizes)]
    share = seconds / (len(cases) * len(groups))
    copied = {nbytes: _copy_speed(next(iter(groups.values())), nbytes) for nbytes in sizes}
    timings = []
    for operation, nbytes in cases:
        samples: dict[str, list[float]] = {name: [] for name in groups}
        calls = {name: _call(way, operation, nbytes) for name, way in ways.items()}
        counts = {name: _count(group, calls[name], share / _BLOCKS) for name, group in groups.items()}
        for name in islice(cycle(groups), _BLOCKS * len(groups)):
            groups[name].barrier()
            samples[name] += _timed(calls[name], counts[name])
        both_ways = 2 if operation in ("send", "message") else 1
        for name, times in samples.items():
            ordered = sorted(t / both_ways for t in times)
            p90 = ordered[min(len(ordered) * 9 // 10, len(ordered) - 1)]
            timings.append(Timing(operation, nbytes, name, statistics.median(ordered), p90, len(ordered)))
    messages = {name: {"message_limit": MESSAGE_LIMIT} if way.mailbox is not None else {} for name, way in ways.items()}
    return Speed(timings, copied, {name: {**group.describe(), **messages[name]} for name, group in groups.items()})


def _timed(call: Callable[[], object], count: int) -> list[float]:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def _count(group: Group, call: Callable[[], object], seconds: float) -> int:
    """How often a turn of so many seconds makes this call: as the first rank says."""
    took = statistics.median(_timed(call, _WARM_UP)[1:])
    count = min(max(int(seconds / max(took, 1e-7)), _LEAST), _MOST)
    return int(group.broadcast(torch.tensor(count), 0))


def _copy_speed(group: Group, nbytes: int) -> float:
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
    target.copy_(source)
    group.barrier()
    return nbytes / statistics.median(_timed(lambda: target.copy_(source), 15))


def _call(way: Ways, operation: str, nbytes: int) -> Callable[[], object]:
    """The operation on a tensor of `nbytes` float32, of which each rank has or gets its part where it is split."""
    group, mailbox = way
    size, me = group.size, group.rank
    count = max(nbytes // 4 // size, 1)
    whole, part, lengths = torch.zeros(count * size), torch.zeros(count), [count] * size
    if operation == "all_reduce":
        return lambda: group.all_reduce(whole)
    if operation == "all_gather":
        return lambda: group.all_gather(part, 0, lengths)
    if operation == "reduce_scatter":
        return lambda: group.reduce_scatter(whole, 0, lengths)
    if operation == "all_to_all":
        return lambda: group.all_to_all([part] * size, [(count,)] * size)
    if operation == "broadcast":
        return lambda: group.broadcast(whole, 0)
    if operation == "barrier":
        return group.barrier
    if operation == "message" and mailbox is not None:
        return lambda: _message_and_answer(mailbox, me, bytes(nbytes))
    return lambda: _there_and_back(group, me, whole)


def _there_and_back(group: Group, me: int, tensor: torch.Tensor) -> None:
    """From the first rank to the second and back; the others have nothing to do."""
    shape = tuple(tensor.shape)
    if me == 0:
        group.send(tensor, 1)
        group.recv(shape, tensor.dtype, 1)
    elif me == 1:
        group.send(group.recv(shape, tensor.dtype, 0), 0)


def _message_and_answer(mailbox: Mailbox, me: int, data: bytes) -> None:
    if me == 0:
        mailbox.send(data, 1)
        mailbox.receive(1)
    elif me == 1:
        mailbox.send(mailbox.receive(0), 0)

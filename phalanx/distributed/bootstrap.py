"""From "I am rank r" to connected groups: where a rank can be reached, and how its groups of one epoch are made.

Each rank opens a `Door` (an abstract Unix socket for its own node, and a TCP port when the world spans nodes) and tells
its address to whoever collects the roster. With the roster and the epoch's key, `connect_groups` makes one group per
axis of the mesh: shared memory where all members are on one node, TCP otherwise. A rank calls on the lower members and
opens to the higher ones, so nobody waits in a circle. Callers without the key are turned away and counted.

Starts no thread and no process. Ranks on GPUs get NCCL groups (`transports.nccl`) over the same roster.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from phalanx.distributed.collectives import Group, Groups, SingleGroup
from phalanx.distributed.mesh import AXES, Axis, Mesh
from phalanx.distributed.transports.abort import Abort, GroupBroken
from phalanx.distributed.transports.secure_stream import SecureStream, Unauthenticated
from phalanx.distributed.transports.shared_memory import SharedMemoryGroup
from phalanx.distributed.transports.tcp import TcpGroup

_HELLO = 1
_HELLO_LIMIT = 256
_KNOCK_S = 2.0
"""A caller must prove the key within this time."""


@cache
def node_id() -> str:
    """Equal for processes that can share memory by descriptor: same kernel since its boot, same network namespace."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/net')}"


class Address(msgspec.Struct, frozen=True):
    """Where a rank can be reached."""

    rank: int
    node: str
    unix: str
    """Name of an abstract Unix socket, without its leading NUL."""
    host: str = ""
    port: int = 0
    """0 when the rank is not reachable from other nodes."""


class _Hello(msgspec.Struct, frozen=True):
    axis: str
    rank: int
    epoch: int


@dataclass(frozen=True)
class Meeting:
    """What ranks must agree on to meet."""

    epoch: int
    key: bytes
    """32 bytes, fresh for each epoch."""
    encrypt: bool = False
    """Seal what travels between nodes."""
    timeout: float = 60.0
    """Seconds to meet."""
    exchange_timeout: float | None = None
    """Seconds that one exchange may take; None waits until it is aborted."""


class Door:
    """This rank's listening sockets. `host` is the address that other nodes reach it by; None stays on the node."""

    def __init__(self, rank: int, host: str | None):
        self.refused = 0
        """Callers that did not have the key."""
        self._unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        name = f"phalanx-{secrets.token_hex(16)}"
        self._unix.bind(f"\0{name}")
        self._unix.listen(64)
        self._tcp: socket.socket | None = None
        port = 0
        if host is not None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._tcp = socket.create_server((host, 0), family=family, backlog=64)
            port = self._tcp.getsockname()[1]
        self.address = Address(rank, node_id(), name, host or "", port)

    def accept(self, deadline: float, abort: Abort) -> socket.socket:
        """Raises GroupBroken when nobody comes in time."""
        poll = select.poll()
        doors = {door.fileno(): door for door in (self._unix, self._tcp) if door is not None}
        for fd in doors:
            poll.register(fd, select.POLLIN)
        poll.register(abort.fileno(), select.POLLIN)
        ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        abort.check()
        for fd, _ in ready:
            return doors[fd].accept()[0]
        raise GroupBroken("Not all ranks came in time.")

    def close(self) -> None:
        for door in (self._unix, self._tcp):
            if door is not None:
                door.close()


def connect_groups(
    mesh: Mesh, door: Door, roster: Sequence[Address], meeting: Meeting, abort: Abort, *, crowded: bool
) -> Groups:
    """This rank's groups. `roster[r]` is rank r's address; `crowded`: more ranks than cores on this node (do not spin).

    Raises GroupBroken when a peer cannot be reached or does not come, naming both ranks.
    """
    rank = door.address.rank
    deadline = time.monotonic() + meeting.timeout
    members = {axis: mesh.group(axis, rank) for axis in AXES}
    expected = {
        (axis, peer)
        for axis, ranks in members.items()
        for peer in ranks
        if peer > rank and _talk(axis, ranks, roster, rank, peer)
    }
    callers: dict[tuple[str, int], SecureStream] = {}
    streams: dict[tuple[str, int], SecureStream] = {}
    for axis, ranks in members.items():
        for peer in ranks:
            if peer < rank and _talk(axis, ranks, roster, peer, rank):
                streams[axis, peer] = _call(axis, roster[peer], door.address, meeting, abort, deadline)
    while expected - callers.keys():
        stream, hello = _open(door, meeting, abort, deadline, expected - callers.keys())
        if hello is not None:
            callers[hello.axis, hello.rank] = stream
    streams |= callers
    groups: dict[str, Group] = {}
    for axis, ranks in members.items():
        mine = {ranks.index(peer): stream for (a, peer), stream in streams.items() if a == axis}
        groups[axis] = _make(ranks, rank, mine, roster, meeting, abort, crowded)
    return Groups(**groups)


def _local(ranks: Sequence[int], roster: Sequence[Address]) -> bool:
    return len({roster[r].node for r in ranks}) == 1


def _talk(axis: Axis, ranks: Sequence[int], roster: Sequence[Address], low: int, high: int) -> bool:
    """Whether these two need a connection: all pairs over TCP, only with the segment's maker in shared memory."""
    return not _local(ranks, roster) or low == min(ranks)


def _call(axis: str, to: Address, own: Address, meeting: Meeting, abort: Abort, deadline: float) -> SecureStream:
    local = to.node == own.node
    name = f"rank {to.rank}" + ("" if local else f" at {to.host}:{to.port}")
    try:
        if local:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.connect(f"\0{to.unix}")
        else:
            sock = socket.create_connection((to.host, to.port), timeout=max(0.1, deadline - time.monotonic()))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 3000)
    except OSError as error:
        raise GroupBroken(f"Rank {own.rank} cannot reach {name}: {error.strerror or error}.") from None
    stream = SecureStream(sock, abort, name)
    left = max(0.1, deadline - time.monotonic())
    stream.handshake(meeting.key, client=True, encrypt=meeting.encrypt and not local, timeout=left)
    stream.send(_HELLO, msgspec.msgpack.encode(_Hello(axis, own.rank, meeting.epoch)), left)
    return stream


def _open(
    door: Door, meeting: Meeting, abort: Abort, deadline: float, expected: set[tuple[Axis, int]]
) -> tuple[SecureStream, _Hello | None]:
    """One caller; without a hello when it was turned away."""
    sock = door.accept(deadline, abort)
    local = sock.family == socket.AF_UNIX
    if not local:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 3000)
    stream = SecureStream(sock, abort, "a caller")
    try:
        stream.handshake(meeting.key, client=False, encrypt=meeting.encrypt and not local, timeout=_KNOCK_S)
        _, content = stream.receive(_HELLO_LIMIT, _KNOCK_S)
        hello = msgspec.msgpack.decode(content, type=_Hello)
    except (Unauthenticated, GroupBroken, msgspec.DecodeError):
        abort.check()
        stream.close()
        door.refused += 1
        return stream, None
    if hello.epoch != meeting.epoch or (hello.axis, hello.rank) not in expected:
        stream.close()
        door.refused += 1
        return stream, None
    stream.peer = f"rank {hello.rank}"
    return stream, hello


def _make(
    ranks: Sequence[int], rank: int, streams: dict[int, SecureStream], roster: Sequence[Address], meeting: Meeting,
    abort: Abort, crowded: bool,
) -> Group:  # fmt: skip
    if len(ranks) == 1:
        return SingleGroup()
    place, timeout = ranks.index(rank), meeting.exchange_timeout
    if not _local(ranks, roster):
        return TcpGroup(streams, place, ranks, abort, timeout)
    if place == 0:
        group = SharedMemoryGroup.create(place, ranks, abort, crowded, timeout)
        for stream in streams.values():
            stream.send_descriptors(group.fds, meeting.timeout)
            stream.close()
        return group
    fds = streams[0].receive_descriptors(len(ranks) + 1, meeting.timeout)
    streams[0].close()
    return SharedMemoryGroup.attach(fds, place, ranks, abort, crowded, timeout)


def close_groups(groups: Groups) -> None:
    """Idempotent."""
    for axis in AXES:
        group = getattr(groups, axis)
        if not isinstance(group, SingleGroup):
            group.close()

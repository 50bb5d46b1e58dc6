"""From "I am rank r" to connected groups: where a rank can be reached, and how its groups of one epoch are made.

Each rank opens a `Door` (an abstract Unix socket for its own node, and a TCP port when the world spans nodes) and tells
its address to whoever collects the roster. With the roster and the epoch's key, `connect_groups` makes one group per
axis of the mesh: shared memory where all members are on one node, TCP otherwise. A rank calls on the lower members and
opens to the higher ones, so nobody waits in a circle. All callers are heard at the same time: those without the key,
or who say nothing, are turned away and counted, and hold nobody up.

Starts no thread and no process, but for groups on GPUs (`transports.nccl`), which are made over those of the host.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec

from phalanx.distributed.address import Address, node_id
from phalanx.distributed.callers import who_goes
from phalanx.distributed.collectives import Group, Groups, OpenGroup, SingleGroup
from phalanx.distributed.mesh import AXES, Axis, Mesh
from phalanx.distributed.transport import Link, Transport
from phalanx.distributed.transports.abort import Abort, GroupBroken, PeerLost
from phalanx.distributed.transports.secure_stream import SecureStream, Steps
from phalanx.distributed.transports.shared_memory import SharedMemoryGroup
from phalanx.distributed.transports.tcp import TcpGroup

_HELLO = 1
_HELLO_LIMIT = 1 << 16
_KNOCK_S = 2.0
"""A caller must prove the key within this time."""

_CALLERS = 64
"""Callers heard at the same time."""

_CONNECT_S = 5.0
"""A peer that does not answer at all within this time cannot be reached."""

_TRY_AGAIN_S = 0.02
_TURNED_AWAY_S = 10.0
"""A peer that is still in an older epoch turns calls away; for so long they are repeated."""


class _Hello(msgspec.Struct, frozen=True):
    axis: Axis
    rank: int
    epoch: int
    members: tuple[int, ...]
    """The group, as the caller knows it."""


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
    transport: Transport | None = None
    """What is put before the groups, or in their place; None: nothing."""
    sockets: bool = False
    """A socket a pair on one node too, instead of shared memory, and no NCCL: for short messages that nobody times."""


class Door:
    """This rank's listening sockets. `host` is the address that other nodes reach it by; None stays on the node.
    `device` tells its GPU from others (a UUID); empty when its tensors are the host's.

    Raises OSError when `host` is not an address of this node.
    """

    def __init__(self, rank: int, host: str | None, device: str = ""):
        self.refused = 0
        """Callers that did not have the key."""
        name = f"phalanx-{secrets.token_hex(16)}"
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sockets = [unix]
        unix.bind(f"\0{name}")
        unix.listen(256)
        port = 0
        if host is not None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                self.sockets.append(socket.create_server((host, 0), family=family, backlog=256))
            except OSError:
                unix.close()
                raise
            port = self.sockets[1].getsockname()[1]
        for listener in self.sockets:
            listener.setblocking(False)
        self.address = Address(rank, node_id(), name, host or "", port, device)

    def close(self) -> None:
        for listener in self.sockets:
            listener.close()


def connect_groups(
    mesh: Mesh, door: Door, roster: Sequence[Address], meeting: Meeting, abort: Abort, *, crowded: bool
) -> Groups:
    """This rank's groups. `roster[r]` is rank r's address; `crowded`: more ranks than cores on this node (do not spin).
    Where all members of a group have GPUs it exchanges this process's current device's tensors, else the host's.

    Raises GroupBroken when a peer cannot be reached or does not come, naming both ranks. Leaves nothing open then.
    """
    rank = door.address.rank
    deadline = time.monotonic() + meeting.timeout
    members = {axis: mesh.group(axis, rank) for axis in AXES}
    streams: dict[tuple[Axis, int], SecureStream] = {}
    groups: dict[str, Group] = {}
    try:
        expected = set()
        for axis, ranks in members.items():
            for peer in ranks:
                if peer < rank and (meeting.sockets or _talk(ranks, roster, peer)):
                    hello = _Hello(axis, rank, meeting.epoch, ranks)
                    streams[axis, peer] = _call(roster[peer], door.address, hello, meeting, abort, deadline)
                elif peer > rank and (meeting.sockets or _talk(ranks, roster, rank)):
                    expected.add((axis, peer))
        _Reception(door, members, expected, streams, meeting, abort).open(roster, deadline)
        for axis, ranks in members.items():
            mine = {ranks.index(peer): stream for (a, peer), stream in streams.items() if a == axis}
            groups[axis] = _make(ranks, rank, mine, roster, meeting, abort, crowded)
        for axis, ranks in members.items() if not meeting.sockets else ():
            groups[axis] = _on_devices(groups[axis], ranks, roster, abort, meeting.exchange_timeout)
            if meeting.transport is not None and len(ranks) > 1:
                link = Link(axis, tuple(roster[r] for r in ranks), abort, meeting.exchange_timeout)
                groups[axis] = meeting.transport.connect(cast("OpenGroup", groups[axis]), link)
    except BaseException:
        for stream in streams.values():
            stream.close()
        close_groups(Groups(**groups))
        raise
    return Groups(**groups)


def _local(ranks: Sequence[int], roster: Sequence[Address]) -> bool:
    return len({roster[r].node for r in ranks}) == 1


def _talk(ranks: Sequence[int], roster: Sequence[Address], lower: int) -> bool:
    """Whether two ranks need a connection: all pairs over TCP, only with the segment's maker in shared memory."""
    return not _local(ranks, roster) or lower == ranks[0]


# -- calling -------------------------------------------------------------------------------------------------------


def _call(
    to: Address, own: Address, hello: _Hello, meeting: Meeting, abort: Abort, deadline: float
) -> SecureStream:  # fmt: skip
    """A stream to a lower rank, who knows who calls and why."""
    local = to.node == own.node
    name = f"rank {to.rank}" + ("" if local else f" at {to.host}:{to.port}")
    patience = min(deadline, time.monotonic() + _TURNED_AWAY_S)
    while True:
        stream = SecureStream(_connect(to, own, name, abort, deadline), abort, name)
        try:
            left = max(0.1, deadline - time.monotonic())
            stream.handshake(meeting.key, client=True, encrypt=meeting.encrypt and not local, timeout=left)
            stream.send(_HELLO, msgspec.msgpack.encode(hello), left)
            if stream.receive(0, left)[0] != _HELLO:
                raise PeerLost(f"{name} did not answer as expected.")
            return stream
        except PeerLost:
            stream.close()
            if time.monotonic() > patience:
                raise GroupBroken(
                    f"Rank {own.rank} was turned away by {name}: they do not have the same key, or only one encrypts.",
                    fix="Start all nodes with the same version and the same --encrypt-transport.",
                ) from None
        except BaseException:
            stream.close()
            raise
        _pause(abort)


def _connect(to: Address, own: Address, name: str, abort: Abort, deadline: float) -> socket.socket:
    local = to.node == own.node
    family = socket.AF_UNIX if local else socket.AF_INET6 if ":" in to.host else socket.AF_INET
    address = f"\0{to.unix}" if local else (to.host, to.port)
    deadline = min(deadline, time.monotonic() + _CONNECT_S)
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        while (code := sock.connect_ex(address)) in (errno.EAGAIN, errno.EINPROGRESS):
            if code == errno.EINPROGRESS:
                code = _connected(sock, abort, deadline)
                break
            _pause(abort)  # a Unix socket whose queue is full
            if time.monotonic() > deadline:
                break
    except OSError as error:
        code = error.errno or errno.EHOSTUNREACH
    except GroupBroken:
        sock.close()
        raise
    if code:
        sock.close()
        remedy = f"Check that {to.host or 'its node'} is the right interface and that no firewall blocks the port;"
        raise GroupBroken(
            f"Rank {own.rank} cannot reach {name}: {os.strerror(code)}.",
            fix=None if local else f"{remedy} PHALANX_HOST_IP on a node sets the address that the others use.",
        )
    return sock


def _connected(sock: socket.socket, abort: Abort, deadline: float) -> int:
    """The error number of a connection under way; 0 when it stands."""
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    poll.register(abort.fileno(), select.POLLIN)
    ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
    abort.check()
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if ready else errno.ETIMEDOUT


def _pause(abort: Abort) -> None:
    poll = select.poll()
    poll.register(abort.fileno(), select.POLLIN)
    poll.poll(_TRY_AGAIN_S * 1000)
    abort.check()


# -- being called ----------------------------------------------------------------------------------------------------


@dataclass
class _Caller:
    stream: SecureStream
    steps: Steps[_Hello]
    address: str
    """Of its machine; empty for this one."""
    until: float
    event: int = select.POLLIN


@dataclass
class _Reception:
    """Hears callers until all who are expected have come; puts their streams into `streams`."""

    door: Door
    members: Mapping[Axis, tuple[int, ...]]
    expected: set[tuple[Axis, int]]
    streams: dict[tuple[Axis, int], SecureStream]
    meeting: Meeting
    abort: Abort
    callers: dict[int, _Caller] = field(default_factory=dict)
    """By descriptor, the oldest first."""

    def open(self, roster: Sequence[Address], deadline: float) -> None:
        try:
            while self.expected:
                if time.monotonic() > deadline:
                    raise self._missing(roster)
                self._turn(min(deadline, *(caller.until for caller in self.callers.values()), deadline))
        finally:
            for caller in self.callers.values():
                caller.stream.close()

    def _turn(self, until: float) -> None:
        poll = select.poll()
        poll.register(self.abort.fileno(), select.POLLIN)
        doors = {listener.fileno(): listener for listener in self.door.sockets}
        for fd in doors:
            poll.register(fd, select.POLLIN)
        for fd, caller in self.callers.items():
            poll.register(fd, caller.event)
        ready = poll.poll(max(0.0, until - time.monotonic()) * 1000)
        self.abort.check()
        for fd, _ in ready:
            if fd in doors:
                self._accept(doors[fd])
            elif fd in self.callers:
                self._hear(fd)
        now = time.monotonic()
        for fd in [fd for fd, caller in self.callers.items() if caller.until < now]:
            self._refuse(fd)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, peer = listener.accept()
        except OSError:  # the caller is gone again, or there is no descriptor left for it
            _pause(self.abort)
            return
        if len(self.callers) >= _CALLERS:
            self._refuse(who_goes({fd: caller.address for fd, caller in self.callers.items()}))
        stream = SecureStream(sock, self.abort, "a caller")
        local = sock.family == socket.AF_UNIX
        address, until = "" if local else str(peer[0]), time.monotonic() + _KNOCK_S
        self.callers[sock.fileno()] = _Caller(stream, self._welcome(stream, local), address, until)
        self._hear(sock.fileno())

    def _welcome(self, stream: SecureStream, local: bool) -> Steps[_Hello]:
        encrypt = self.meeting.encrypt and not local
        yield from stream.handshake_steps(self.meeting.key, client=False, encrypt=encrypt)
        _, content = yield from stream.receive_steps(_HELLO_LIMIT)
        return msgspec.msgpack.decode(content, type=_Hello)

    def _hear(self, fd: int) -> None:
        caller = self.callers[fd]
        try:
            caller.event = next(caller.steps)
            return
        except StopIteration as done:
            hello: _Hello = done.value
        except (GroupBroken, msgspec.MsgspecError):
            self._refuse(fd)
            return
        known = (hello.axis, hello.rank)
        if hello.epoch != self.meeting.epoch or known not in self.expected:
            self._refuse(fd)
            return
        if hello.members != self.members[hello.axis]:
            raise GroupBroken(
                f"Rank {hello.rank} is in the {hello.axis} group {list(hello.members)}, "
                f"rank {self.door.address.rank} in {list(self.members[hello.axis])}."
            )
        del self.callers[fd]
        self.expected.discard(known)
        self.streams[known] = caller.stream
        caller.stream.peer = f"rank {hello.rank}"
        caller.stream.send(_HELLO, b"", _KNOCK_S)

    def _refuse(self, fd: int) -> None:
        self.door.refused += 1
        self.callers.pop(fd).stream.close()

    def _missing(self, roster: Sequence[Address]) -> GroupBroken:
        ranks = sorted({rank for _, rank in self.expected})
        names = ", ".join(f"{r} ({roster[r].host})" if roster[r].host else str(r) for r in ranks)
        turned_away = f" {self.door.refused} callers were turned away." if self.door.refused else ""
        return GroupBroken(
            f"Rank {self.door.address.rank} waited {self.meeting.timeout:g} s for rank {names} to call.{turned_away}"
        )


# -- the groups ------------------------------------------------------------------------------------------------------


def _make(
    ranks: Sequence[int], rank: int, streams: dict[int, SecureStream], roster: Sequence[Address], meeting: Meeting,
    abort: Abort, crowded: bool,
) -> Group:  # fmt: skip
    if len(ranks) == 1:
        return SingleGroup()
    place, timeout = ranks.index(rank), meeting.exchange_timeout
    if meeting.sockets or not _local(ranks, roster):
        return TcpGroup(streams, place, ranks, abort, timeout)
    if place == 0:
        try:
            shared = SharedMemoryGroup.create(place, ranks, abort, crowded, timeout)
        except OSError as error:
            raise GroupBroken(f"Rank {rank} cannot make shared memory: {error.strerror or error}.") from None
        with contextlib.ExitStack() as stack:
            stack.callback(shared.close)
            for stream in streams.values():
                stream.send_descriptors(shared.fds, meeting.timeout)
                stream.close()
            stack.pop_all()
        return shared
    fds = streams[0].receive_descriptors(len(ranks) + 1, meeting.timeout)
    streams[0].close()
    try:
        return SharedMemoryGroup.attach(fds, place, ranks, abort, crowded, timeout)
    except OSError as error:
        for fd in fds:
            os.close(fd)
        raise GroupBroken(f"Rank {rank} cannot map shared memory: {error.strerror or error}.") from None


def _on_devices(
    group: Group, ranks: Sequence[int], roster: Sequence[Address], abort: Abort, timeout: float | None
) -> Group:
    """NCCL where every member has a GPU of its own, through the host where they share one."""
    devices = [roster[r].device for r in ranks]
    if len(ranks) == 1 or not all(devices):
        return group
    import torch

    from phalanx.distributed.transports.nccl import StagedGroup, connect_nccl

    device = torch.device("cuda", torch.cuda.current_device())
    if len(set(devices)) < len(devices) or not torch.distributed.is_nccl_available():
        return StagedGroup(group, device)
    host = "127.0.0.1" if _local(ranks, roster) else roster[ranks[0]].host
    return connect_nccl(group, ranks, device, host, abort, timeout)


def close_groups(groups: Groups) -> None:
    """Idempotent."""
    for axis in AXES:
        group = getattr(groups, axis)
        if not isinstance(group, SingleGroup):
            group.close()

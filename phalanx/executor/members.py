"""The ranks of a hub as it knows them, and the thread that hears them: it accepts those who prove the key, reads what
ranks say without ever waiting for one of them, and notices when one is gone.

Does not know epochs or what messages mean: that is the hub's business.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import msgspec

from phalanx.checkpoint.fingerprint import changed
from phalanx.distributed.address import Address, node_id
from phalanx.distributed.callers import who_goes
from phalanx.distributed.transports.abort import Abort, GroupBroken, Unreachable
from phalanx.distributed.transports.secure_stream import SecureStream, Steps
from phalanx.errors import CheckpointError, ConfigError
from phalanx.executor.base import CacheLayout, WorkerStatus
from phalanx.executor.messages import (
    LIMIT,
    MESSAGE,
    Failed,
    Join,
    Measured,
    Ping,
    Ready,
    ToRank,
    decode_from_rank,
    encode,
    failed,
)

log = logging.getLogger(__name__)

_KNOCK_S = 5.0
"""Seconds in which a caller must prove the key and say who it is."""

_CALLERS = 256
"""Callers heard at the same time."""

_SEND_S = 10.0
_LOCK_S = 2.0
_TICK_S = 0.5
"""Between looks at callers' time and at the network's silence, while there is either."""

_PING = encode(Ping())

Frame = tuple[int, bytes | memoryview]


class Member:
    """One rank of the world, in one life of its process."""

    def __init__(self, rank: int):
        self.rank = rank
        self.stream: SecureStream | None = None
        self.lock = threading.Lock()
        """Held by whoever sends."""
        self.join: Join | None = None
        self.lost = False
        self.loaded = False
        """It has its weights, in whatever epoch."""
        self.begun = self.left = -1
        """The last epoch that it was told to begin, and the last that it has let go of."""
        self.reached = ""
        """How far it is in the epoch: the name of the last message on the way to `Ready`."""
        self.measured: Measured | None = None
        self.ready: Ready | None = None
        self.failure: Failed | None = None
        self.heard = time.monotonic()
        """When it last said something of its own accord."""
        self.stirred = self.heard
        """When the last byte came from it."""
        self.why = "its connection ended"
        self.silent: float | None = None
        """Why it was lost, as far as its connection tells, and the seconds it had been silent then."""
        self.unreachable = False
        """It was lost because the network or its node is silent."""

    @property
    def node(self) -> str:
        """Its node's name, for people."""
        return self.join.host if self.join is not None else ""

    @property
    def here(self) -> bool:
        """On the hub's node, where memory can be shared."""
        return self.join is not None and self.join.address.node == node_id()

    def begin(self, epoch: int) -> None:
        """Forget what belonged to the epoch before."""
        self.begun, self.reached = epoch, ""
        self.measured = self.failure = None

    def send(self, message: ToRank, descriptors: tuple[list[int], ...] = ()) -> None:
        """A rank that is gone is noticed by the watch; nothing is raised here."""
        if self.stream is None or self.lost:
            return
        if not self.lock.acquire(timeout=_LOCK_S):  # it has not taken a whole plan for as long
            self.stream.shut()
            return
        try:
            self.stream.send(MESSAGE, encode(message), _SEND_S)
            for group in descriptors:
                self.stream.send_descriptors(group, _SEND_S)
        except GroupBroken:
            self.stream.shut()  # which the watch sees
        finally:
            self.lock.release()

    def ask(self) -> None:
        """How it is, without waiting: where nothing can be sent, the question is lost."""
        if self.stream is None or self.lost or not self.lock.acquire(blocking=False):
            return
        try:
            if self.stream.ready:
                self.stream.send(MESSAGE, _PING, _SEND_S)
        except GroupBroken:
            self.stream.shut()
        finally:
            self.lock.release()

    def status(self, epoch: int, *, broken: bool) -> WorkerStatus:
        """As of when it was last ready; whether it lives, as of now. `broken`: the epoch is over."""
        if self.lost or self.failure is not None:
            state = "dead"
        elif self.ready is None:
            state = "loading"
        else:
            state = "recovering" if broken or self.ready.epoch != epoch else self.ready.status.state
        if self.ready is not None:
            return msgspec.structs.replace(self.ready.status, state=state)
        pid = self.join.pid if self.join is not None else 0
        return WorkerStatus(self.rank, pid, self.node, "", state, "", 0, {})

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()


def check_versions(joins: Sequence[Join]) -> None:
    """Raises ConfigError when the nodes' software differs."""
    first, *others = joins
    for other in others:
        for what, version in other.versions.items():
            wanted = first.versions.get(what)
            if version != wanted:
                raise ConfigError(
                    f"Nodes differ: {what} is {wanted} on {first.host} and {version} on {other.host}.",
                    fix=f"Install the same {what} on all nodes.",
                )


def check_weights(members: Sequence[Member], first: str) -> str:
    """The fingerprint of what all ranks have read, which is `first` if that is known. A rank that has read something
    else is lost. Raises CheckpointError."""
    ready = [(m, m.ready.status) for m in members if m.ready is not None]
    wanted = first or ready[0][1].weights
    others = [(m, status) for m, status in ready if status.weights != wanted]
    if not others:
        return wanted
    where, here = others[0][1].node, ready[0][1].node
    error = changed(f"the model on {where}")
    if not first:
        error = CheckpointError(
            f"Nodes differ: the model's weights are not the same on {here} and {where}.",
            fix="Copy the model from one node to the other again.",
        )
    for member, _ in others:
        member.lost, member.why, member.failure = True, "it has read other weights", failed(member.begun, error)
        if member.stream is not None:
            member.stream.shut()
    raise error


def cache_layout(members: Sequence[Member], reporter: int) -> CacheLayout:
    """What all ranks have, which are ready: as the reporter says, with the bytes of all."""
    layouts = [m.ready.layout for m in members if m.ready is not None]
    return msgspec.structs.replace(layouts[reporter], bytes_per_block=sum(each.bytes_per_block for each in layouts))


class Listener(Protocol):
    """Who wants to know; all methods are called on the watch's thread."""

    def joined(self, join: Join, stream: SecureStream) -> Member | None:
        """A process has proved the key and says which rank it is. None turns it away."""
        ...

    def heard(self, member: Member, kind: int, content: bytes | memoryview) -> None:
        """Raises msgspec.DecodeError on nonsense, which ends the connection."""
        ...

    def lost(self, member: Member) -> None:
        """Its connection has ended; the member knows why."""
        ...

    def tick(self, now: float) -> float | None:
        """After `Watch.wake`, and again after as many seconds as it returns; None waits for the next `wake`."""
        ...


@dataclass
class _Talk:
    """A connection being read."""

    stream: SecureStream
    steps: Steps[Frame]
    address: str
    """Of its machine; empty for this one."""
    member: Member | None = None
    until: float = float("inf")
    """A caller's time to prove itself."""
    event: int = select.POLLIN


class Watch:
    """Listens at `address`: an abstract Unix socket, and a TCP port of `host` when ranks are on other nodes."""

    def __init__(self, listener: Listener, key: bytes, *, host: str | None = None, encrypt: bool = False):
        """Raises OSError when `host` cannot be listened at."""
        self._listener, self._key, self._encrypt = listener, key, encrypt
        self._never = Abort()
        self._selector = selectors.DefaultSelector()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._talks: dict[int, _Talk] = {}
        """By descriptor, the oldest first."""
        self._resting: list[socket.socket] = []
        """Doors at which nobody could be accepted, until the next look."""
        self._running = True
        self._refused = 0
        name = f"phalanx-{secrets.token_hex(16)}"
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unix.bind(f"\0{name}")
        unix.listen(256)
        self._doors = [unix]
        port = 0
        if host is not None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                self._doors.append(socket.create_server((host, 0), family=family, backlog=256))
            except OSError:
                self._release()
                raise
            port = self._doors[1].getsockname()[1]
        self.address = Address(-1, node_id(), name, host or "", port)
        for door in self._doors:
            door.setblocking(False)
            self._selector.register(door, selectors.EVENT_READ)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="hub", daemon=True)
        self._thread.start()

    def forget(self, member: Member) -> None:
        """Read nothing more of `member`, and close its connection. Returns when that is so."""
        done = threading.Event()

        def drop() -> None:
            if member.stream is not None and member.stream.fileno() >= 0:
                self._drop(member.stream.fileno())
            done.set()

        self._jobs.put(drop)
        os.eventfd_write(self._bell, 1)
        while not done.wait(0.1) and self._thread.is_alive():
            pass

    def wake(self) -> None:
        """Have the listener's `tick` called."""
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Ends the thread and closes every connection."""
        self._running = False
        self._never.set("the executor is closed")
        os.eventfd_write(self._bell, 1)
        self._thread.join(_SEND_S)
        for fd in list(self._talks):
            self._drop(fd)
        self._release()

    def _release(self) -> None:
        for door in self._doors:
            door.close()
        self._selector.close()
        os.close(self._bell)
        self._never.close()

    # -- the thread

    def _run(self) -> None:
        checked, due = time.monotonic(), math.inf
        while self._running:
            until = min(due, checked + _TICK_S) if self._busy else due
            for key, _ in self._selector.select(None if until == math.inf else max(0.0, until - time.monotonic())):
                if key.fd == self._bell:
                    os.eventfd_read(self._bell)
                    due = 0.0
                    while not self._jobs.empty():
                        self._jobs.get()()
                elif key.fd in self._talks:
                    self._advance(key.fd)
                elif self._running:
                    self._accept(key.fileobj)
            now = time.monotonic()
            if now >= checked + _TICK_S:
                checked = now
                self._check(now)
            if now >= due and self._running:
                pause = self._listener.tick(now)
                due = math.inf if pause is None else now + pause

    @property
    def _busy(self) -> bool:
        """Whether there is something to look at now and then: a caller's time, a network that may fall silent."""
        return bool(self._resting) or any(t.member is None or not t.member.here for t in self._talks.values())

    def _check(self, now: float) -> None:
        while self._resting:
            self._selector.register(self._resting.pop(), selectors.EVENT_READ)
        for fd, talk in list(self._talks.items()):
            if talk.until < now:
                self._drop(fd)
            elif talk.member is not None:
                try:
                    talk.stream.check_answers()
                except GroupBroken as error:
                    self._lose(fd, error)

    def _accept(self, door: object) -> None:
        if not isinstance(door, socket.socket) or door not in self._doors:  # a caller that has just made room
            return
        try:
            sock, peer = door.accept()
        except OSError:  # the caller is gone again, or there is no descriptor left for it
            self._selector.unregister(door)
            self._resting.append(door)
            return
        callers = {fd: talk.address for fd, talk in self._talks.items() if talk.member is None}
        if len(callers) >= _CALLERS:
            self._drop(who_goes(callers))
        stream = SecureStream(sock, self._never, "a caller")
        local = sock.family == socket.AF_UNIX
        self._talks[sock.fileno()] = _Talk(
            stream, self._welcome(stream, local), "" if local else str(peer[0]), until=time.monotonic() + _KNOCK_S
        )
        self._selector.register(sock, selectors.EVENT_READ)
        self._advance(sock.fileno())

    def _welcome(self, stream: SecureStream, local: bool) -> Steps[Frame]:
        yield from stream.handshake_steps(self._key, client=False, encrypt=self._encrypt and not local)
        return (yield from stream.receive_steps(1 << 16))

    def _advance(self, fd: int) -> None:
        """Read what has come."""
        talk = self._talks[fd]
        try:
            while True:
                try:
                    self._await(fd, talk, next(talk.steps))
                    return
                except StopIteration as done:
                    kind, content = done.value
                talk.steps = talk.stream.receive_steps(LIMIT)
                if talk.member is not None:
                    self._listener.heard(talk.member, kind, content)
                elif not self._introduce(talk, kind, content):
                    self._drop(fd)
                    return
        except (GroupBroken, msgspec.DecodeError) as error:
            self._lose(fd, error)

    def _await(self, fd: int, talk: _Talk, event: int) -> None:
        """All that came is read, and it was not the end."""
        if talk.member is not None:
            talk.member.stirred = time.monotonic()
        if event != talk.event:
            talk.event = event
            self._selector.modify(fd, selectors.EVENT_READ if event == select.POLLIN else selectors.EVENT_WRITE)

    def _introduce(self, talk: _Talk, kind: int, content: bytes | memoryview) -> bool:
        join = decode_from_rank(content)
        if kind != MESSAGE or not isinstance(join, Join):
            return False
        talk.stream.peer = f"rank {join.address.rank}"
        talk.member = self._listener.joined(join, talk.stream)
        talk.until = float("inf")
        return talk.member is not None

    def _lose(self, fd: int, error: Exception) -> None:
        member = self._talks[fd].member
        if member is None:
            level, self._refused = logging.DEBUG if self._refused else logging.WARNING, self._refused + 1
            log.log(level, "Refused a connection to the executor (%d so far): %s", self._refused, error)
            self._drop(fd)
            return
        log.debug("rank %d: %s", member.rank, error)
        if isinstance(error, Unreachable):
            member.why, member.silent, member.unreachable = f"it {error.words}", error.silent, True
        with contextlib.suppress(KeyError):
            self._selector.unregister(fd)
        del self._talks[fd]
        if member.stream is not None:
            member.stream.shut()
        self._listener.lost(member)  # whoever may still be sending keeps the descriptor until the member is replaced

    def _drop(self, fd: int) -> None:
        talk = self._talks.pop(fd, None)
        if talk is not None:
            self._selector.unregister(fd)
            talk.stream.close()

"""The executor whose ranks are processes: one hub they all join, whoever starts them and wherever they are.

A `Launcher` starts, kills and replaces the processes (`multiprocess`, `ray`); everything else is here, once. Plans go
to the ranks of this node through one shared ring and to others over their streams; results come back the same ways
from the one rank that reports. One thread watches: it accepts ranks, reads what they say, and when one is gone breaks
every wait of the epoch, here and in the surviving ranks.

Guarantees: results in the order of plans; nothing of an epoch is accepted after it; every wait ends when a rank is
lost or `close` is called. Does not decide how the model is split.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Protocol

import msgspec

from phalanx.config import EngineConfig
from phalanx.distributed.bootstrap import Address, node_id
from phalanx.distributed.mesh import Mesh
from phalanx.distributed.transports.abort import Abort, GroupBroken
from phalanx.distributed.transports.ring import Ring
from phalanx.distributed.transports.secure_stream import SecureStream
from phalanx.errors import ConfigError, PhalanxError, UserError
from phalanx.executor.base import CacheLayout, LoadProgress, WorkerDied, WorkerStatus
from phalanx.executor.messages import (
    LIMIT,
    MESSAGE,
    PLAN,
    RESULT,
    AbortEpoch,
    Allocate,
    Begin,
    Failed,
    Join,
    Loaded,
    Progress,
    Ready,
    Stop,
    ToRank,
    decode_from_rank,
    encode,
    raised,
)
from phalanx.executor.rank import RankStart
from phalanx.step import StepPlan, StepResult, decode_result
from phalanx.step import encode as encode_step

log = logging.getLogger(__name__)

JOIN_S = 120.0
"""Seconds for a started process to join (it imports torch; a busy machine takes its time)."""

_KNOCK_S = 5.0


class Layout(msgspec.Struct, frozen=True):
    """How the model is laid out over ranks: what the launcher and `Begin` need."""

    mesh: Mesh
    tensor_weights: tuple[tuple[float, ...], ...]
    stage_layers: tuple[int, ...]


class Launcher(Protocol):
    """Starts and ends rank processes. A rank's death is noticed by the hub; the launcher knows what it died of."""

    host: str | None
    """This node's address when ranks run on other nodes, which makes the hub listen there; None keeps it local."""

    def launch(self, starts: list[RankStart]) -> None:
        """Start these ranks; returns at once. Raises UserError when they cannot be placed."""
        ...

    def kill(self, rank: int) -> None:
        """End a rank that is still there; returns when it is gone, or cannot be reached any more."""
        ...

    def cause(self, rank: int) -> str | None:
        """What a dead rank died of, such as "killed by SIGKILL (out of memory: …)"; waits briefly; None = not dead."""
        ...

    def close(self) -> None:
        """End every process that was started. Idempotent."""
        ...


class _Member:
    """One rank, as the hub knows it."""

    def __init__(self, rank: int):
        self.rank = rank
        self.stream: SecureStream | None = None
        self.lock = threading.Lock()
        self.join: Join | None = None
        self.loaded: Loaded | None = None
        self.ready: Ready | None = None
        self.failure: Failed | None = None
        self.lost = False
        self.shares: dict[str, float] = {}

    def send(self, message: ToRank, fds: tuple[list[int], ...] = ()) -> None:
        """A rank that is gone is noticed by the watch; nothing is raised here."""
        if self.stream is None:
            return
        try:
            with self.lock:
                self.stream.send(MESSAGE, encode(message), 10.0)
                for group in fds:
                    self.stream.send_descriptors(group, 10.0)
        except GroupBroken:
            self.lost = True

    def status(self) -> WorkerStatus:
        if self.ready is not None:
            status = self.ready.status
            return msgspec.structs.replace(status, state="dead" if self.lost else status.state)
        join = self.join
        state = "dead" if self.lost else "loading"
        return WorkerStatus(self.rank, join.pid if join else 0, join.host if join else "", "", state, "", 0, {})


class _Pending(Future[StepResult]):
    """A result on its way. Whoever asks for it fetches results until it is there: no thread in between."""

    def __init__(self, executor: HubExecutor):
        super().__init__()
        self._executor = executor

    def result(self, timeout: float | None = None) -> StepResult:
        if not self.done():
            self._executor.collect(self)
        return super().result(timeout)


class HubExecutor:
    def __init__(self, launcher: Launcher, layout: Layout, *, encrypt: bool = False, exchange_timeout: float = 300.0):
        self.max_in_flight = layout.mesh.pp
        self._launcher, self._layout = launcher, layout
        self._encrypt, self._exchange_timeout = encrypt, exchange_timeout
        self._members = [_Member(rank) for rank in range(layout.mesh.world_size)]
        self._changed = threading.Condition()
        self._key = secrets.token_bytes(32)
        self._epoch = -1
        self._abort = Abort()
        self._lost: WorkerDied | PhalanxError | None = None
        self._plans: Ring | None = None
        self._results: Ring | None = None
        self._remote_results: SimpleQueue[bytes | None] = SimpleQueue()
        self._pending: deque[_Pending] = deque()
        self._config: EngineConfig | None = None
        self._progress: LoadProgress | None = None
        self._closed = False
        self._watch: _Watch | None = None

    # -- the executor's five methods

    def start(self, config: EngineConfig, progress: LoadProgress | None = None) -> CacheLayout:
        """As `Executor.start`. Everything it started is gone again when it raises."""
        if self._watch is not None:
            raise RuntimeError("the executor has been started already")
        self._config, self._progress = config, progress
        try:
            self._watch = _Watch(self, self._launcher.host)
            return self._begin(0)
        except BaseException:
            self.close()
            raise

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        pending = _Pending(self)
        if plan.epoch != self._epoch:
            pending.cancel()
            return pending
        try:
            data = encode_step(plan)
            if self._plans is not None:
                self._plans.write(data, self._exchange_timeout)
            for member in self._members:
                if member.stream is not None and not self._here(member):
                    with member.lock:
                        member.stream.send(PLAN, data, self._exchange_timeout)
        except GroupBroken as broken:
            pending.set_exception(self._death(broken))
            return pending
        self._pending.append(pending)
        return pending

    def restart(self, epoch: int) -> CacheLayout:
        if epoch <= self._epoch:
            raise ValueError(f"epoch {epoch} does not come after epoch {self._epoch}")
        return self._begin(epoch)

    def check_health(self) -> list[WorkerStatus]:
        return [member.status() for member in self._members]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._end_epoch("the executor is closed")
        for member in self._members:
            member.send(Stop())
        self._launcher.close()
        if self._watch is not None:
            self._watch.close()
        for member in self._members:
            if member.stream is not None:
                member.stream.close()
        self._abort.close()

    # -- an epoch begins

    def _begin(self, epoch: int) -> CacheLayout:
        self._end_epoch("a new epoch begins")
        self._epoch, self._lost = epoch, None
        self._abort.close()
        self._abort = Abort()
        self._remote_results = SimpleQueue()
        gone = [m for m in self._members if m.stream is None or m.lost]
        for member in gone:
            self._replace(member)
        self._launcher.launch([self._rank_start(member.rank) for member in gone])
        self._wait(lambda m: m.join is not None, "join", JOIN_S)
        self._check_versions()
        for member in self._members:
            member.loaded = member.ready = member.failure = None
        self._send_begin()
        self._wait(lambda m: m.loaded is not None, "load", None)
        blocks = min(m.loaded.blocks for m in self._members if m.loaded is not None)
        for member in self._members:
            member.send(Allocate(blocks))
        self._wait(lambda m: m.ready is not None, "allocate its cache", None)
        ready = [m.ready for m in self._members if m.ready is not None]
        config = self._config
        return CacheLayout(
            blocks=blocks,
            block_size=config.cache.block_size if config is not None else 0,
            bytes_per_block=sum(r.bytes_per_block for r in ready),
            vocab_size=max(r.vocab_size for r in ready),
        )

    def _replace(self, member: _Member) -> None:
        if member.stream is not None:
            self._launcher.kill(member.rank)
            if self._watch is not None:
                self._watch.forget(member)
            member.stream.close()
        self._members[member.rank] = _Member(member.rank)

    def _rank_start(self, rank: int) -> RankStart:
        if self._watch is None:
            raise RuntimeError("the executor is not started")
        return RankStart(rank=rank, hub=self._watch.address, key=self._key, encrypt=self._encrypt)

    def _send_begin(self) -> None:
        mesh, members = self._layout.mesh, self._members
        roster = [m.join.address for m in members if m.join is not None]
        nodes = [address.node for address in roster]
        here = [m for m in members if self._here(m)]
        reporter = members[mesh.reporter]
        cores = os.cpu_count() or 1
        crowded_here = len(here) > cores
        if here:
            self._plans = Ring.create(len(here), self._abort, limit=LIMIT, crowded=crowded_here)
        if self._here(reporter):
            self._results = Ring.create(1, self._abort, limit=LIMIT, crowded=crowded_here, writes=False)
        key = secrets.token_bytes(32)
        for member in members:
            local = self._here(member)
            begin = Begin(
                epoch=self._epoch,
                roster=roster,
                key=key,
                config=self._config or EngineConfig(),
                mesh=mesh,
                tensor_weights=self._layout.tensor_weights,
                stage_layers=self._layout.stage_layers,
                node_ranks=nodes.count(nodes[member.rank]),
                crowded=nodes.count(nodes[member.rank]) > cores,
                encrypt=self._encrypt,
                exchange_timeout=self._exchange_timeout,
                ring_member=here.index(member) + 1 if local else 0,
                reports=member is reporter,
            )
            fds: tuple[list[int], ...] = (self._plans.fds,) if local and self._plans is not None else ()
            if local and member is reporter and self._results is not None:
                fds += (self._results.fds,)
            member.send(begin, fds)

    def _here(self, member: _Member) -> bool:
        return member.join is not None and member.join.address.node == node_id()

    def _check_versions(self) -> None:
        first = self._members[0].join
        for member in self._members[1:]:
            for what, version in (member.join.versions if member.join is not None else {}).items():
                wanted = first.versions.get(what) if first is not None else version
                if version != wanted and member.join is not None and first is not None:
                    raise ConfigError(
                        f"Nodes differ: {what} is {wanted} on {first.host} and {version} on {member.join.host}.",
                        fix=f"Install {what} {wanted} on {member.join.host}.",
                    )

    # -- waiting for ranks

    def _wait(self, done: object, what: str, timeout: float | None) -> None:
        """Until `done(member)` for all. Raises what a rank failed with, or WorkerDied."""
        check = done if callable(done) else None
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                self._raise_failures()
                waiting = [m.rank for m in self._members if check is None or not check(m)]
                if not waiting:
                    return
                if deadline is not None and time.monotonic() > deadline:
                    ranks = ", ".join(map(str, waiting))
                    raise WorkerDied(waiting[0], f"it did not {what} within {timeout:g} s (waiting for {ranks})")
                self._changed.wait(0.25)
                if what == "join":
                    for member in self._members:  # a process that dies before it joins has no stream to end
                        cause = self._launcher.cause(member.rank) if member.join is None else None
                        if cause is not None:
                            raise WorkerDied(member.rank, cause)

    def _raise_failures(self) -> None:
        failures = [m.failure for m in self._members if m.failure is not None and m.failure.epoch == self._epoch]
        users = [f for f in map(raised, failures) if isinstance(f, UserError)]
        if users:
            raise users[0]
        for member in self._members:
            if member.lost:
                raise self._died(member.rank)
        for member in self._members:
            if member.failure is not None and member.failure.epoch == self._epoch:
                raise WorkerDied(member.rank, member.failure.message)

    def _died(self, rank: int) -> WorkerDied:
        return WorkerDied(rank, self._launcher.cause(rank) or "its connection ended")

    # -- results

    def collect(self, wanted: _Pending) -> None:
        """Fetch results, in order, until `wanted` has its own."""
        while not wanted.done():
            try:
                result = decode_result(self._next_result())
            except (GroupBroken, msgspec.DecodeError) as broken:
                death = self._death(broken)
                while self._pending:
                    self._pending.popleft().set_exception(death)
                if not wanted.done():
                    wanted.set_exception(death)
                return
            if result.epoch == self._epoch and self._pending:
                self._pending.popleft().set_result(result)

    def _next_result(self) -> bytes:
        if self._results is not None:
            return self._results.read()
        data = self._remote_results.get()
        if data is None:
            self._abort.check()
            raise GroupBroken("The epoch ended.")
        return data

    def _death(self, broken: Exception) -> WorkerDied:
        """The lost rank behind a broken wait."""
        with self._changed:
            try:
                self._raise_failures()
            except WorkerDied as died:
                return died
            except PhalanxError as error:
                return WorkerDied(0, error.message)
        return WorkerDied(0, str(broken))

    def _end_epoch(self, reason: str) -> None:
        self._abort.set(reason)
        self._remote_results.put(None)
        for member in self._members:
            if not member.lost:
                member.send(AbortEpoch(reason))
        for ring in (self._plans, self._results):
            if ring is not None:
                ring.close()
        self._plans = self._results = None
        while self._pending:
            self._pending.popleft().cancel()

    # -- what the watch hears

    def joined(self, join: Join, stream: SecureStream) -> bool:
        """A process has proved the key and says which rank it is. False turns it away."""
        with self._changed:
            rank = join.address.rank
            if not 0 <= rank < len(self._members) or self._members[rank].stream is not None:
                return False
            member = self._members[rank]
            stream.peer = f"rank {rank}"
            member.stream, member.join = stream, join
            self._changed.notify_all()
            return True

    def heard(self, member: _Member, kind: int, content: bytes | memoryview) -> None:
        """Raises msgspec.DecodeError on nonsense."""
        if kind == RESULT:
            self._remote_results.put(bytes(content))
            return
        message = decode_from_rank(content)
        with self._changed:
            match message:
                case Progress(phase=phase, share=share):
                    self._report(member, phase, share)
                case Loaded() if message.epoch == self._epoch:
                    member.loaded = message
                case Ready() if message.epoch == self._epoch:
                    member.ready = message
                case Failed() if message.epoch == self._epoch:
                    member.failure = message
                    self._break(f"rank {member.rank}: {message.message}")
            self._changed.notify_all()

    def lose(self, member: _Member) -> None:
        """A rank's stream ended."""
        with self._changed:
            if self._members[member.rank] is not member or member.lost:
                return
            member.lost = True
            if not self._closed:
                log.debug("rank %d is gone", member.rank)
                self._break(f"rank {member.rank} is gone")
            self._changed.notify_all()

    def _break(self, reason: str) -> None:
        self._abort.set(reason)
        self._remote_results.put(None)
        for member in self._members:
            if not member.lost:
                member.send(AbortEpoch(reason))

    def _report(self, member: _Member, phase: str, share: float) -> None:
        member.shares[phase] = share
        if self._progress is not None:
            self._progress(phase, sum(m.shares.get(phase, 0.0) for m in self._members) / len(self._members))


class _Watch:
    """The thread that accepts ranks and reads what they say."""

    def __init__(self, executor: HubExecutor, host: str | None):
        self._executor = executor
        self._never = Abort()
        self._selector = selectors.DefaultSelector()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._running = True
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        name = f"phalanx-{secrets.token_hex(16)}"
        unix.bind(f"\0{name}")
        unix.listen(256)
        self._doors = [unix]
        port = 0
        if host is not None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._doors.append(socket.create_server((host, 0), family=family, backlog=256))
            port = self._doors[1].getsockname()[1]
        self.address = Address(-1, node_id(), name, host or "", port)
        for door in self._doors:
            self._selector.register(door, selectors.EVENT_READ)
        self._new: SimpleQueue[_Member] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hub", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._running:
            for key, _ in self._selector.select():
                if key.fileobj in self._doors:
                    sock = key.fileobj.accept()[0]
                    threading.Thread(target=self._welcome, args=(sock,), name="welcome", daemon=True).start()
                elif key.data is None:
                    os.eventfd_read(self._bell)
                    while not self._new.empty():
                        member = self._new.get()
                        if member.stream is not None:
                            self._selector.register(member.stream, selectors.EVENT_READ, member)
                else:
                    self._read(key.data)

    def _welcome(self, sock: socket.socket) -> None:
        executor, local = self._executor, sock.family == socket.AF_UNIX
        if not local:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 3000)
        stream = SecureStream(sock, self._never, "a caller")
        try:
            stream.handshake(executor._key, client=False, encrypt=executor._encrypt and not local, timeout=_KNOCK_S)
            kind, content = stream.receive(1 << 16, _KNOCK_S)
            join = decode_from_rank(content)
        except (GroupBroken, msgspec.DecodeError) as error:
            log.warning("refused a connection to the executor: %s", error)
            stream.close()
            return
        if kind != MESSAGE or not isinstance(join, Join) or not executor.joined(join, stream):
            stream.close()
            return
        self._new.put(executor._members[join.address.rank])
        os.eventfd_write(self._bell, 1)

    def _read(self, member: _Member) -> None:
        try:
            if member.stream is not None:
                kind, content = member.stream.receive(LIMIT, 60.0)
                self._executor.heard(member, kind, content)
        except (GroupBroken, msgspec.DecodeError):
            self.forget(member)
            self._executor.lose(member)

    def forget(self, member: _Member) -> None:
        if member.stream is not None and member.stream.fileno() >= 0:
            with contextlib.suppress(KeyError, ValueError):  # it may be forgotten already
                self._selector.unregister(member.stream)

    def close(self) -> None:
        self._running = False
        os.eventfd_write(self._bell, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        for door in self._doors:
            door.close()
        self._selector.close()
        os.close(self._bell)
        self._never.close()

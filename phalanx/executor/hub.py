"""The executor whose ranks are processes: one hub they all join, whoever starts them and wherever they are.

A `Launcher` starts, kills and replaces the processes (`multiprocess`, `ray`); everything else is here, once. Plans go
to the ranks of this node through one shared ring and to others over their streams; results come back the same ways
from the one rank that reports. One thread watches (`members`): when a rank is gone, every wait of the epoch is broken,
here and in the surviving ranks. So it is when a rank hangs (`deadlines`): while something is awaited that does not
come, ranks are asked how they are; an idle executor, and one whose steps are short, asks nobody.

Guarantees: results in the order of plans; nothing of an epoch is accepted after it; every wait ends when a rank is
lost or `close` is called; a rank that does not let go of an epoch is killed before the next one has any memory that it
could write to. Does not decide how the model is split.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Container
from concurrent.futures import Future

import msgspec

from phalanx.config import EngineConfig
from phalanx.distributed.transports.abort import Abort, GroupBroken
from phalanx.distributed.transports.secure_stream import SecureStream
from phalanx.errors import CheckpointError, ConfigError, NotEnoughMemory, PhalanxError, UserError
from phalanx.executor.base import CacheLayout, NoCapacity, StartProgress, WorkerDied, WorkerStatus
from phalanx.executor.blame import failure
from phalanx.executor.deadlines import Awaited, Bounds, Verdict, Vigil, asks_every, join_bound
from phalanx.executor.death import kind_of
from phalanx.executor.flight import Flight
from phalanx.executor.launcher import Launcher, Layout
from phalanx.executor.members import Member, Watch, cache_layout, check_versions, check_weights
from phalanx.executor.messages import (
    EXCHANGE_S,
    RESULT,
    AbortEpoch,
    Allocate,
    Begin,
    Failed,
    Join,
    Left,
    Load,
    Loaded,
    Measure,
    Measured,
    Met,
    Order,
    Pong,
    Progress,
    RankStart,
    Ready,
    Stop,
    decode_from_rank,
)
from phalanx.executor.progress import SharedProgress
from phalanx.executor.seating import Choice, Choose, Seating, Share, node_of
from phalanx.executor.traffic import Traffic
from phalanx.step import StepPlan, StepResult

log = logging.getLogger(__name__)

_POLL_S = 0.1

_LOOK_S = 1.0
"""Seconds between looks whether a lost place is back."""

_NO_LIMIT = 1 << 60


class HubExecutor:
    def __init__(
        self,
        launcher: Launcher,
        layout: Layout,
        *,
        encrypt: bool = False,
        key: bytes = b"",
        choose: Choose | None = None,
        share: Share | None = None,
    ):
        """Ranks prove `key` to join; without one, a new one is made. Without `choose`, the layout stays as it is,
        whatever is lost; with `share` too it is shared out when ranks have their places."""
        self.max_in_flight = layout.mesh.pp
        self._launcher, self._layout = launcher, layout
        self._encrypt = encrypt
        self._members: list[Member] = []
        self._changed = threading.Condition()
        """Guards members and the epoch's abort; notified of every change."""
        self._epoch = -1
        self._abort = Abort()
        self._death: WorkerDied | None = None
        """Why this epoch is over."""
        self._flight: Flight | None = None
        """From when ranks are told to begin the epoch until it ends."""
        self._count = 0
        """Changes with progress."""
        self._vigil = Vigil(Bounds(EngineConfig().recovery.hang_timeout))
        self._vigilant = False
        self._lived = 0.0
        """When all ranks were last known to live: with each plan and each result."""
        self._due = ""
        """The message that ranks are to answer with while an epoch begins."""
        self._verdict: Verdict | None = None
        self._lives: Counter[int] = Counter()
        """How many processes have been started as each rank."""
        self._ended_at = 0.0
        self._config = EngineConfig()
        self._progress = SharedProgress()
        self._host: str | None = None
        self._key = key or secrets.token_bytes(32)
        self._watch: Watch | None = None
        self._choose, self._share, self._whole = choose, share, layout
        self._seating: Seating | None = None
        self._blocks, self._most_blocks = 0, _NO_LIMIT
        """Of the cache, and how many it may have after ranks have been ended for want of memory."""
        self._longest = 0
        """Tokens of the longest request for which there must be room; 0 is --max-model-len."""
        self._looked, self._wants = 0.0, ""
        self._weights = ""
        """What the ranks have read (`checkpoint.fingerprint`)."""

    # -- the executor's five methods

    def start(self, config: EngineConfig, progress: StartProgress | None = None) -> CacheLayout:
        """As `Executor.start`. Everything it started is gone again when it raises."""
        if self._watch is not None:
            raise RuntimeError("the executor has been started already")
        # What ranks need no knowledge of does not travel.
        parallel = dataclasses.replace(config.parallel, transport_key=None)
        self._config = dataclasses.replace(config, parallel=parallel)
        self._layout, self._longest, self._weights = self._whole, 0, ""
        self._vigil = Vigil(Bounds(config.recovery.hang_timeout))
        self._members = [Member(rank) for rank in range(self._layout.mesh.world_size)]
        if self._choose is not None:
            self._launcher.assign(range(len(self._members)))
            patience = config.recovery.replacement_timeout
            self._seating = Seating(self._layout, self._launcher, self._choose, patience, self._share)
        try:
            self._watch = self._listen()
            if self._seating is not None:
                if self._seating.begin():
                    self._move(self._seating.now)
                self._layout = self._seating.now.layout
            self._progress = SharedProgress(len(self._members), progress)
            layout = self._begin(0)
        except BaseException:
            self.close()
            raise
        finally:
            self._progress = SharedProgress()
        log.debug("%s", self._vigil.bounds)
        return layout if self._seating is None else msgspec.structs.replace(layout, shares=self._seating.shares)

    def _listen(self) -> Watch:
        self._host = host = self._launcher.host
        try:
            return Watch(self, self._key, host=host, encrypt=self._encrypt)
        except OSError as error:
            self._launcher.close()
            raise ConfigError(f"The executor cannot listen at {host}: {error.strerror or error}.") from None

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """As `Executor.submit`."""
        flight = self._flight
        if flight is not None and plan.epoch == self._epoch and self._watch is not None and self._abort.reason is None:
            return flight.submit(plan)
        refused: Future[StepResult] = Future()
        if self._watch is None:
            refused.set_exception(WorkerDied(0, "it is closed or was never started"))
        elif plan.epoch != self._epoch:
            refused.cancel()
        elif self._abort.reason is not None:
            refused.set_exception(self.death(None))
        else:
            refused.set_exception(self.death(GroupBroken("The epoch has not begun.")))
        return refused

    def restart(self, epoch: int) -> CacheLayout:
        """As `Executor.restart`. When it raises, it may be called again with a later epoch."""
        if self._watch is None:
            raise WorkerDied(0, "it is closed or was never started")
        if epoch <= self._epoch:
            raise ValueError(f"epoch {epoch} does not come after epoch {self._epoch}")
        self._seat()
        while True:
            try:
                return self._begin(epoch)
            except PhalanxError as error:
                died, again = self._not_begun(error)
            if not again or self._watch is None or not self._seat():  # with new ranks, the epoch can begin once more
                raise died

    @property
    def wants_restart(self) -> str | None:
        """As `Executor.wants_restart`."""
        now = time.monotonic()
        if self._seating is not None and not self._seating.is_whole and now - self._looked > _LOOK_S:
            self._looked, self._wants = now, self._seating.more() or ""
        return self._wants or None

    @property
    def hang_bound(self) -> float:
        with self._changed:
            return self._vigil.bound(self._awaited())

    @property
    def progress(self) -> int:
        return self._count

    def check_health(self) -> list[WorkerStatus]:
        broken = self._abort.reason is not None
        return [member.status(self._epoch, broken=broken) for member in self._members]

    def hang_up(self, ranks: Container[int]) -> None:
        """Ranks whose launcher knows that they are gone, or hang, before their connections end. From any thread."""
        with self._changed:
            for member in self._members:
                if member.rank in ranks and member.stream is not None:
                    member.stream.shut()

    def close(self) -> None:
        """As `Executor.close`; `start` may be called again."""
        watch, self._watch = self._watch, None
        if watch is None:
            return
        self._end_epoch("the executor is closed")
        for member in self._members:
            member.send(Stop())
        self._launcher.close()
        watch.close()
        for member in self._members:
            member.close()
        self._members, self._epoch = [], -1
        self._abort.close()

    # -- an epoch begins

    def _begin(self, epoch: int) -> CacheLayout:
        with self._changed:
            self._epoch, self._death, self._verdict = epoch, None, None
            self._vigil.bounds.begin()
            self._abort.close()
            self._abort = Abort()
        self._launch([m for m in self._members if m.stream is None or m.lost])
        self._wait(lambda m: m.join is not None, "join", join_bound(self._vigil.bounds.floor))
        check_versions([m.join for m in self._members if m.join is not None])
        self._send_begin()
        self._all_reach(Met, "meet the others")
        self._order(Load(), Loaded, "load the model")
        self._order(Measure(), Measured, "measure its memory")
        blocks = min(self._most_blocks, *(m.measured.blocks for m in self._members if m.measured is not None))
        self._order(Allocate(blocks), Ready, "allocate its cache")
        with self._changed:
            self._weights = check_weights(self._members, self._weights)
        self._blocks = blocks
        if self._seating is not None:
            statuses = [m.ready.status for m in self._members if m.ready is not None]
            self._seating.ready([status.memory for status in statuses], [status.device for status in statuses])
        return cache_layout(self._members, self._layout.mesh.reporter)

    def _seat(self) -> bool:
        """The epoch before is over, and there is a place for every rank: lost ones go where they were, or all begin
        anew in another layout, which is answered. Raises NoCapacity."""
        self._end_epoch("a new epoch begins")
        self._settle()
        self._note(self._death)
        lost = [m.rank for m in self._members if m.stream is None or m.lost]
        if self._seating is None or not self._seating.settle(lost, lambda: self._watch is None):
            return False
        for member in self._members:
            if member.stream is not None and self._watch is not None:
                self._watch.forget(member)
            self._launcher.kill(member.rank)
            member.close()
        self._move(self._seating.now)
        return True

    def _move(self, choice: Choice) -> None:
        """All ranks begin anew in another layout. None is left of the one before."""
        self._launcher.assign(choice.seats)
        with self._changed:
            self._layout, self._members = choice.layout, [Member(rank) for rank in range(len(choice.seats))]
        self.max_in_flight, self._longest = choice.layout.mesh.pp, choice.longest
        self._most_blocks, self._wants = _NO_LIMIT, ""
        log.warning("The model is split anew: %s", choice.told(self._launcher))

    def _not_begun(self, error: PhalanxError) -> tuple[PhalanxError, bool]:
        """What to raise when an epoch could not begin because of `error`: that of one rank, however it failed. And
        whether to try another layout instead."""
        if self._seating is None or isinstance(error, NoCapacity):
            return error, False
        if not isinstance(error, WorkerDied):
            with self._changed:
                member = next((m for m in self._members if m.failure is not None), Member(0))
            kind = "out_of_memory" if isinstance(error, NotEnoughMemory) else "failed"
            died = WorkerDied(member.rank, f"it could not start: {error.message}", node=member.node, kind=kind)
        else:
            died = error
        self._note(died)
        if isinstance(error, CheckpointError):  # which is the same everywhere
            return died, False
        return died, self._seating.failed(died.rank, surely=isinstance(error, UserError))

    def _note(self, death: WorkerDied | None) -> None:
        """Where memory was short, the next cache is smaller, as long as it holds one request."""
        if death is not None and death.kind == "out_of_memory" and self._blocks:
            longest = self._longest or self._config.model.max_model_len or 1
            least = -(-longest // self._config.cache.block_size)
            self._most_blocks = max(least, min(self._blocks, self._most_blocks) // 2)
            self._death = None

    def _order(self, order: Order, answer: type[object], phase: str) -> None:
        for member in self._members:
            member.send(order)
        self._all_reach(answer, phase)

    def _all_reach(self, answer: type[object], phase: str) -> None:
        self._due = answer.__name__
        self._keep_vigil()
        try:
            self._wait(lambda m: m.reached == answer.__name__, phase)
        finally:
            self._due = ""

    def _settle(self) -> None:
        """Returns when nobody can touch anything of the epoch before: a rank that does not let go of it is lost."""
        patience = self._vigil.bounds.settle
        with self._changed:
            while True:
                now = time.monotonic()
                late = [m for m in self._members if not m.lost and m.stream is not None and m.left < m.begun]
                if not late:
                    return
                for member in late:
                    if now - max(member.heard, self._ended_at) > patience:
                        log.warning("Rank %d does not respond; it is replaced.", member.rank)
                        member.lost, member.why = True, "it does not respond"
                self._changed.wait(_POLL_S)

    def _launch(self, gone: list[Member]) -> None:
        """Start the processes of ranks that have none, or only a dead or fenced one."""
        if self._watch is None or not gone:
            return
        for member in gone:
            if member.stream is not None:
                why = self._launcher.cause(member.rank) or member.why
                log.debug("Rank %d on %s is started again: %s.", member.rank, member.node, why)
                self._watch.forget(member)
            self._launcher.kill(member.rank)
            member.close()
            with self._changed:
                self._members[member.rank] = Member(member.rank)
        hub, share = self._watch.address, f"{self._watch.address.unix} {self._layout!r}"  # of this start, this layout
        start = RankStart(-1, hub, self._key, device=self._config.model.device, encrypt=self._encrypt, share=share)
        self._lives.update(member.rank for member in gone)
        self._launcher.launch([msgspec.structs.replace(start, rank=m.rank, life=self._lives[m.rank]) for m in gone])

    def _send_begin(self) -> None:
        mesh, members = self._layout.mesh, self._members
        roster = [m.join.address for m in members if m.join is not None]
        nodes = [address.node for address in roster]
        loading = [address.node for address, m in zip(roster, members, strict=True) if not m.loaded]
        reporter = members[mesh.reporter]
        traffic = Traffic(members, reporter, self._abort)
        self._flight = Flight(self, self._epoch, traffic, EXCHANGE_S)
        key = secrets.token_bytes(32)
        for member in members:
            node = nodes[member.rank]
            begin = Begin(
                epoch=self._epoch,
                roster=roster,
                key=key,
                config=self._config,
                mesh=mesh,
                tensor_weights=self._layout.tensor_weights,
                stage_layers=self._layout.stage_layers,
                node_ranks=nodes.count(node),
                longest=self._longest,
                loading_ranks=max(1, loading.count(node)),
                weights=self._weights,
                crowded=nodes.count(node) > len(os.sched_getaffinity(0)),
                encrypt=self._encrypt,
                ring_member=traffic.place(member),
                reports=member is reporter,
            )
            with self._changed:
                member.begin(self._epoch)
            member.send(begin, traffic.descriptors(member))

    # -- waiting for ranks

    def _wait(self, done: Callable[[Member], bool], phase: str, timeout: float | None = None) -> None:
        """Until `done(member)` for all. Raises what a rank failed with, or WorkerDied."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._changed:
                waiting = [m for m in self._members if not done(m)]
                broken = self._abort.reason is not None
                if waiting and not broken and not self._progress.has_news:
                    self._changed.wait(_POLL_S)
            told = self._progress.tell()
            if broken:
                raise self._failure(None, phase)
            if not waiting and not told:
                return
            for member in waiting:  # a process that dies before it joins has no stream to end
                cause = self._launcher.cause(member.rank) if member.join is None else None
                if cause is not None:
                    node = node_of(self._launcher, self._seating, member.rank)
                    raise WorkerDied(member.rank, f"{cause} before it could {phase}", node=node, kind=kind_of(cause))
            if waiting and deadline is not None and time.monotonic() > deadline:
                ranks = ", ".join(str(m.rank) for m in waiting)
                late = f"it did not {phase} within {timeout:g} s (waiting for {ranks})"
                node = node_of(self._launcher, self._seating, waiting[0].rank)
                raise WorkerDied(waiting[0].rank, late, node=node, kind="hung", silent=timeout)

    def _failure(self, broken: Exception | None, phase: str = "") -> PhalanxError:
        otherwise = str(broken or self._abort.reason)
        return failure(self._members, self._launcher, self._changed, self._verdict, otherwise, phase)

    # -- steps (`flight.Pilot`)

    def step_begins(self) -> None:
        self._lived = time.monotonic()
        self._keep_vigil()

    def step_done(self, tokens: int) -> None:
        self._count += 1
        self._lived = time.monotonic()
        self._vigil.bounds.done(tokens)

    def death(self, broken: Exception | None) -> WorkerDied:
        """The lost rank behind a broken wait; the same for all plans of the epoch."""
        if self._death is None:
            with self._changed:
                self._break(str(broken))
            error = self._failure(broken)
            self._death = error if isinstance(error, WorkerDied) else WorkerDied(0, str(error))
        return self._death

    # -- an epoch ends

    def _end_epoch(self, reason: str) -> None:
        with self._changed:
            self._break(reason)
            self._ended_at = time.monotonic()
            flight, self._flight = self._flight, None
        if flight is not None:
            flight.end()

    def _break(self, reason: str) -> None:
        """Every wait of this epoch ends now, here and in the ranks."""
        if self._abort.reason is not None:
            return
        self._abort.set(reason)
        if self._flight is not None:
            self._flight.put(None)
        for member in self._members:
            if member.left < member.begun:
                member.send(AbortEpoch(reason))

    # -- whether a rank hangs

    def _keep_vigil(self) -> None:
        """Something is awaited from now on."""
        if not self._vigilant and self._watch is not None:
            self._vigilant = True
            self._watch.wake()

    def tick(self, now: float) -> float | None:
        """As `members.Listener.tick`: look who hangs, and ask how they are of whom something is awaited for long."""
        with self._changed:
            self._vigilant = False  # first: whoever awaits something after the look below calls again
            awaited = self._awaited()
            if awaited is None:
                self._vigil.rest()
                return None
            self._vigilant = True
            for rank in awaited.ranks:
                self._vigil.heard(rank, self._members[rank].stirred)
            verdict = self._vigil.look(awaited, now)
            if verdict is not None:
                self._condemn(verdict)
            asked = [self._members[rank] for rank in self._vigil.ask(now)]
        for member in asked:
            member.ask()
        return asks_every(self._vigil.bounds.floor)

    def _awaited(self) -> Awaited | None:
        if self._abort.reason is not None or self._watch is None:
            return None
        if self._due:
            ranks = tuple(m.rank for m in self._members if m.reached != self._due)
            return Awaited((self._epoch, self._due), None, self._due in ("Met", "Loaded"), ranks)
        oldest = None if self._flight is None else self._flight.awaited
        if oldest is None:
            return None
        return Awaited(oldest, oldest.tokens, False, tuple(m.rank for m in self._members))

    def _condemn(self, verdict: Verdict) -> None:
        """The epoch is over; ranks that hang are replaced in the next one, without being waited for."""
        self._verdict = verdict
        for rank in verdict.lost:
            member = self._members[rank]
            member.lost, member.why, member.silent = True, verdict.cause, verdict.silent
            if member.stream is not None:
                member.stream.shut()  # should it ever go on, it finds that it is on its own, and ends
        self._break(f"rank {verdict.rank}: {verdict.cause}")
        self._changed.notify_all()

    # -- what the watch hears (`members.Listener`, on its thread)

    def joined(self, join: Join, stream: SecureStream) -> Member | None:
        with self._changed:
            rank = join.address.rank
            if not 0 <= rank < len(self._members) or self._members[rank].stream is not None:
                return None
            member = self._members[rank]
            member.stream, member.join, member.heard = stream, join, time.monotonic()
            self._changed.notify_all()
            return member

    def heard(self, member: Member, kind: int, content: bytes | memoryview) -> None:
        if kind == RESULT:
            if (flight := self._flight) is not None:
                flight.put(bytes(content))
            return
        message = decode_from_rank(content)
        with self._changed:
            if member not in self._members:
                return
            if isinstance(message, Pong):
                self._count += self._vigil.answered(member.rank, message.count, message.waits_for, time.monotonic())
                return
            member.heard = time.monotonic()
            match message:
                case Progress(phase=phase, share=share):
                    self._progress.note(member.rank, phase, share)
                case Left(epoch=epoch):
                    member.left = epoch
                case Failed() if message.epoch == self._epoch:
                    member.failure = message
                    self._break(f"rank {member.rank}: {message.message}")
                case Met() | Loaded() | Measured() | Ready() if message.epoch == self._epoch:
                    self._advance(member, message)
            self._changed.notify_all()

    def _advance(self, member: Member, message: Met | Loaded | Measured | Ready) -> None:
        member.reached = type(message).__name__
        if isinstance(message, Loaded):
            member.loaded = True
        elif isinstance(message, Measured):
            member.measured = message
        elif isinstance(message, Ready):
            member.ready = message

    def lost(self, member: Member) -> None:
        with self._changed:
            if member.rank < len(self._members) and self._members[member.rank] is member and not member.lost:
                member.lost = True
                busy = self._due or (self._flight is not None and self._flight.busy)
                if member.silent is None and busy:  # else nobody has looked for long
                    member.silent = time.monotonic() - max(member.stirred, self._lived)
                self._break(f"rank {member.rank} is gone")
                self._changed.notify_all()

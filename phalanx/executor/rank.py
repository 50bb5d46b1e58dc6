"""The life of a rank's process: join, then epoch after epoch until told to stop.

    join ── Begin: meet the others ── Load (once) ── Measure ── Allocate ── plans … ── aborted ── Begin …

A second thread listens to the executor, so that an abort breaks any wait at once, whatever the first is doing. When
the executor is gone, the process ends. What a rank computes is the worker's business; who starts ranks, the launchers'.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import queue
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, TypeVar

import msgspec

from phalanx.distributed.address import node_id
from phalanx.distributed.bootstrap import Door, Meeting, close_groups, connect_groups
from phalanx.distributed.pulse import Pulse
from phalanx.distributed.transport import make_transport
from phalanx.distributed.transports.abort import Abort, GroupBroken, Unreachable
from phalanx.distributed.transports.ring import Ring
from phalanx.distributed.transports.secure_stream import SecureStream
from phalanx.errors import ConfigError, PhalanxError
from phalanx.executor.kept_image import Line
from phalanx.executor.keys import derive
from phalanx.executor.messages import (
    EXCHANGE_S,
    LIMIT,
    MESSAGE,
    PLAN,
    RESULT,
    AbortEpoch,
    Allocate,
    Begin,
    FromRank,
    Join,
    Left,
    Load,
    Loaded,
    Measure,
    Measured,
    Met,
    Order,
    Ping,
    Pong,
    Progress,
    RankStart,
    Ready,
    Stop,
    ToRank,
    decode_to_rank,
    encode,
    failed,
)
from phalanx.fault_point import armed, reach, skippable
from phalanx.logging import configure
from phalanx.step import decode_plan
from phalanx.step import encode as encode_step

if TYPE_CHECKING:
    from phalanx.distributed.collectives import Groups
    from phalanx.worker.worker import Worker

log = logging.getLogger(__name__)

_END_S = 3.0
"""Seconds that a computation may still take when the executor is gone; then the process ends in the middle of it."""

_SEND_S = 10.0
_ANSWER_S = 1.0
_PROGRESS_S = 0.1

O = TypeVar("O", Load, Measure, Allocate)  # noqa: E741


def versions() -> dict[str, str]:
    """What must be the same everywhere."""
    import torch

    import phalanx

    return {
        "phalanx": phalanx.__version__,
        "python": ".".join(map(str, sys.version_info[:2])),
        "torch": torch.__version__.partition("+")[0],
        "byte order": sys.byteorder,
    }


def run_rank(start: RankStart, line: Line) -> None:
    """Returns when told to stop, or when the executor is gone. Raises GroupBroken when it cannot be reached. `line`
    leads to the supervisor."""
    import torch

    if start.cores:
        os.sched_setaffinity(0, start.cores)
    torch.set_num_threads(min(torch.get_num_threads(), start.threads))
    Rank(start, line).run()


class _Epoch:
    """What belongs to one epoch, made by the listener as soon as it hears of it."""

    def __init__(self, begin: Begin, plan_fds: list[int], result_fds: list[int], pulse: Pulse):
        self.begin = begin
        self.abort = Abort(pulse)
        self.plan_fds, self.result_fds = plan_fds, result_fds
        self.orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self.plans: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def end(self, reason: str) -> None:
        self.abort.set(reason)
        self.orders.put(None)
        self.plans.put(None)

    def order(self, kind: type[O]) -> O:
        """The executor's next order, which is of this kind. Raises GroupBroken when the epoch has ended."""
        order = self.orders.get()
        if not isinstance(order, kind):
            self.abort.check()
            raise GroupBroken(f"The executor said {order} when {kind.__name__} was due.")
        return order


class Rank:
    """One rank; `run` is its life. `end` ends the process when it must not wait for a computation."""

    def __init__(self, start: RankStart, line: Line):
        self._start, self._line = start, line
        self._never = Abort()
        reach("join", rank=start.rank, life=start.life)
        self._stream = _reach(start, self._never)
        self._door = Door(start.rank, start.host, _own_gpu(start))
        self._pulse = Pulse()
        self._idle_for = "an order"
        """What this rank waits for from the executor; empty while it has something to do."""
        self._epochs: queue.SimpleQueue[_Epoch | None] = queue.SimpleQueue()
        self._current: _Epoch | None = None
        self._worker: Worker | None = None
        self._send_lock = threading.Lock()
        self._over = threading.Event()
        self._reported = ("", 0.0)

    def run(self) -> None:
        self._send(Join(self._door.address, os.getpid(), platform.node(), versions()))
        threading.Thread(target=self._listen, name="listener", daemon=True).start()
        while (epoch := self._epochs.get()) is not None:
            self._live(epoch)
            epoch.abort.close()
            self._send(Left(epoch.begin.epoch))
        if self._worker is not None:
            self._worker.close()
        self._door.close()
        self._over.set()

    # -- what the executor says

    def _listen(self) -> None:
        try:
            while True:
                kind, content = self._stream.receive(LIMIT)
                if kind == PLAN:
                    if self._current is not None:
                        self._current.plans.put(bytes(content))
                    continue
                message = decode_to_rank(content)
                if isinstance(message, Stop):
                    break
                if isinstance(message, Ping):
                    self._answer()
                else:
                    self._hear(message)
        except Unreachable as error:  # what is sent may still arrive there: it would see us end, and not know why
            with contextlib.suppress(OSError):
                self._line.say(str(error).rstrip("."))
        except (GroupBroken, msgspec.DecodeError):
            pass  # the executor is gone, or is none
        self._end_epoch("the executor is gone")
        self._epochs.put(None)
        if not self._over.wait(_END_S):
            os._exit(1)

    def _answer(self) -> None:
        # Whoever holds the lock is sending, which is an answer too.
        if self._send_lock.acquire(timeout=_ANSWER_S):
            try:
                pulse = self._pulse
                pong = Pong(pulse.count, self._idle_for or pulse.waits_for)
                self._stream.send(MESSAGE, encode(pong), _SEND_S)
            except GroupBroken:
                pass
            finally:
                self._send_lock.release()

    def _hear(self, message: ToRank) -> None:
        match message:
            case Begin():
                self._end_epoch("a new epoch begins")
                ring = message.ring_member > 0
                plan_fds = self._stream.receive_descriptors(message.node_ranks + 2, 10.0) if ring else []
                result_fds = self._stream.receive_descriptors(3, 10.0) if ring and message.reports else []
                self._current = _Epoch(message, plan_fds, result_fds, self._pulse)
                self._epochs.put(self._current)
            case Load() | Measure() | Allocate():
                if self._current is not None:
                    self._current.orders.put(message)
            case AbortEpoch():
                self._end_epoch(message.reason)

    def _end_epoch(self, reason: str) -> None:
        if self._current is not None:
            self._current.end(reason)
            self._current = None

    def _send(self, message: FromRank) -> None:
        try:
            with self._send_lock:
                self._stream.send(MESSAGE, encode(message), _SEND_S)
        except GroupBroken:
            pass  # the listener notices too, and ends us

    # -- one epoch

    def _live(self, epoch: _Epoch) -> None:
        """Until it is aborted. What goes wrong here is told to the executor, before the other ranks can notice."""
        begin, rank, life = epoch.begin, self._start.rank, self._start.life
        with contextlib.ExitStack() as held:
            self._pulse.abort = epoch.abort
            held.callback(setattr, self._pulse, "abort", None)
            held.callback(setattr, self, "_idle_for", "an order")
            try:
                self._idle_for = ""
                groups, plans, results = self._connect(epoch, held)
                worker = self._prepare(epoch, groups)
                while True:
                    self._idle_for = "a plan"
                    data = plans.read() if plans is not None else epoch.plans.get()
                    self._idle_for = ""
                    if data is None:
                        epoch.abort.check()
                        return
                    plan = decode_plan(data)
                    if reach("step", rank=rank, step=plan.step_id, life=life, plan=plan):
                        continue
                    result = worker.run(plan)
                    reach("computed", rank=rank, step=plan.step_id, life=life, plan=plan)
                    if begin.reports and result is not None:
                        self._report(encode_step(result), results)
            except GroupBroken as broken:
                if epoch.abort.reason is None:  # nobody told us: we are the ones who noticed
                    self._send(failed(begin.epoch, broken, secondary=True))
            except Exception as error:
                if not isinstance(error, PhalanxError):
                    log.debug("rank %d failed", self._start.rank, exc_info=True)
                self._send(failed(begin.epoch, error))

    def _connect(self, epoch: _Epoch, held: contextlib.ExitStack) -> tuple[Groups, Ring | None, Ring | None]:
        """This rank's groups, the ring that plans come by and the one that results go by, where there are such."""
        begin, plans, results = epoch.begin, None, None
        if epoch.plan_fds:
            member = begin.ring_member
            plans = Ring.attach(epoch.plan_fds, member, epoch.abort, limit=LIMIT, crowded=begin.crowded)
            held.callback(plans.close)
        if epoch.result_fds:
            results = Ring.attach(epoch.result_fds, 0, epoch.abort, limit=LIMIT, crowded=begin.crowded)
            held.callback(results.close)
        key = derive(self._start.key, "epoch", begin.key)  # what travels is of no use without ours
        transport = make_transport(begin.config.parallel.transport)
        meeting = Meeting(begin.epoch, key, begin.encrypt, exchange_timeout=EXCHANGE_S, transport=transport)
        self._idle_for = "the others"
        groups = connect_groups(begin.mesh, self._door, begin.roster, meeting, epoch.abort, crowded=begin.crowded)
        self._idle_for = ""
        held.callback(close_groups, groups)
        if armed("exchange", rank=self._start.rank):
            exchange = skippable(groups.tp.all_reduce, rank=self._start.rank)
            groups.tp.all_reduce = exchange  # type: ignore[method-assign, assignment]
            groups.tp.rounds = lambda dtype: None  # type: ignore[method-assign]
        return groups, plans, results

    def _report(self, result: bytes, ring: Ring | None) -> None:
        if ring is not None:
            ring.write(result)
            return
        with self._send_lock:
            self._stream.send(RESULT, result)

    def _prepare(self, epoch: _Epoch, groups: Groups) -> Worker:
        """Weights are loaded in a rank's first epoch and stay; the rest is new."""
        from phalanx.worker.worker import open_worker

        begin, loaded = epoch.begin, self._worker
        if loaded is None:
            server = begin.config.server
            configure(server.log_level, server.log_format, tag=f"rank {self._start.rank}")
            _check_gpu(self._start)
            worker = open_worker(
                begin.config,
                mesh=begin.mesh,
                rank=self._start.rank,
                groups=groups,
                tensor_weights=begin.tensor_weights,
                stage_layers=begin.stage_layers,
                node_ranks=begin.loading_ranks,
                longest=begin.longest,
                pulse=self._pulse,
                weights=begin.weights,
                keeper=self._line,
            )
            worker.check_memory()
        else:
            worker = loaded
            worker.rejoin(groups)
        self._send(Met(begin.epoch))
        self._order(epoch, Load)
        if loaded is None:
            reach("load", rank=self._start.rank, life=self._start.life)
            worker.load(self._progress)
            self._worker = worker
        self._send(Loaded(begin.epoch))
        self._order(epoch, Measure)
        self._send(Measured(begin.epoch, worker.cache_size()))
        blocks = self._order(epoch, Allocate).blocks
        reach("allocate", rank=self._start.rank, life=self._start.life)
        layout = worker.allocate(self._progress, blocks=blocks, epoch=begin.epoch)
        self._send(Ready(begin.epoch, layout, worker.status(begin.node_ranks)))
        return worker

    def _order(self, epoch: _Epoch, kind: type[O]) -> O:
        self._idle_for = "an order"
        order = epoch.order(kind)
        self._idle_for = ""
        return order

    def _progress(self, phase: str, share: float) -> None:
        if phase == "weights" and 0.5 < share < 1.0:
            reach("fill", rank=self._start.rank, life=self._start.life)
        now, (last, at) = time.monotonic(), self._reported
        if share in (0.0, 1.0) or phase != last or now - at > _PROGRESS_S:
            self._reported = (phase, now)
            self._send(Progress(phase, share))


def _own_gpu(start: RankStart) -> str:
    """Makes the rank's GPU the process's own; what tells it from others. Empty without one."""
    if start.device != "cuda":
        return ""
    import torch

    if start.device_index >= torch.cuda.device_count():
        return ""  # said when somebody listens
    torch.cuda.set_device(start.device_index)
    return str(torch.cuda.get_device_properties(start.device_index).uuid)


def _check_gpu(start: RankStart) -> None:
    """Raises ConfigError when the node does not have this rank's GPU."""
    if start.device != "cuda":
        return
    import torch

    count = torch.cuda.device_count()
    if start.device_index >= count:
        raise ConfigError(
            f"The rank is to use GPU {start.device_index} of its node (counted from 0), which has {count}.",
            fix="Use fewer ranks on this node, or --device cpu.",
        )


def _reach(start: RankStart, abort: Abort) -> SecureStream:
    hub = start.hub
    local = hub.node == node_id()
    try:
        if local:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.connect(f"\0{hub.unix}")
        else:
            sock = socket.create_connection((hub.host, hub.port), timeout=start.timeout)
    except OSError as error:
        where = "on this node" if local else f"at {hub.host}:{hub.port}"
        raise GroupBroken(
            f"Rank {start.rank} cannot reach the engine {where}: {error.strerror or error}.",
            fix="Check that the address is right and no firewall is between the nodes.",
        ) from None
    stream = SecureStream(sock, abort, "the executor")
    stream.handshake(start.key, client=True, encrypt=start.encrypt and not local, timeout=start.timeout)
    return stream

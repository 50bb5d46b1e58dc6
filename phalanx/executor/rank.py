"""The life of a rank's process: join, then epoch after epoch until told to stop.

    join ── Begin: meet the others ── load (once) ── Allocate ── plans … ── aborted ── Begin …

A second thread listens to the executor, so that an abort breaks any wait at once, whatever the first is doing. When
the executor is gone, the process ends. What a rank computes is the worker's business; who starts ranks, the launchers'.
"""

from __future__ import annotations

import os
import platform
import queue
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from phalanx.distributed.bootstrap import Address, Door, Meeting, close_groups, connect_groups, node_id
from phalanx.distributed.transports.abort import Abort, GroupBroken
from phalanx.distributed.transports.ring import Ring
from phalanx.distributed.transports.secure_stream import SecureStream
from phalanx.errors import PhalanxError
from phalanx.executor.messages import (
    LIMIT,
    MESSAGE,
    PLAN,
    RESULT,
    AbortEpoch,
    Allocate,
    Begin,
    FromRank,
    Join,
    Loaded,
    Progress,
    Ready,
    Stop,
    decode_to_rank,
    encode,
    failed,
)
from phalanx.step import decode_plan
from phalanx.step import encode as encode_step

if TYPE_CHECKING:
    from phalanx.distributed.collectives import Groups
    from phalanx.worker.worker import Worker


class RankStart(msgspec.Struct, frozen=True):
    """All that a new process needs to become a rank."""

    rank: int
    hub: Address
    """Where the executor listens; its `rank` is -1."""
    key: bytes
    host: str | None = None
    """This node's address for ranks of other nodes; None when the world is on one node."""
    cores: tuple[int, ...] = ()
    """Processor cores to run on; empty leaves the choice to the system."""
    threads: int = 1
    encrypt: bool = False
    timeout: float = 60.0
    """Seconds to reach the executor."""


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


def run_rank(start: RankStart) -> None:
    """Returns when told to stop, or when the executor is gone. Raises GroupBroken when it cannot be reached."""
    import torch

    if start.cores:
        os.sched_setaffinity(0, start.cores)
    torch.set_num_threads(start.threads)
    Rank(start).run()


class _Epoch:
    """What belongs to one epoch, made by the listener as soon as it hears of it."""

    def __init__(self, begin: Begin, plan_fds: list[int], result_fds: list[int]):
        self.begin = begin
        self.abort = Abort()
        self.plan_fds, self.result_fds = plan_fds, result_fds
        self.allocate: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self.plans: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def end(self, reason: str) -> None:
        self.abort.set(reason)
        self.allocate.put(None)
        self.plans.put(None)


class Rank:
    def __init__(self, start: RankStart):
        self._start = start
        self._door = Door(start.rank, start.host)
        self._never = Abort()
        self._stream = _reach(start, self._never)
        self._epochs: queue.SimpleQueue[_Epoch | None] = queue.SimpleQueue()
        self._current: _Epoch | None = None
        self._worker: Worker | None = None
        self._send_lock = threading.Lock()

    def run(self) -> None:
        self._send(Join(self._door.address, os.getpid(), platform.node(), versions()))
        threading.Thread(target=self._listen, name="listener", daemon=True).start()
        while (epoch := self._epochs.get()) is not None:
            try:
                self._live(epoch)
            except GroupBroken as broken:
                if epoch.abort.reason is None:  # nobody told us: we are the ones who noticed
                    self._send(failed(epoch.begin.epoch, broken))
            except Exception as error:
                if not isinstance(error, PhalanxError):
                    import logging

                    logging.getLogger(__name__).debug("rank %d failed", self._start.rank, exc_info=True)
                self._send(failed(epoch.begin.epoch, error))
            finally:
                epoch.abort.close()
        if self._worker is not None:
            self._worker.close()
        self._door.close()

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
                self._hear(message)
        except (GroupBroken, msgspec.DecodeError):
            pass  # the executor is gone, or is none
        self._end_epoch("the executor is gone")
        self._epochs.put(None)

    def _hear(self, message: Begin | Allocate | AbortEpoch) -> None:
        match message:
            case Begin():
                self._end_epoch("a new epoch begins")
                ring = message.ring_member > 0
                plan_fds = self._stream.receive_descriptors(message.node_ranks + 2, 10.0) if ring else []
                result_fds = self._stream.receive_descriptors(3, 10.0) if ring and message.reports else []
                self._current = _Epoch(message, plan_fds, result_fds)
                self._epochs.put(self._current)
            case Allocate():
                if self._current is not None:
                    self._current.allocate.put(message.blocks)
            case AbortEpoch():
                self._end_epoch(message.reason)

    def _end_epoch(self, reason: str) -> None:
        if self._current is not None:
            self._current.end(reason)
            self._current = None

    def _send(self, message: FromRank) -> None:
        try:
            with self._send_lock:
                self._stream.send(MESSAGE, encode(message), 10.0)
        except GroupBroken:
            pass  # the listener notices too, and ends us

    # -- one epoch

    def _live(self, epoch: _Epoch) -> None:
        begin = epoch.begin
        meeting = Meeting(begin.epoch, begin.key, begin.encrypt, exchange_timeout=begin.exchange_timeout)
        groups = connect_groups(begin.mesh, self._door, begin.roster, meeting, epoch.abort, crowded=begin.crowded)
        plans, results = self._channels(epoch)
        try:
            worker = self._prepare(epoch, groups)
            while True:
                data = plans.read() if plans is not None else epoch.plans.get()
                if data is None:
                    epoch.abort.check()
                    return
                result = worker.run(decode_plan(data))
                if begin.reports and result is not None:
                    self._report(encode_step(result), results)
        finally:
            close_groups(groups)
            for ring in (plans, results):
                if ring is not None:
                    ring.close()

    def _channels(self, epoch: _Epoch) -> tuple[Ring | None, Ring | None]:
        begin, plans, results = epoch.begin, None, None
        if epoch.plan_fds:
            member = begin.ring_member
            plans = Ring.attach(epoch.plan_fds, member, epoch.abort, limit=LIMIT, crowded=begin.crowded)
        if epoch.result_fds:
            results = Ring.attach(epoch.result_fds, 0, epoch.abort, limit=LIMIT, crowded=begin.crowded)
        return plans, results

    def _report(self, result: bytes, ring: Ring | None) -> None:
        if ring is not None:
            ring.write(result)
            return
        with self._send_lock:
            self._stream.send(RESULT, result)

    def _prepare(self, epoch: _Epoch, groups: Groups) -> Worker:
        """Weights are loaded in a rank's first epoch and stay; the rest is new."""
        from phalanx.worker.worker import open_worker

        begin = epoch.begin
        if self._worker is None:
            worker = open_worker(
                begin.config,
                mesh=begin.mesh,
                rank=self._start.rank,
                groups=groups,
                tensor_weights=begin.tensor_weights,
                stage_layers=begin.stage_layers,
                node_ranks=begin.node_ranks,
            )
            worker.load(self._progress)
            self._worker = worker
        else:
            self._worker.rejoin(groups)
        size = self._worker.cache_size()
        self._send(Loaded(begin.epoch, size.blocks, size.reason))
        blocks = epoch.allocate.get()
        if blocks is None:
            epoch.abort.check()
            raise GroupBroken("The epoch ended before it began.")
        layout = self._worker.allocate(self._progress, blocks=blocks, epoch=begin.epoch)
        self._send(Ready(begin.epoch, layout.bytes_per_block, layout.vocab_size, self._worker.status()))
        return self._worker

    _reported = 0.0

    def _progress(self, phase: str, share: float) -> None:
        now = time.monotonic()
        if share in (0.0, 1.0) or now - self._reported > 0.1:
            self._reported = now
            self._send(Progress(phase, share))


def _reach(start: RankStart, abort: Abort) -> SecureStream:
    hub = start.hub
    local = hub.node == node_id()
    try:
        if local:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.connect(f"\0{hub.unix}")
        else:
            sock = socket.create_connection((hub.host, hub.port), timeout=start.timeout)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 3000)
    except OSError as error:
        where = "on this node" if local else f"at {hub.host}:{hub.port}"
        raise GroupBroken(
            f"Rank {start.rank} cannot reach the engine {where}: {error.strerror or error}.",
            fix="Check that the address is right and no firewall is between the nodes.",
        ) from None
    stream = SecureStream(sock, abort, "the executor")
    stream.handshake(start.key, client=True, encrypt=start.encrypt and not local, timeout=start.timeout)
    return stream

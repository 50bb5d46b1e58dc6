"""Ranks that are threads and compute nothing, for what a hub makes of ranks that behave in odd ways.

They pretend to be on another node, so that plans and results go over their streams.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from phalanx.distributed.address import Address
from phalanx.distributed.transports.abort import Abort, GroupBroken
from phalanx.distributed.transports.secure_stream import SecureStream
from phalanx.executor.base import CacheLayout, WorkerStatus
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
    Left,
    Load,
    Loaded,
    Measure,
    Measured,
    Met,
    Ping,
    Pong,
    RankStart,
    Ready,
    Stop,
    ToRank,
    decode_to_rank,
    encode,
)
from phalanx.step import StepPlan, StepResult, decode_plan
from phalanx.step import encode as encode_step
from tests.helpers.unix_calls import connect


class FakeRank:
    """Answers as it should. Tests replace `hear`, `step` or `pong` of one."""

    def __init__(self, start: RankStart):
        self.rank, self.epoch = start.rank, -1
        self.stream = SecureStream(connect(start.hub.unix), Abort(), "the hub")
        self.stream.handshake(start.key, client=True, encrypt=False, timeout=10)
        self.hear: Callable[[ToRank], None] = self.answer
        self.step: Callable[[StepPlan], None] = self.compute
        self.pong: Callable[[], Pong | None] = lambda: Pong(next(self._beats), "")
        self._beats = itertools.count()
        self.say(Join(Address(start.rank, "elsewhere", "nowhere"), 1000 + start.rank, "elsewhere", {}))
        threading.Thread(target=self._live, daemon=True).start()

    def say(self, message: FromRank) -> None:
        self.stream.send(MESSAGE, encode(message), 10)

    def _live(self) -> None:
        try:
            while True:
                kind, content = self.stream.receive(LIMIT)
                if kind == PLAN:
                    self.step(decode_plan(content))
                elif isinstance(message := decode_to_rank(content), Stop):
                    break
                elif isinstance(message, Ping):
                    if (pong := self.pong()) is not None:
                        self.say(pong)
                else:
                    self.hear(message)
        except GroupBroken:
            pass
        self.stream.close()

    def answer(self, message: ToRank) -> None:
        match message:
            case Begin(epoch=epoch):
                self.epoch = epoch
                self.say(Met(epoch))
            case Load():
                self.say(Loaded(self.epoch))
            case Measure():
                self.say(Measured(self.epoch, 10 + self.rank))
            case Allocate(blocks=blocks):
                status = WorkerStatus(self.rank, 1000 + self.rank, "elsewhere", "cpu", "ready", "0-1", 1, {})
                self.say(Ready(self.epoch, CacheLayout(blocks, 16, 100 + self.rank, 50), status))
            case AbortEpoch():
                self.say(Left(self.epoch))

    def compute(self, plan: StepPlan) -> None:
        self.stream.send(RESULT, encode_step(StepResult(plan.epoch, plan.step_id)), 10)


class FakeLauncher:
    """`on_start` is called with each rank once it is there."""

    host = None

    def __init__(self) -> None:
        self.ranks: dict[int, FakeRank] = {}
        self.started: list[int] = []
        self.killed: list[int] = []
        self.on_start: Callable[[FakeRank], None] | None = None

    def launch(self, starts: list[RankStart]) -> None:
        for start in starts:
            self.started.append(start.rank)
            rank = self.ranks[start.rank] = FakeRank(start)
            if self.on_start is not None:
                self.on_start(rank)

    def kill(self, rank: int) -> None:
        if rank in self.ranks:
            self.killed.append(rank)
            self.ranks[rank].stream.shut()

    def cause(self, rank: int, wait: float = 0.0) -> str | None:
        return None

    def node(self, seat: int) -> str:
        return "here"

    def close(self) -> None:
        for rank in self.ranks.values():
            rank.stream.shut()

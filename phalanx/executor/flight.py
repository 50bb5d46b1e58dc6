"""The plans of one epoch that are under way, and their results, in the order of the plans.

Whoever asks for a result fetches results until it is there: no thread in between. When the way breaks, all plans fail
for the one reason that `Pilot.death` gives. Does not know ranks, nor why an epoch ends.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Protocol

import msgspec

from phalanx.distributed.transports.abort import GroupBroken
from phalanx.executor.base import WorkerDied
from phalanx.executor.step_future import StepFuture
from phalanx.executor.traffic import Traffic
from phalanx.step import StepPlan, StepResult, decode_result, encode, unpack


class Pilot(Protocol):
    """Whose plans they are."""

    def step_begins(self) -> None:
        """A result is awaited from now on."""
        ...

    def step_done(self, tokens: int) -> None:
        """Of so many tokens."""
        ...

    def death(self, broken: Exception | None) -> WorkerDied:
        """The lost rank behind a broken wait."""
        ...


class Pending(StepFuture):
    """A step's result on its way."""

    def __init__(self, flight: Flight, plan: StepPlan):
        super().__init__()
        self._flight, self._rows = flight, plan.rows

    @property
    def tokens(self) -> int:
        """Of its step."""
        return sum(unpack(self._rows.num_tokens, "H")) + len(unpack(self._rows.proposed))

    def result(self, timeout: float | None = None) -> StepResult:
        if self._outcome is None:
            self._flight.collect(self)
        return super().result(timeout)


class Flight:
    """Owns `traffic`. `timeout` in seconds bounds the sending of a plan."""

    def __init__(self, pilot: Pilot, epoch: int, traffic: Traffic, timeout: float):
        self._pilot, self._epoch, self._timeout = pilot, epoch, timeout
        self._traffic: Traffic | None = traffic
        self._pending: deque[Pending] = deque()

    def submit(self, plan: StepPlan) -> Pending:
        pending = Pending(self, plan)
        self._pending.append(pending)
        self._pilot.step_begins()
        try:
            self._open().send(encode(plan), self._timeout)
        except GroupBroken as broken:
            death = self._pilot.death(broken)
            with contextlib.suppress(ValueError):  # somebody may have ended the epoch meanwhile
                self._pending.remove(pending)
                pending.set_exception(death)
        return pending

    def collect(self, wanted: Pending) -> None:
        """Fetch results, in order, until `wanted` has its own."""
        while not wanted.done():
            try:
                result = decode_result(self._open().take())
            except (GroupBroken, msgspec.DecodeError) as broken:
                death = self._pilot.death(broken)
                while self._pending:
                    self._pending.popleft().set_exception(death)
                if not wanted.done():
                    wanted.set_exception(death)
                return
            if result.epoch == self._epoch and self._pending:
                done = self._pending.popleft()
                self._pilot.step_done(done.tokens)
                done.set_result(result)

    def _open(self) -> Traffic:
        """Raises GroupBroken when the epoch has ended."""
        if self._traffic is None:
            raise GroupBroken("The epoch ended.")
        return self._traffic

    def put(self, result: bytes | None) -> None:
        """As `Traffic.put`."""
        if (traffic := self._traffic) is not None:
            traffic.put(result)

    @property
    def busy(self) -> bool:
        """Whether plans are under way."""
        return bool(self._pending)

    @property
    def awaited(self) -> Pending | None:
        """The oldest plan whose result is not there. Any thread may ask that keeps others from ending this."""
        if self._traffic is None or self._traffic.unread:
            return None
        return next(iter(list(self._pending)), None)  # which the thread that collects takes from

    def end(self) -> None:
        """The epoch is over. Plans that are left are cancelled."""
        traffic, self._traffic = self._traffic, None
        if traffic is not None:
            traffic.close()
        while self._pending:
            self._pending.popleft().cancel()

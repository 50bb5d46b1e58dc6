"""Results on their way: in order, all lost with the way, and without a lock for each."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from phalanx.distributed.transports.abort import GroupBroken
from phalanx.executor.base import WorkerDied
from phalanx.executor.flight import Flight
from phalanx.step import StepPlan, StepResult, decode_plan, encode
from tests.helpers.plans import Run, plan


class Way:
    """A rank that answers each plan, until the way to it breaks."""

    def __init__(self) -> None:
        self.answers: deque[bytes] = deque()
        self.broken = False

    def send(self, data: bytes, timeout: float) -> None:
        asked = decode_plan(data)
        self.answers.append(encode(StepResult(asked.epoch, asked.step_id, asked.rows.slots, b"")))

    def take(self) -> bytes:
        if self.broken:
            raise GroupBroken("The way is broken.")
        return self.answers.popleft()

    def close(self) -> None: ...


class Pilot:
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def step_begins(self) -> None: ...

    def step_done(self, tokens: int) -> None:
        self.tokens.append(tokens)

    def death(self, broken: Exception | None) -> WorkerDied:
        return WorkerDied(0, str(broken))


@pytest.fixture
def way() -> Way:
    return Way()


@pytest.fixture
def pilot() -> Pilot:
    return Pilot()


@pytest.fixture
def flight(way: Way, pilot: Pilot) -> Flight:
    return Flight(pilot, 0, way, 1.0)  # type: ignore[arg-type]


def step(number: int) -> StepPlan:
    return plan([Run(0, number)], step=number)


def test_who_asks_for_the_last_gets_those_before_it_too(flight: Flight, pilot: Pilot) -> None:
    first, second = flight.submit(step(1)), flight.submit(step(2))
    assert flight.busy and not first.done()
    assert second.result().step_id == 2
    assert first.done() and first.result().step_id == 1 and first.exception() is None
    assert pilot.tokens == [1, 2] and not flight.busy
    assert "Pending" in repr(first)


def test_all_are_lost_with_the_way(flight: Flight, way: Way) -> None:
    steps = [flight.submit(step(1)), flight.submit(step(2))]
    way.broken = True
    for pending in steps:
        with pytest.raises(WorkerDied, match="The way is broken"):
            pending.result()
        assert isinstance(pending.exception(), WorkerDied) and not pending.cancelled()


def test_those_that_are_left_at_the_end_are_cancelled(flight: Flight) -> None:
    done, left = flight.submit(step(1)), flight.submit(step(2))
    assert done.result().step_id == 1
    flight.end()
    assert left.cancelled() and not done.cancelled() and not done.cancel()
    with pytest.raises(CancelledError):
        left.result()


def test_a_step_makes_no_lock(flight: Flight, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*_: Any) -> None:
        raise AssertionError("a lock was made")

    monkeypatch.setattr(threading, "Condition", made)
    with pytest.raises(AssertionError):
        Future()  # as it would
    assert flight.submit(step(1)).result().step_id == 1

"""Requests that end their workers, on the fake executor: they are refused alone, and hold up nobody."""

from __future__ import annotations

import pytest

from phalanx.executor.base import CacheLayout, WorkerDied
from tests.helpers.engine_driver import VOCAB, Driver

DEADLY = 63


def poisoned(at: int, *, deadly: int = 1, **options: object) -> Driver:
    """Workers end whenever a request whose prompt begins with DEADLY has come to `at` tokens."""
    driver = Driver(**options)  # type: ignore[arg-type]
    driver.executor.poisons = lambda tokens: tokens[0] == DEADLY and len(tokens) >= at
    for number in range(3):
        driver.ask(f"good{number}", [number + 1] * 7, max_tokens=20, logprobs=0)
    for number in range(deadly):
        driver.ask(f"bad{number}", [DEADLY, number, 5], max_tokens=20, choice=number).may_end.add("error")
    return driver


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("at", [3, 4, 9])
@pytest.mark.parametrize("deadly", [1, 4])
def test_who_ends_workers_is_refused_alone(at: int, deadly: int, window: int) -> None:
    driver = poisoned(at, deadly=deadly, max_in_flight=window)
    answers = dict(driver.answers)
    driver.drain()
    for number in range(deadly):
        output = answers[f"bad{number}"].output
        assert output is not None
        assert output.error is not None
        assert (output.error.status, output.error.code, output.error.retryable) == (500, "poison_request", False)
        assert output.start in (at - 3, at - 2)
    assert len(driver.executor.restarts) <= 2 + 3 * deadly
    assert driver.engine.status().state == "ready"
    assert not driver.engine._quarantine


def test_who_ends_workers_only_in_ordinary_steps_is_refused_as_well() -> None:
    driver = poisoned(10**9)
    seen: set[int] = set()

    def second_step(tokens: list[int]) -> bool:
        deadly = tokens[0] == DEADLY and driver.executor.epoch in seen and len(tokens) > 3
        if tokens[0] == DEADLY:
            seen.add(driver.executor.epoch)
        return deadly

    driver.executor.poisons = second_step
    bad = driver.answers["bad0"]
    driver.drain()
    assert bad.reason == "error"
    assert driver.engine.status().epoch <= 6


def test_a_suspect_that_is_aborted_holds_up_nobody() -> None:
    driver = poisoned(3)
    while driver.engine._quarantine.alone is None:
        driver.step()
    suspects = driver.engine._quarantine.suspects
    driver.abort(*suspects)
    driver.ask("new", [1, 2, 3])
    driver.drain()


def test_a_suspect_that_the_cache_cannot_hold_any_more_holds_up_nobody() -> None:
    driver = Driver(blocks=16)
    long = driver.ask("long", [1] * 30, max_tokens=4)
    short = driver.ask("short", [2] * 4, max_tokens=9)
    driver.step()
    for layout in (CacheLayout(16, 4, 1, VOCAB), CacheLayout(6, 4, 1, VOCAB)):
        driver.executor.restart_layouts.append(layout)
        driver.executor.lose_result = True
        while driver.executor.lose_result:
            driver.step()
    assert "long" in driver.engine._quarantine.suspects
    begin = driver.clock.now
    while short.reason is None:
        driver.step()
    assert driver.clock.now - begin < 5
    driver.engine.recover(WorkerDied(1, "it was killed"))
    driver.executor.restart_layouts.append(CacheLayout(16, 4, 1, VOCAB))
    driver.drain()
    assert long.reason == "length"


def test_only_the_suspect_is_planned() -> None:
    driver = poisoned(3)
    while driver.engine._quarantine.alone is None:
        driver.step()
    driver.executor.poisons = lambda tokens: False
    driver.executor.keep_plans = True
    while driver.engine._quarantine:
        alone = driver.engine._quarantine.alone
        driver.step()
        assert {request.request_id for request in driver.scheduler.running} <= {alone}
    assert all(len(plan.rows.slots) == 2 for plan in driver.executor.plans)
    driver.drain()

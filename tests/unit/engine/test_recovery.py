"""Losses of workers, on the fake executor: what goes on meanwhile, how often it is tried, and what is said about it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from phalanx import fault_point
from phalanx.config import RecoveryConfig
from phalanx.engine.engine import PROBE
from phalanx.engine.recovery import BACK_OFF_S, CAPACITY_S, KEPT, MAX_TRIES, Restarts
from phalanx.errors import EngineDead, InvalidRequest, Recovering
from phalanx.executor.base import CacheLayout, ExecutorLost, NoCapacity, WorkerDied
from tests.helpers.engine_driver import VOCAB, Driver, make_request
from tests.helpers.fake_executor import oracle
from tests.helpers.fake_grammar import structured

LOST = WorkerDied(1, "it was killed by SIGKILL", node="host2", kind="killed", silent=0.02)
MISSING = NoCapacity(1, "it was killed by SIGKILL", missing="one more device of 2 GiB", node="host2")


class Gate:
    """Holds up the restarts of a driver's workers."""

    def __init__(self, driver: Driver) -> None:
        self._restart = driver.executor.restart
        self._open = threading.Event()
        self.entered = threading.Event()
        driver.executor.restart = self  # type: ignore[method-assign]

    def __call__(self, epoch: int) -> CacheLayout:
        self.entered.set()
        assert self._open.wait(30)
        return self._restart(epoch)

    def open(self) -> None:
        self._open.set()


def until(driver: Driver, state: str, *, steps: int = 3000) -> None:
    for _ in range(steps):
        if driver.engine.status().state == state:
            return
        driver.step()
    raise AssertionError(f"it never is {state}")


def begun(count: int = 3, **options: object) -> Driver:
    """A driver with `count` requests that have some tokens."""
    driver = Driver(**options)  # type: ignore[arg-type]
    for number in range(count):
        driver.ask(f"r{number}", [number + 1] * 6, max_tokens=12)
    for _ in range(4):
        driver.step()
    return driver


# What goes on meanwhile


def test_steps_return_at_once_while_workers_start_and_requests_come_and_go() -> None:
    driver = begun()
    gate = Gate(driver)
    driver.engine.recover(LOST)
    assert gate.entered.wait(10)
    begin, turns = time.monotonic(), driver.engine.turns
    for _ in range(5):
        driver.step()
    assert time.monotonic() - begin < 2.0
    assert driver.engine.turns == turns + 5
    late = driver.ask("late", [9] * 5)
    driver.abort("r1")
    driver.step()
    assert (driver.answers["r1"].reason, late.outputs) == ("abort", 1)
    with pytest.raises(InvalidRequest, match="already running"):
        driver.engine.add(make_request("r0", [1]))
    status = driver.engine.status()
    assert (status.state, status.running, status.waiting) == ("recovering", 0, 3)
    assert status.free_blocks == status.blocks
    gate.open()
    driver.drain()
    assert driver.engine.status().state == "ready"


def test_ready_again_only_when_a_token_is_committed() -> None:
    driver = Driver(max_num_batched_tokens=4)
    driver.ask("a", [1] * 20, max_tokens=4)
    driver.step()
    driver.engine.recover(LOST)
    seen = []
    while driver.running():
        driver.step()
        seen.append((driver.engine.status().state, len(driver.answers["a"].tokens)))
    assert all((state == "ready") == (tokens > 0) for state, tokens in seen)
    assert ("recovering", 0) in seen[1:]


def test_an_idle_engine_is_ready_again_when_a_step_has_run() -> None:
    driver = Driver()
    executor = driver.executor
    executor.lose_submit = True  # and its health says so
    assert not driver.engine.has_work
    driver.engine.tick()
    assert driver.engine.has_work
    outputs = []
    states = set()
    while driver.engine.has_work:
        outputs += driver.engine.step()
        states.add(driver.engine.status().state)
    assert outputs == [], "a client heard of the probe"
    assert states == {"recovering", "ready"}
    (done,) = driver.engine.status().recoveries
    assert (done.epoch, done.resumed, done.recomputed) == (1, 0, 0)
    assert done.first_token_s is not None
    driver.scheduler.check_invariants()
    assert not driver.scheduler.requests


def test_a_probe_whose_row_fails_has_run_too() -> None:
    driver = Driver()
    driver.executor.fail_row = lambda slot, step_id: True
    driver.engine.recover(LOST)
    until(driver, "ready", steps=50)
    assert not driver.engine.has_work


def test_when_all_requests_are_aborted_meanwhile_a_probe_shows_that_workers_work() -> None:
    driver = begun(2)
    driver.engine.recover(LOST)
    driver.abort("r0", "r1")
    driver.drain()
    status = driver.engine.status()
    assert (status.state, status.recoveries[0].resumed) == ("ready", 0)


def test_the_id_of_the_probe_is_no_clients() -> None:
    with pytest.raises(InvalidRequest):
        Driver().ask(PROBE, [1])


def test_a_loss_while_a_grammar_compiles() -> None:
    compiled = threading.Event()
    driver = begun(1)
    compile_grammar = driver.engine._compilations._compile_grammar
    assert compile_grammar is not None

    def slow(asked: object) -> object:
        assert compiled.wait(30)
        return compile_grammar(asked)  # type: ignore[arg-type]

    driver.engine._compilations._compile_grammar = slow  # type: ignore[assignment]
    answer = driver.add(make_request("g", [5, 6], max_tokens=20, structured_outputs=structured(2, 6)))
    driver.engine.recover(LOST)
    for _ in range(20):
        driver.engine.step()
    assert driver.engine.status().waiting == 1
    compiled.set()
    driver.answers.pop("r0")
    driver.drain()
    assert answer.reason == "stop"


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("moment", ["submit", "result"])
@pytest.mark.parametrize("after", [0, 1, 3, 7])
def test_every_option_goes_on_exactly(window: int, moment: str, after: int) -> None:
    """What the fake workers know of: grammars, stop tokens, least tokens, log-probabilities, several choices, resumed
    ones, shared prefixes; the driver compares all tokens, log-probabilities and starts."""
    driver = Driver(max_in_flight=window, max_num_batched_tokens=12)
    wanted, _ = oracle(make_request("resumed", [1, 2, 3], max_tokens=20), VOCAB)
    driver.ask("plain", [1] * 9, max_tokens=20)
    driver.ask("logprobs", [1] * 9, max_tokens=20, logprobs=0)
    driver.ask("prompt", [2] * 21, max_tokens=10, prompt_logprobs=0)
    driver.ask("grammar", [1, 2], max_tokens=20, structured_outputs=structured(3, 11))
    driver.ask("stop", [4, 5], max_tokens=20, stop_token_ids=tuple(range(8)))
    driver.ask("least", [4, 5], max_tokens=20, min_tokens=9, eos_token_ids=tuple(range(0, VOCAB, 2)))
    driver.ask("resumed", [1, 2, 3], max_tokens=20, output_token_ids=tuple(wanted[:5]))
    for choice in range(2):
        driver.ask(f"n#{choice}", [7] * 9, max_tokens=9, choice=choice)
    for loss in range(2):
        for _ in range(after):
            driver.step()
        if driver.running():
            setattr(driver.executor, f"lose_{moment}", True)
            while driver.engine.status().epoch == loss and driver.running():
                driver.step()
    driver.drain()


# How often


def test_the_wait_before_each_try(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = Restarts.outcome
    monkeypatch.setattr(Restarts, "outcome", lambda restarts, _: outcome(restarts, 30))  # while the fake clock stands
    driver = begun(1)
    times: list[float] = []
    restart = driver.executor.restart

    def noted(epoch: int) -> CacheLayout:
        times.append(driver.clock.now)
        return restart(epoch)

    driver.executor.restart = noted  # type: ignore[method-assign]
    driver.executor.restart_layouts = [WorkerDied(1, "it ended by itself", kind="ended")] * 6
    driver.engine.recover(LOST)
    driver.drain()
    waits = [after - before for before, after in pairwise(times)]
    assert waits == pytest.approx([*BACK_OFF_S[1:], BACK_OFF_S[-1]], abs=0.1)
    status = driver.engine.status()
    assert status.failures == {"killed": 1, "ended": 6}
    (done,) = status.recoveries
    assert (done.epoch, done.cause, done.kind) == (7, "it was killed by SIGKILL", "killed")
    assert done.first_token_s == pytest.approx(sum(BACK_OFF_S) + BACK_OFF_S[-1], abs=0.5)


def test_what_is_not_a_loss_is_tried_again_as_well() -> None:
    driver = begun(1)
    driver.executor.restart_layouts = [RuntimeError("a bug"), EngineDead("no"), OSError("no such file")]
    driver.engine.recover(LOST)
    driver.drain()
    assert driver.engine.status().failures == {"killed": 1}


def test_time_runs_out_even_while_workers_start() -> None:
    driver = begun(2, recovery=RecoveryConfig(recovery_timeout=30.0))
    for answer in driver.running():
        answer.may_end.add("error")
    gate = Gate(driver)
    driver.engine.recover(LOST)
    driver.step()
    driver.clock.advance(31.0)
    driver.drain_dead()
    gate.open()
    assert driver.engine.status().state == "failed"
    driver.engine.close()


def test_with_recovery_off_a_loss_ends_everything() -> None:
    driver = begun(3, recovery=RecoveryConfig(enable_recovery=False))
    for answer in driver.running():
        answer.may_end.add("error")
    driver.executor.lose_result = True
    driver.drain_dead()
    assert driver.executor.restarts == []
    status = driver.engine.status()
    assert (status.state, status.failures, status.recovery) == ("failed", {"killed": 1}, None)


def test_with_recovery_off_an_idle_loss_is_noticed_too() -> None:
    driver = Driver(recovery=RecoveryConfig(enable_recovery=False))
    driver.executor.lose_submit = True
    driver.engine.tick()
    driver.engine.step()
    with pytest.raises(EngineDead):
        driver.engine.step()


# Missing devices


def waiting(**options: float) -> Driver:
    driver = begun(2, recovery=RecoveryConfig(**options))  # type: ignore[arg-type]
    driver.executor.restart_layouts = [MISSING] * 1000
    driver.engine.recover(LOST)
    while not driver.executor.restarts or driver.engine.status().epoch < 3:
        driver.step()
    return driver


def test_while_devices_are_missing_the_accepted_wait_and_new_ones_are_refused() -> None:
    driver = waiting()
    status = driver.engine.status()
    assert status.state == "recovering"
    assert status.recovery is not None
    assert (status.recovery.plan, status.recovery.missing) == ("wait", "one more device of 2 GiB")
    with pytest.raises(Recovering, match="one more device of 2 GiB") as refusal:
        driver.ask("new", [1])
    assert (refusal.value.status, refusal.value.retry_after) == (503, 5.0)
    wanted, _ = oracle(make_request("moved", [1, 2]), VOCAB)
    driver.ask("moved", [1, 2], output_token_ids=tuple(wanted[:3]))  # accepted elsewhere
    begin, tries = driver.clock.now, len(driver.executor.restarts)
    while driver.clock.now - begin < 20:
        driver.step()
    assert len(driver.executor.restarts) - tries == pytest.approx(20 / CAPACITY_S, abs=2)
    driver.executor.restart_layouts = []
    driver.drain()
    (done,) = driver.engine.status().recoveries
    assert (done.plan, done.missing, done.resumed) == ("restart", "", 2)
    driver.ask("new", [1])
    driver.drain()


def test_missing_devices_are_waited_for_only_so_long() -> None:
    driver = waiting(recovery_timeout=60.0)
    for answer in driver.running():
        answer.may_end.add("error")
    begin = driver.clock.now
    outputs = driver.drain_dead()
    assert 50 < driver.clock.now - begin < 65
    assert [output.error.status for output in outputs if output.error is not None] == [503, 503]
    with pytest.raises(EngineDead, match="SIGKILL"):
        driver.engine.step()


def test_a_smaller_layout_is_called_a_split() -> None:
    driver = begun(2)
    driver.executor.ranks = 3
    driver.engine.recover(LOST)
    driver.drain()
    assert driver.engine.status().recoveries[0].plan == "split"


# What comes back


def test_what_has_come_back_is_taken_in_when_idle_and_after_a_while_when_not() -> None:
    driver = Driver()
    driver.executor.returned = "host2 has come back"
    driver.engine.tick()
    driver.executor.returned = None
    driver.drain()
    driver.engine.tick()
    status = driver.engine.status()
    (done,) = status.recoveries
    assert (done.kind, done.cause, status.failures) == ("regained", "host2 has come back", {})
    driver.clock.advance(100)
    driver.ask("a", [1] * 9, max_tokens=30)
    driver.step()
    driver.executor.returned = "host3 has come back"
    driver.clock.advance(2)
    driver.step()
    assert driver.engine.status().epoch == 1
    driver.clock.advance(100)
    driver.step()
    driver.executor.returned = None
    assert driver.engine.status().epoch == 2
    driver.drain()


# A second loss


def test_losses_on_the_way_belong_to_one_recovery() -> None:
    driver = begun(3)
    driver.executor.restart_layouts = [WorkerDied(0, "it was killed by SIGKILL", kind="killed")]
    driver.engine.recover(LOST)
    while driver.engine.status().epoch < 2:
        driver.step()
    driver.engine.recover(WorkerDied(2, "no sign of life", kind="hung"))
    driver.engine.recover(WorkerDied(0, "it was killed by SIGSEGV", kind="killed"))
    driver.drain()
    status = driver.engine.status()
    (done,) = status.recoveries
    assert status.failures == {"killed": 3, "hung": 1}
    assert (done.rank, done.resumed, done.epoch) == (1, 3, driver.executor.restarts[-1])


def test_the_first_loss_stays_the_cause_and_why_the_latest_try_failed_is_said_too() -> None:
    driver = begun(3)
    driver.executor.restart_layouts = [WorkerDied(0, "it could not start", node="host1", kind="failed")]
    driver.engine.recover(LOST)
    first = driver.engine.status()
    assert first.recovery is not None and first.recovery.last_try == ""

    def told(last_try: str) -> None:
        status = driver.engine.status()
        assert (status.state, status.cause, status.since) == ("recovering", first.cause, first.since)
        now, then = status.recovery, first.recovery
        assert now is not None and then is not None
        assert (now.rank, now.node, now.kind, now.cause) == (1, "host2", "killed", "it was killed by SIGKILL")
        assert (now.since, now.detection_s, now.estimate) == (then.since, 0.02, then.estimate)
        assert (now.last_try, now.reload_s) == (last_try, None)

    while driver.engine.status().epoch < 2:
        driver.step()
    told("rank 0: it could not start")
    driver.executor.lose_submit = True  # once workers are ready again, and no token has come yet
    while driver.engine.status().epoch < 3:
        driver.step()
    told("rank 0: lost at submit")
    driver.executor.restart_layouts = [MISSING]
    while driver.engine.status().epoch < 4:
        driver.step()
    current = driver.engine.status().recovery
    assert current is not None and (current.missing, current.last_try) == ("one more device of 2 GiB", "")
    driver.drain()
    (done,) = driver.engine.status().recoveries
    assert (done.rank, done.cause, done.since) == (1, "it was killed by SIGKILL", first.recovery.since)


def test_a_loss_while_something_is_taken_in_is_the_first_one() -> None:
    driver = Driver()
    driver.executor.returned = "host2 has come back"
    driver.engine.tick()
    driver.executor.returned = None
    driver.engine.recover(LOST)
    status = driver.engine.status()
    assert status.recovery is not None and (status.recovery.kind, status.recovery.rank) == ("killed", 1)
    assert status.cause == "Rank 1 on host2 was lost: it was killed by SIGKILL"
    driver.drain()


def test_failures_down_to_the_last_device() -> None:
    driver = begun(3, blocks=48)
    for ranks, blocks in ((3, 32), (2, 16), (1, 12)):
        driver.executor.ranks = ranks
        driver.executor.restart_layouts = [CacheLayout(blocks, 4, 1, VOCAB)]
        driver.executor.lose_result = True
        while driver.engine.status().blocks != blocks or driver.engine.status().state != "ready":
            driver.step()  # the next one is lost as soon as there is a token
    driver.drain()
    assert [done.plan for done in driver.engine.status().recoveries] == ["split"] * 3


def test_a_restart_that_ends_after_another_loss_is_not_believed() -> None:
    driver = begun(2)
    gate = Gate(driver)
    driver.engine.recover(LOST)
    assert gate.entered.wait(10)
    driver.engine.recover(WorkerDied(0, "a bug in a step"))
    gate.open()
    driver.drain()
    assert driver.executor.restarts == [1, 2]


def test_workers_that_are_lost_for_no_fault_of_a_request_refuse_nobody() -> None:
    driver = begun(3)
    for _ in range(2):  # at two losses in a row all are at work
        driver.executor.lose_result = True
        while driver.executor.lose_result:
            driver.step()
    assert len(driver.engine._quarantine.suspects) == 3
    driver.drain()


# What is said


def test_what_status_and_log_say(caplog: pytest.LogCaptureFixture) -> None:
    driver = begun(4)
    computed = sum(request.num_computed for request in driver.scheduler.running)
    assert computed
    begin = time.time()
    gate = Gate(driver)
    driver.engine.recover(LOST)
    status = driver.engine.status()
    assert (status.state, status.cause) == ("recovering", "Rank 1 on host2 was lost: it was killed by SIGKILL")
    current = status.recovery
    assert current is not None
    assert (current.rank, current.node, current.kind, current.plan, current.epoch) == (
        1,
        "host2",
        "killed",
        "restart",
        1,
    )
    assert begin <= current.since <= time.time()
    assert (current.detection_s, current.reload_s, current.first_token_s) == (0.02, None, None)
    driver.clock.advance(0.5)
    gate.open()
    driver.drain()
    status = driver.engine.status()
    (done,) = status.recoveries
    assert status.recovery is None
    assert (done.resumed, done.recomputed) == (4, computed)
    assert done.reload_s is not None
    assert done.first_token_s is not None
    assert 0.5 <= done.reload_s <= done.first_token_s < 0.7
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert lines == [
        "Rank 1 on host2 was lost: it was killed by SIGKILL (noticed after 0.02 s). Recovering: 4 requests wait.",
        f"Recovered in 0.5 s: rank 1 was started again in 0.5 s, next token after 0.5 s; 4 requests go on, {computed} "
        "tokens were computed again.",
    ]
    assert status.cause == lines[1].rstrip(".")


def test_the_estimate_is_what_earlier_ones_took_and_only_the_latest_are_kept() -> None:
    driver = Driver(load_s=7.0)
    driver.ask("a", [1, 2], max_tokens=46)
    for number in range(KEPT + 2):
        driver.engine.recover(LOST)
        current = driver.engine.status().recovery
        assert current is not None
        assert current.estimate == pytest.approx(7.0 if not number else 0.01, abs=0.05)
        until(driver, "ready")
        driver.step()
    assert [done.epoch for done in driver.engine.status().recoveries] == list(range(3, KEPT + 3))
    driver.drain()


def test_a_change_of_state_is_announced_at_once() -> None:
    driver = begun(1)
    driver.engine.changed.clear()
    driver.engine.recover(LOST)
    assert driver.engine.changed.is_set()
    driver.engine.changed.clear()
    driver.drain()
    assert driver.engine.changed.is_set()


# Fault points


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Where the engine has been, in order."""
    reached: list[str] = []

    def reach(at: str, **where: int) -> None:
        reached.append(f"{at} {where['step']}")

    monkeypatch.setattr(fault_point, "reach", reach)
    return reached


def test_the_fault_points_lie_before_and_after_the_commit_and_before_a_restart(faults: list[str]) -> None:
    driver = Driver()
    driver.ask("a", [1, 2], max_tokens=3)
    applied: list[str] = []
    apply = driver.scheduler.apply
    driver.scheduler.apply = lambda result, now: (faults.append("apply"), apply(result, now))[1]  # type: ignore
    driver.step()
    driver.engine.recover(LOST)
    driver.drain()
    assert faults[:4] == ["before_commit 1", "apply", "after_commit 1", "recover 1"]
    assert applied == []


def test_a_fault_before_a_restart_is_a_failed_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_point, "_faults", fault_point.parse("at=recover,do=raise,step=4"))
    driver = begun(2)
    for answer in driver.running():
        answer.may_end.add("error")
    driver.engine.recover(LOST)
    driver.drain_dead()
    assert driver.engine.status().epoch == MAX_TRIES + 1
    assert driver.executor.restarts == []


def test_what_only_another_engine_process_can_mend_is_not_tried_again() -> None:
    driver = begun(2)
    for answer in driver.running():
        answer.may_end.add("error")
    driver.executor.restart_layouts = [ExecutorLost(0, "the local Ray cluster has ended", kind="ended")]
    driver.engine.recover(LOST)
    driver.drain_dead()
    assert len(driver.executor.restarts) == 1


def test_close_ends_the_thread_that_starts_workers() -> None:
    driver = begun(1)
    gate = Gate(driver)
    driver.engine.recover(LOST)
    assert gate.entered.wait(10)
    gate.open()
    driver.engine.close()
    assert not [thread for thread in threading.enumerate() if thread is driver.engine._restarts._thread]

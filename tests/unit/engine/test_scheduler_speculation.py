"""Proposed tokens in the scheduler: within its budget and its blocks, and without a trace in what is answered. The fake
executor checks every plan, and each answer is compared with the oracle."""

from __future__ import annotations

import random

import pytest

from phalanx.executor.base import WorkerDied
from phalanx.step import StepPlan, StepResult, pack, unpack
from tests.helpers.engine_driver import Driver
from tests.helpers.fake_grammar import structured


def driver_with(proposed: int = 4, **options: object) -> Driver:
    driver = Driver(proposed=proposed, **options)  # type: ignore[arg-type]
    driver.executor.keep_plans = True
    return driver


def sizes(plan: StepPlan) -> tuple[int, int]:
    """Tokens of the requests' own, and proposed ones."""
    return sum(unpack(plan.rows.num_tokens, "H")), len(plan.rows.proposed) // 4


def test_right_proposals_save_steps() -> None:
    driver = driver_with()
    driver.ask("a", [1, 2, 3], max_tokens=21)
    driver.drain()
    assert [sizes(plan) for plan in driver.executor.plans] == [(3, 0), *[(1, 4)] * 4]
    counts = driver.scheduler.counters.speculation
    assert (counts.drafts, counts.draft_tokens, counts.accepted_tokens) == (4, 16, 16)
    assert counts.accepted_at == [4, 4, 4, 4]


def test_wrong_proposals_change_nothing_but_the_work() -> None:
    driver = driver_with(guess=lambda: False)
    driver.ask("a", [1, 2, 3], max_tokens=21)
    driver.drain()
    assert len(driver.executor.plans) == 21
    assert driver.scheduler.counters.speculation.accepted_at == [0] * 4
    assert driver.scheduler.counters.speculation.draft_tokens > 60


def test_the_option_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = driver_with()
    driver.ask("a", [1, 2, 3], max_tokens=21)

    def read(given: object) -> None:
        raise AssertionError("it is read in a step")

    monkeypatch.setattr("phalanx.config.read_speculative_config", read)
    driver.drain()
    assert len(driver.executor.plans) == 5


def test_nothing_is_proposed_beyond_the_last_token() -> None:
    driver = driver_with(proposed=9)
    driver.ask("a", [1, 2, 3], max_tokens=4)
    driver.ask("b", list(range(40)), max_tokens=30)  # max_model_len is 48
    driver.ask("c", [5], max_tokens=1)
    driver.drain()
    assert max(sizes(plan)[1] for plan in driver.executor.plans) <= 2 + 6


def test_the_budget_counts_proposals_and_keeps_a_token_for_each_request() -> None:
    driver = driver_with(proposed=8, max_num_batched_tokens=10, max_num_seqs=6)
    for name in "abcdef":
        driver.ask(name, [ord(name)] * 2, max_tokens=30)
    while len(driver.running()) == 6:
        before = {name: len(answer.tokens) for name, answer in driver.answers.items()}
        driver.step()
        rows = len(driver.executor.plans[-1].rows.slots) // 2
        if rows == 6 and not driver.executor.plans[-1].admissions:
            assert all(len(answer.tokens) > before[name] for name, answer in driver.answers.items())
    driver.drain()
    assert max(sum(sizes(plan)) for plan in driver.executor.plans) == 10
    assert driver.scheduler.counters.speculation.draft_tokens > 50


def test_no_more_is_sampled_than_there_is_memory_for() -> None:
    driver = driver_with(proposed=3, max_num_seqs=4, max_num_batched_tokens=64)
    for number in range(9):
        driver.ask(str(number), [number], max_tokens=25)
    driver.drain()
    full = [plan for plan in driver.executor.plans if len(plan.rows.slots) == 2 * 4]
    assert max(sizes(plan)[1] for plan in full) == 3
    assert driver.scheduler.counters.speculation.accepted_tokens > 30


def test_proposals_take_no_block_that_somebody_needs() -> None:
    """Two requests that fill the pool to its last block: without proposals nobody is preempted, and so with them."""
    driver = driver_with(proposed=9, blocks=16, block_size=4, max_num_seqs=2, guess=lambda: False)
    driver.ask("a", [1] * 3, max_tokens=30)
    driver.ask("b", [2] * 3, max_tokens=30)
    driver.drain()
    assert driver.scheduler.counters.preemptions == 0
    assert driver.scheduler.counters.speculation.draft_tokens > 50


def test_blocks_of_refused_tokens_are_used_by_those_that_come() -> None:
    driver = driver_with(proposed=9, guess=lambda: False)
    driver.ask("a", [1, 2, 3], max_tokens=40)
    driver.drain()
    told = sum(len(plan.rows.new_blocks) // 4 for plan in driver.executor.plans)
    told += sum(len(admission.blocks) // 4 for plan in driver.executor.plans for admission in plan.admissions)
    assert told == driver.scheduler.pool.blocks_for(3 + 40 - 1)


def test_preemption_resumes_with_what_was_accepted() -> None:
    rng = random.Random(5)
    driver = driver_with(blocks=12, max_num_seqs=4, guess=lambda: rng.random() < 0.8)
    for name in "abcd":
        driver.ask(name, [ord(name)] * 6, max_tokens=35)
    driver.drain()
    assert driver.scheduler.counters.preemptions > 0
    assert driver.scheduler.counters.speculation.accepted_tokens > 40


def test_blocks_of_accepted_tokens_are_found_by_their_prefix() -> None:
    driver = driver_with()
    answer = driver.ask("a", [1, 2, 3], max_tokens=30)
    driver.drain()
    computed = driver.executor.computed_tokens
    again = driver.ask("b", [1, 2, 3, *answer.tokens], max_tokens=1)
    driver.drain()
    assert again.output is not None and again.output.num_cached_tokens == 32
    assert driver.executor.computed_tokens == computed + 1


def test_an_answer_ends_at_its_stop_token_within_a_chain() -> None:
    plain = Driver()
    wanted = plain.ask("a", [1, 2, 3], max_tokens=20).wanted
    plain.drain()
    for end in range(1, 12):
        driver = driver_with(proposed=9)
        first = wanted.index(wanted[end]) + 1
        driver.ask("eos", [1, 2, 3], max_tokens=20, eos_token_ids=(wanted[end],))
        driver.ask("stop", [1, 2, 3], max_tokens=20, stop_token_ids=(wanted[end],))
        late = driver.ask("late", [1, 2, 3], max_tokens=20, eos_token_ids=(wanted[end],), min_tokens=15)
        assert len(driver.answers["eos"].wanted) == len(driver.answers["stop"].wanted) == first
        assert len(late.wanted) > 15 or len(late.wanted) == 20
        driver.drain()


@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
def test_grammars_and_log_probabilities(right: float) -> None:
    rng = random.Random(8)
    driver = driver_with(proposed=5, guess=lambda: rng.random() < right)
    for seed in range(7):
        driver.ask(f"grammar{seed}", [seed] * 3, max_tokens=30, structured_outputs=structured(seed, 12 + seed))
        driver.ask(f"logprobs{seed}", [seed] * 3, max_tokens=30, logprobs=0, prompt_logprobs=0)
    driver.drain()
    masked = [plan for plan in driver.executor.plans if plan.mask_rows and plan.rows.proposed_rows]
    rows = [len(unpack(plan.mask_rows, "H")) for plan in masked]
    assert (max(rows) > 8) == (right > 0.5)  # a wrong token is mostly one that the grammar does not allow either


@pytest.mark.parametrize("plans", [2, 3])
def test_with_plans_in_flight(plans: int) -> None:
    rng = random.Random(plans)
    driver = driver_with(max_in_flight=plans, guess=lambda: rng.random() < 0.8)
    for number in range(12):
        driver.ask(str(number), [number] * 5, max_tokens=30)
    driver.drain()
    assert driver.scheduler.counters.speculation.accepted_tokens > 60


def test_a_loss_goes_on_after_what_was_committed() -> None:
    driver = driver_with()
    driver.ask("a", [1, 2, 3], max_tokens=30)
    for _ in range(3):
        driver.step()
    assert len(driver.answers["a"].tokens) == 1 + 2 * 5
    driver.executor.lose_result = True
    driver.drain()


def test_an_aborted_request_gives_everything_back() -> None:
    driver = driver_with(max_in_flight=2)
    driver.ask("a", [1, 2, 3], max_tokens=30)
    driver.ask("b", [1, 2, 4], max_tokens=30)
    for _ in range(4):
        driver.step()
    driver.abort("a")
    driver.drain()


@pytest.mark.parametrize("tokens", [(1, 2), (1, 2, 3, 4, 5, 6)])
def test_workers_that_answer_more_than_was_proposed_are_not_trusted(tokens: tuple[int, ...]) -> None:
    driver = driver_with(guess=lambda: False)
    driver.ask("a", [1, 2, 3], max_tokens=30)
    driver.step()
    plan = driver.scheduler.schedule(driver.clock())
    assert plan is not None and plan.rows.proposed
    slots = pack([unpack(plan.rows.slots, "H")[0]] * len(tokens), "H")
    with pytest.raises(WorkerDied, match="does not fit the plan"):
        driver.scheduler.apply(StepResult(plan.epoch, plan.step_id, slots, pack(tokens)), driver.clock())
    driver.engine.recover(WorkerDied(0, "as said"))
    driver.drain()

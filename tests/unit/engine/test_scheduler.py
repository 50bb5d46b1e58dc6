"""Who runs when: budget, chunks, order, sharing of prefixes, preemption, slots. On the fake executor, which checks
every plan, and with each answer compared with the oracle."""

from __future__ import annotations

import pytest

from phalanx.errors import InvalidRequest, QueueFull
from phalanx.executor.base import WorkerDied
from phalanx.step import NO_TOKEN, StepPlan, StepResult, pack, unpack
from tests.helpers.engine_driver import Driver, make_request


def driver_with(**options: int | bool) -> Driver:
    driver = Driver(**options)  # type: ignore[arg-type]
    driver.executor.keep_plans = True
    return driver


def counts(plan: StepPlan) -> dict[int, int]:
    return dict(zip(unpack(plan.rows.slots, "H"), unpack(plan.rows.num_tokens, "H"), strict=True))


# Budget and chunks


def test_a_long_prompt_is_computed_in_chunks_and_samples_once_at_its_end() -> None:
    driver = driver_with(max_num_batched_tokens=10)
    driver.ask("a", list(range(25)), max_tokens=2)
    driver.drain()
    assert [list(counts(plan).values()) for plan in driver.executor.plans] == [[10], [10], [5], [1]]


@pytest.mark.parametrize("long_first", [True, False])
def test_a_long_prompt_does_not_stall_running_answers(long_first: bool) -> None:
    driver = driver_with(max_num_batched_tokens=8, max_num_seqs=4, prefix_caching=False)
    long = make_request("long", list(range(40)), max_tokens=1, priority=-1 if long_first else 0)
    for name in "abc":
        driver.ask(name, [1, 2], max_tokens=30)
    driver.step()
    driver.add(long)
    while driver.answers["long"].reason is None:
        before = {name: len(driver.answers[name].tokens) for name in "abc"}
        driver.step()
        assert all(len(driver.answers[name].tokens) == before[name] + 1 for name in "abc")
    driver.drain()


def test_a_row_never_takes_more_tokens_than_the_wire_can_say() -> None:
    driver = driver_with(blocks=20_000, max_num_batched_tokens=10**6, max_model_len=10**5)
    driver.ask("a", [1] * 70_000, max_tokens=1)
    driver.drain()
    assert [list(counts(plan).values()) for plan in driver.executor.plans] == [[65535], [70_000 - 65535]]


def test_no_more_requests_run_than_there_are_slots() -> None:
    driver = driver_with(max_num_seqs=3)
    for number in range(10):
        driver.ask(str(number), [number], max_tokens=3)
    driver.drain()
    assert max(len(counts(plan)) for plan in driver.executor.plans) == 3


def test_a_step_without_work_makes_no_plan() -> None:
    driver = driver_with()
    driver.ask("a", [1], max_tokens=1)
    driver.drain()
    assert driver.scheduler.schedule(0.0) is None
    assert len(driver.executor.plans) == 1


# Order


def test_equal_priorities_start_in_order_of_arrival() -> None:
    driver = driver_with(max_num_seqs=2)
    started: list[str] = []
    for number in range(8):
        driver.ask(str(number), [number, number], max_tokens=3)
    while driver.engine.has_work:
        for output in driver.step():
            if output.token_ids and output.request_id not in started:
                started.append(output.request_id)
    assert started == [str(number) for number in range(8)]


def test_lower_priority_numbers_start_first() -> None:
    driver = driver_with(max_num_seqs=1)
    for name, priority in (("low", 5), ("middle", 0), ("high", -5)):
        driver.ask(name, [1, 2, 3], priority=priority, max_tokens=1)
    ended = []
    while driver.engine.has_work:
        ended += [output.request_id for output in driver.step() if output.finish_reason]
    assert ended == ["high", "middle", "low"]


def test_a_small_request_does_not_overtake_one_that_waits_for_memory() -> None:
    driver = driver_with(blocks=10, block_size=4)
    driver.ask("first", [1] * 20, max_tokens=12)  # 5 blocks and growing
    driver.step()
    driver.ask("large", [2] * 24, max_tokens=1)  # 6 blocks: must wait
    driver.ask("small", [3], max_tokens=1)
    while driver.answers["first"].reason is None:
        assert not driver.answers["small"].tokens
        driver.step()
    driver.drain()


# Prefixes


def test_a_second_request_computes_only_what_the_first_did_not() -> None:
    driver = driver_with()
    driver.ask("a", list(range(18)), max_tokens=1)
    driver.drain()
    answer = driver.ask("b", [*range(16), 50, 51], max_tokens=1)
    driver.drain()
    assert driver.executor.computed_tokens == 18 + 2
    assert answer.output is not None
    assert answer.output.num_cached_tokens == 16


def test_a_hit_leaves_at_least_one_token_to_compute() -> None:
    driver = driver_with()
    for name in "ab":
        driver.ask(name, list(range(16)), max_tokens=1)
        driver.drain()
    assert driver.executor.computed_tokens == 16 + 4


def test_the_answer_is_found_too_when_a_conversation_goes_on() -> None:
    driver = driver_with()
    first = driver.ask("a", list(range(8)), max_tokens=9)
    driver.drain()
    driver.ask("b", [*range(8), *first.tokens, 1], max_tokens=1)
    driver.drain()
    assert driver.executor.computed_tokens == 8 + 8 + 2


def test_equal_prompts_at_once_are_computed_once() -> None:
    driver = driver_with(max_num_batched_tokens=10)
    for number in range(6):
        driver.ask(f"r#{number}", list(range(22)), max_tokens=1)
    driver.drain()
    assert driver.executor.computed_tokens == 22 + 5 * 2


def test_others_do_not_wait_behind_one_that_waits_for_a_prefix() -> None:
    driver = driver_with(max_num_batched_tokens=50)
    for name, prompt in (("a", list(range(40))), ("twin", list(range(40))), ("other", [7])):
        driver.ask(name, prompt, max_tokens=3)
    driver.step()
    assert [len(driver.answers[name].tokens) for name in ("a", "twin", "other")] == [1, 0, 1]
    driver.step()
    assert len(driver.answers["twin"].tokens) == 1
    driver.drain()


@pytest.mark.parametrize("how", ["abort", "fail", "lose"])
def test_whoever_waits_for_a_prefix_goes_on_when_it_never_comes(how: str) -> None:
    driver = driver_with(max_num_batched_tokens=10)
    driver.ask("a", list(range(40)), max_tokens=1)
    driver.ask("twin", list(range(40)), max_tokens=1)
    driver.step()
    if how == "abort":
        driver.abort("a")
    elif how == "fail":
        driver.answers["a"].may_end.add("error")
        driver.executor.fail_row = lambda slot, step_id: step_id == 2
    else:
        driver.executor.lose_result = True
    driver.drain()


def test_salts_share_nothing() -> None:
    driver = driver_with()
    for salt in ("", "a", "b"):
        driver.ask(f"r{salt}", list(range(16)), max_tokens=1, cache_salt=salt)
        driver.drain()
    assert driver.executor.computed_tokens == 3 * 16
    assert driver.scheduler.counters.prefix_hits == 0


def test_prompt_logprobs_skip_the_cache_and_come_complete() -> None:
    driver = driver_with(max_num_batched_tokens=7)
    driver.ask("a", list(range(20)), max_tokens=1)
    driver.drain()
    driver.ask("b", list(range(20)), max_tokens=3, prompt_logprobs=0)
    driver.drain()  # the driver compares them
    assert driver.executor.computed_tokens == 20 + 20 + 2


def test_no_caching_when_it_is_off() -> None:
    driver = driver_with(prefix_caching=False)
    for name in "ab":
        driver.ask(name, list(range(20)), max_tokens=1)
    driver.drain()
    assert driver.executor.computed_tokens == 40
    assert driver.scheduler.counters.prefix_queries == 0


# Preemption


def test_the_last_one_is_preempted_and_resumes_with_the_same_tokens() -> None:
    driver = driver_with(blocks=8, block_size=4, prefix_caching=False)
    for name in "ab":
        driver.ask(name, [ord(name) % 60] * 9, max_tokens=20)
    ended = []
    while driver.engine.has_work:
        ended += [output.request_id for output in driver.step() if output.finish_reason]
    assert ended == ["a", "b"]
    assert driver.scheduler.counters.preemptions >= 1


def test_a_lower_priority_is_preempted_before_a_later_arrival() -> None:
    driver = driver_with(blocks=8, block_size=4, prefix_caching=False)
    driver.ask("low", [1] * 9, max_tokens=20, priority=1)
    driver.step()
    driver.ask("high", [2] * 9, max_tokens=20)
    ended = []
    while driver.engine.has_work:
        ended += [output.request_id for output in driver.step() if output.finish_reason]
    assert ended == ["high", "low"]


def test_a_preempted_request_goes_before_new_ones() -> None:
    driver = driver_with(blocks=8, block_size=4, prefix_caching=False)
    for name in "ab":
        driver.ask(name, [ord(name) % 60] * 9, max_tokens=20)
    while not driver.scheduler.counters.preemptions:
        driver.step()
    assert [(request.request_id, request.resumed) for request in driver.scheduler.queue] == [("b", True)]
    driver.ask("new", [3], max_tokens=1)
    ended = []
    while driver.engine.has_work:
        ended += [output.request_id for output in driver.step() if output.finish_reason]
    assert ended[0] == "a"
    assert [request.request_id for request in driver.scheduler.queue] == []


def test_an_admission_leaves_a_free_block_for_each_running_request() -> None:
    driver = driver_with(blocks=10, block_size=4, prefix_caching=False)
    for name, length in (("a", 5), ("b", 5)):
        driver.ask(name, [1] * length, max_tokens=8)
    driver.step()
    driver.ask("c", [2] * 20, max_tokens=1)  # 5 blocks, of 6 that are free
    driver.step()
    assert not driver.answers["c"].tokens
    driver.drain()
    assert driver.scheduler.counters.preemptions == 0


def test_prompt_logprobs_come_once_even_when_preempted_in_the_prompt() -> None:
    driver = driver_with(blocks=8, block_size=4, max_num_batched_tokens=3, prefix_caching=False)
    driver.ask("a", [1] * 4, max_tokens=20)
    driver.ask("b", list(range(14)), max_tokens=2, prompt_logprobs=0, priority=1)
    driver.drain()


def test_blocks_of_a_failed_row_are_not_shared() -> None:
    """What made its scores unusable may be in any block that it computed."""
    driver = driver_with(max_num_batched_tokens=4, block_size=4)
    driver.ask("before", list(range(4, 9)), max_tokens=1)
    driver.drain()
    driver.executor.fail_row = lambda slot, step_id: step_id == 5
    bad = driver.ask("a", list(range(4, 18)), max_tokens=4)
    bad.may_end.add("error")
    driver.drain()
    assert bad.reason == "error"
    good = driver.ask("b", list(range(4, 18)), max_tokens=1)
    driver.drain()
    assert good.reason == "length"
    assert good.output is not None
    assert good.output.num_cached_tokens == 4  # what another had computed, and only that


def test_what_can_never_fit_is_refused() -> None:
    driver = driver_with(blocks=4, block_size=4, max_model_len=100)
    with pytest.raises(InvalidRequest, match="KV cache holds 16"):
        driver.ask("a", [1] * 10, max_tokens=8)
    driver.ask("b", [1] * 10, max_tokens=7)  # 17 tokens, the last of which is never computed
    driver.drain()


# Slots and the wire


def test_released_slots_travel_with_the_next_plan() -> None:
    driver = driver_with(max_num_seqs=2)
    driver.ask("a", [1], max_tokens=1)
    driver.drain()
    driver.ask("b", [2], max_tokens=1)
    driver.drain()
    first, second = driver.executor.plans
    assert list(unpack(second.released, "H")) == [first.admissions[0].slot] == [second.admissions[0].slot]


def test_continuing_rows_are_told_their_last_token_only() -> None:
    driver = driver_with(max_num_batched_tokens=6)
    answer = driver.ask("a", list(range(8)), max_tokens=3)
    driver.drain()
    assert [unpack(plan.rows.last_tokens)[0] for plan in driver.executor.plans] == [
        NO_TOKEN,
        NO_TOKEN,
        *answer.tokens[:2],
    ]
    assert [len(plan.admissions) for plan in driver.executor.plans] == [1, 0, 0, 0]


def test_a_step_of_256_running_answers_is_at_most_3_kb() -> None:
    driver = driver_with(
        blocks=256 * 16,
        block_size=16,
        max_num_seqs=256,
        max_num_batched_tokens=4096,
        max_model_len=256,
        prefix_caching=False,
    )
    for number in range(256):
        driver.ask(str(number), [number % 64, number // 64] + [5] * (number % 16), max_tokens=48)
    for _ in range(4):
        driver.step()
    driver.executor.plan_bytes.clear()
    for _ in range(32):
        driver.step()
    assert all(len(counts(plan)) == 256 for plan in driver.executor.plans[-32:])
    assert max(driver.executor.plan_bytes) <= 3 * 1024
    driver.abort(*driver.answers)
    driver.drain()


# Several plans in flight


@pytest.mark.parametrize("window", [2, 3])
def test_plans_in_flight_hold_different_requests_and_share_the_work(window: int) -> None:
    driver = driver_with(max_in_flight=window, max_num_seqs=6)
    for number in range(6):
        driver.ask(str(number), [number] * 3, max_tokens=12)
    for _ in range(6):
        driver.step()
    latest = [set(counts(plan)) for plan in driver.executor.plans[-window:]]
    assert sum(map(len, latest)) == len(set.union(*latest)) == 6
    assert max(map(len, latest)) == 6 // window
    driver.drain()


def test_an_aborted_request_in_flight_keeps_its_blocks_until_its_result_is_back() -> None:
    driver = driver_with(max_in_flight=2, max_num_seqs=2)
    for name in "ab":
        driver.ask(name, [ord(name) % 60] * 4, max_tokens=30)
    for _ in range(3):
        driver.step()
    (flying,) = [request for request in driver.scheduler.running if request.in_flight]
    blocks = len(flying.blocks)
    free = driver.scheduler.pool.num_free
    driver.abort(flying.request_id)
    assert driver.scheduler.pool.num_free == free
    assert flying.request_id not in driver.scheduler.requests
    driver.step()
    driver.step()
    assert driver.scheduler.pool.num_free >= free + blocks - 1
    driver.drain()


@pytest.mark.parametrize(("window", "piece"), [(1, 2048), (2, 256), (3, 256)])
def test_prompts_are_computed_in_pieces_that_keep_every_stage_at_work(window: int, piece: int) -> None:
    driver = driver_with(
        max_in_flight=window, max_num_batched_tokens=2048, max_num_seqs=16, blocks=1000, max_model_len=400,
        prefix_caching=False,
    )  # fmt: skip
    for number in range(16):
        driver.ask(str(number), [number] * 300, max_tokens=3)
    driver.drain()
    assert piece <= max(sum(counts(plan).values()) for plan in driver.executor.plans) <= piece + 8


@pytest.mark.parametrize("window", [2, 3])
def test_a_long_prompt_is_in_all_plans_in_flight(window: int) -> None:
    driver = driver_with(max_in_flight=window, max_num_batched_tokens=10)
    answer = driver.ask("a", list(range(35)), max_tokens=2, prompt_logprobs=0)
    driver.step()
    assert [list(counts(plan).values()) for plan in driver.executor.plans] == [[10]] * window
    assert driver.scheduler.running[0].in_flight == 10 * (window - 1)
    while not answer.tokens:
        driver.step()
    assert [list(counts(plan).values()) for plan in driver.executor.plans[:4]] == [[10], [10], [10], [5]]
    driver.drain()


def test_an_aborted_request_in_several_plans_keeps_its_blocks_until_the_last_result_is_back() -> None:
    driver = driver_with(max_in_flight=3, max_num_batched_tokens=10)
    driver.ask("a", list(range(35)), max_tokens=2)
    driver.step()
    free = driver.scheduler.pool.num_free
    driver.abort("a")
    driver.step()
    assert driver.scheduler.pool.num_free == free
    driver.step()
    assert driver.scheduler.pool.num_free == driver.scheduler.pool.blocks
    driver.drain()


def test_a_request_that_fails_in_one_of_several_plans_ends_once() -> None:
    driver = driver_with(max_in_flight=3, max_num_batched_tokens=10)
    driver.executor.fail_row = lambda slot, step_id: step_id == 2
    driver.ask("a", list(range(35)), max_tokens=2).may_end.add("error")
    driver.drain()
    assert len(driver.executor.plans) == 4


# Results that answer something else


def scheduled() -> tuple[Driver, StepPlan]:
    driver = driver_with()
    driver.ask("a", [1, 2], max_tokens=5)
    plan = driver.scheduler.schedule(0.0)
    assert plan is not None
    return driver, plan


@pytest.mark.parametrize(
    "answer",
    [
        StepResult(epoch=1, step_id=1, slots=pack([0], "H"), tokens=pack([5])),
        StepResult(epoch=0, step_id=2, slots=pack([0], "H"), tokens=pack([5])),
        StepResult(epoch=0, step_id=1),
        StepResult(epoch=0, step_id=1, slots=pack([1], "H"), tokens=pack([5])),
        StepResult(epoch=0, step_id=1, slots=pack([0, 0], "H"), tokens=pack([5, 6])),
        StepResult(epoch=0, step_id=1, slots=pack([0], "H"), tokens=pack([5, 6])),
    ],
    ids=["epoch", "step", "no token", "foreign slot", "twice", "not parallel"],
)
def test_a_result_that_does_not_answer_the_plan_is_refused(answer: StepResult) -> None:
    driver, plan = scheduled()
    assert (plan.epoch, plan.step_id) == (0, 1)
    assert list(unpack(plan.rows.slots, "H")) == [0]
    with pytest.raises(WorkerDied):
        driver.scheduler.apply(answer, 0.0)


def test_a_result_nobody_asked_for_is_refused() -> None:
    with pytest.raises(WorkerDied):
        driver_with().scheduler.apply(StepResult(epoch=0, step_id=1), 0.0)


@pytest.mark.parametrize("token", [-1, 64])
def test_a_token_outside_the_vocabulary_ends_its_request(token: int) -> None:
    driver, _ = scheduled()
    outputs = driver.scheduler.apply(StepResult(epoch=0, step_id=1, slots=pack([0], "H"), tokens=pack([token])), 0.0)
    assert [output.finish_reason for output in outputs] == [None, "error"]
    driver.scheduler.check_invariants()
    assert not driver.scheduler.running


# The bound


def test_a_full_queue_refuses_new_requests_but_never_one_that_has_run() -> None:
    driver = driver_with(max_num_seqs=1, max_num_queued_reqs=2)
    for name in "abc":  # one will run, two may wait
        driver.ask(name, [1, 2, 3])
    with pytest.raises(QueueFull) as refused:
        driver.ask("d", [1, 2, 3])
    assert refused.value.retry_after == 1.0
    first = make_request("e", [4, 5])
    tokens = tuple(driver_with().ask("x", [4, 5]).wanted[:2])
    driver.ask("e", first.prompt_token_ids, output_token_ids=tokens)
    driver.drain()

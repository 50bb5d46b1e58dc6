"""The step as a whole: outputs, endings, grammars, recovery, and what happens when something breaks."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from phalanx.config import CacheConfig, EngineConfig, ModelConfig, RecoveryConfig, SchedulerConfig
from phalanx.engine.engine import Engine
from phalanx.engine.recovery import BACK_OFF_S, MAX_TRIES
from phalanx.errors import ContextLengthExceeded, EngineDead, InvalidRequest, QueueFull, Recovering
from phalanx.executor.base import CacheLayout, WorkerDied
from phalanx.sampling_params import StructuredOutputs
from tests.helpers.engine_driver import VOCAB, Driver, make_request
from tests.helpers.fake_executor import FakeExecutor, oracle
from tests.helpers.fake_grammar import FakeGrammar, compile_fake, structured


def engine_with(compile_grammar: object = compile_fake, **options: int) -> Engine:
    layout = CacheLayout(32, 4, 1, VOCAB)
    return Engine(
        EngineConfig(
            model=ModelConfig(max_model_len=48),
            cache=CacheConfig(block_size=4),
            scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_num_queued_reqs=2),
        ),
        FakeExecutor(layout, max_num_seqs=4, max_num_batched_tokens=16),
        layout,
        compile_grammar=compile_grammar,  # type: ignore[arg-type]
        debug=True,
    )


def run(engine: Engine, steps: int = 200) -> dict[str, list[str | None]]:
    """Step until there is nothing to do; the finish reasons of each request's outputs."""
    reasons: dict[str, list[str | None]] = {}
    for _ in range(steps):
        if not engine.has_work:
            return reasons
        for output in engine.step():
            reasons.setdefault(output.request_id, []).append(output.finish_reason)
    raise AssertionError("the engine does not come to an end")


# Outputs


def test_the_first_output_says_that_the_request_is_in_the_queue() -> None:
    driver = Driver(max_num_seqs=1)
    for name in "ab":
        driver.ask(name, [1, 2])
    outputs = driver.step()
    assert [(output.request_id, output.token_ids) for output in outputs[:2]] == [("a", []), ("b", [])]
    assert len(outputs) == 3
    driver.drain()


def test_times_and_cached_tokens_come_with_the_first_token() -> None:
    driver = Driver(max_num_seqs=1)
    driver.ask("a", [1, 2], max_tokens=2)
    driver.ask("b", [1, 2], max_tokens=2)
    outputs = [output for _ in range(4) for output in driver.step() if output.request_id == "b" and output.token_ids]
    assert outputs[0].queued_s == 1000.0
    assert outputs[0].scheduled_s == pytest.approx(1000.03)
    assert (outputs[1].queued_s, outputs[1].scheduled_s) == (None, None)
    driver.drain()


# Endings


def first_token(prompt: list[int]) -> int:
    return oracle(make_request("x", prompt), VOCAB)[0][0]


def test_end_of_text_ends_with_stop() -> None:
    driver = Driver()
    answer = driver.ask("a", [1, 2], eos_token_ids=(first_token([1, 2]),))
    driver.drain()
    assert answer.output is not None
    assert (answer.reason, len(answer.tokens), answer.output.stop_token_id) == ("stop", 1, None)


def test_a_stop_token_id_is_named() -> None:
    driver = Driver()
    token = first_token([1, 2])
    answer = driver.ask("a", [1, 2], stop_token_ids=(token,))
    driver.drain()
    assert answer.output is not None
    assert (answer.reason, answer.output.stop_token_id) == ("stop", token)


def test_min_tokens_come_before_any_stop() -> None:
    driver = Driver()
    answer = driver.ask("a", [1, 2], max_tokens=9, min_tokens=5, eos_token_ids=tuple(range(0, VOCAB, 2)))
    driver.drain()
    assert len(answer.tokens) > 5


def test_the_context_is_a_limit_too() -> None:
    driver = Driver(max_model_len=10)
    answer = driver.ask("a", [1] * 7, max_tokens=30)
    driver.drain()
    assert (answer.reason, len(answer.tokens)) == ("length", 3)


def test_what_does_not_fit_the_context_is_refused() -> None:
    driver = Driver(max_model_len=10)
    with pytest.raises(ContextLengthExceeded, match="maximum context length is 10 tokens"):
        driver.ask("a", [1] * 10)
    with pytest.raises(InvalidRequest, match="empty"):
        driver.ask("b", [])
    assert not driver.engine.has_work


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    driver = Driver()
    driver.ask("a", [1])
    with pytest.raises(InvalidRequest, match="already running"):
        driver.ask("a", [1])
    driver.drain()
    driver.ask("a", [1])
    driver.drain()


@pytest.mark.parametrize("delivered", [1, 3, 8])
def test_a_resumed_request_goes_on_after_what_was_delivered(delivered: int) -> None:
    wanted, _ = oracle(make_request("a", [1, 2, 3]), VOCAB)
    driver = Driver()
    answer = driver.ask("a", [1, 2, 3], output_token_ids=tuple(wanted[:delivered]))
    first = driver.step()[0]
    assert first.start == delivered
    driver.drain()
    assert answer.tokens == wanted
    assert answer.reason == "length"


def test_abort_frees_the_blocks_at_once_and_says_so_once() -> None:
    driver = Driver(max_num_seqs=1)
    for name in "ab":
        driver.ask(name, [1] * 9)
    driver.step()
    driver.abort("a", "b")
    assert driver.scheduler.pool.num_free == driver.scheduler.pool.blocks
    assert {output.request_id: output.finish_reason for output in driver.step()} == {"a": "abort", "b": "abort"}
    driver.engine.abort(["a", "never heard of"])
    assert not driver.engine.has_work


# One request's trouble


def test_a_failed_row_ends_its_request_only() -> None:
    driver = Driver()
    for name in "ab":
        driver.ask(name, [ord(name) % 60] * 5)
    driver.answers["a"].may_end.add("error")
    driver.executor.fail_row = lambda slot, step_id: step_id == 2 and slot == 0
    outputs = []
    while driver.engine.has_work:
        outputs += driver.step()
    (error,) = [output for output in outputs if output.error]
    assert (error.request_id, error.error.message) == ("a", "this row failed")  # type: ignore[union-attr]
    assert driver.answers["b"].reason == "length"


def test_a_request_that_cannot_be_met_is_refused_and_what_it_computed_stays() -> None:
    driver = Driver(block_size=4)
    driver.ask("a", [5] * 9).may_end.add("error")
    driver.executor.fail_row = lambda slot, step_id: step_id == 2
    driver.executor.failures_asked_for = True
    outputs = []
    while driver.engine.has_work:
        outputs += driver.step()
    (error,) = [output.error for output in outputs if output.error]
    assert (error.status, error.type) == (400, "invalid_request_error")
    driver.executor.fail_row = lambda slot, step_id: False
    answer = driver.ask("b", [5] * 9, max_tokens=1)
    driver.drain()
    assert answer.output is not None
    assert answer.output.num_cached_tokens == 8


class BrokenGrammar(FakeGrammar):
    def __init__(self, broken: str) -> None:
        super().__init__(1, 20)
        self.broken = broken

    def fill_mask(self, out: np.ndarray) -> None:
        if (self.broken, self.count) in (("mask", 2), ("first mask", 0)):
            raise RuntimeError("a secret")
        super().fill_mask(out)

    def accept(self, token_id: int) -> bool:
        if self.broken == "accept" and self.count == 2:
            raise RuntimeError("a secret")
        if self.broken == "refusal" and self.count == 2:
            return False
        return super().accept(token_id)


@pytest.mark.parametrize("broken", ["first mask", "mask", "accept", "refusal"])
def test_a_broken_grammar_ends_its_request_only(broken: str) -> None:
    engine = engine_with(lambda asked: BrokenGrammar(broken))
    engine.add(make_request("bad", [1, 2, 3], structured_outputs=structured(1, 20)))
    engine.add(make_request("good", [1, 2, 3]))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    (error,) = [output for output in outputs if output.error]
    assert error.request_id == "bad"
    assert error.start == (0 if broken == "first mask" else 2)
    assert "secret" not in error.error.message  # type: ignore[union-attr]
    assert [output.finish_reason for output in outputs if output.request_id == "good"][-1] == "length"
    assert engine.status().free_blocks == 32


# Grammars


def test_a_grammar_restricts_every_token_and_its_end_is_a_stop() -> None:
    driver = Driver()
    answer = driver.ask("a", [1, 2], max_tokens=20, structured_outputs=structured(3, 5))
    driver.drain()
    assert (answer.reason, len(answer.tokens)) == ("stop", 5)


def test_a_resumed_request_replays_its_grammar() -> None:
    asked = structured(3, 9)
    wanted, _ = oracle(make_request("a", [1], max_tokens=20), VOCAB, grammar=compile_fake(asked))
    driver = Driver()
    answer = driver.ask("a", [1], max_tokens=20, structured_outputs=asked, output_token_ids=tuple(wanted[:4]))
    driver.drain()
    assert answer.tokens == wanted


def test_the_loop_does_not_wait_for_a_compilation() -> None:
    compiled = threading.Event()

    def slow(asked: StructuredOutputs) -> FakeGrammar:
        compiled.wait(30)
        return compile_fake(asked)

    engine = engine_with(slow)
    engine.add(make_request("grammar", [1, 2], structured_outputs=structured(1, 3)))
    engine.add(make_request("plain", [1, 2]))
    with pytest.raises(InvalidRequest, match="already running"):
        engine.add(make_request("grammar", [1, 2]))
    reasons = []
    while "length" not in reasons:
        reasons += [output.finish_reason for output in engine.step() if output.request_id == "plain"]
    assert engine.status().waiting == 1
    for number in range(4 + 1):  # as many slots, and two places in the queue
        engine.add(make_request(str(number), [1]))
    with pytest.raises(QueueFull):
        engine.add(make_request("too many", [1]))
    engine.abort(map(str, range(5)))
    engine.step()
    assert engine.step() == []  # nothing to do but to wait a moment
    compiled.set()
    assert run(engine) == {"grammar": [None, None, None, "stop"]}


@pytest.mark.parametrize(
    ("raised", "message"),
    [(InvalidRequest("No such rule."), "No such rule."), (KeyError("a secret"), "could not be compiled (KeyError)")],
)
def test_a_grammar_that_does_not_compile_is_its_clients_error(raised: Exception, message: str) -> None:
    def refuse(asked: StructuredOutputs) -> FakeGrammar:
        raise raised

    engine = engine_with(refuse)
    engine.add(make_request("a", [1], structured_outputs=structured(1, 3)))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    (output,) = outputs
    assert output.error is not None
    assert (output.finish_reason, output.error.status) == ("error", 400)
    assert message in output.error.message
    assert "secret" not in output.error.message


def test_a_request_can_be_aborted_while_its_grammar_compiles() -> None:
    compiled = threading.Event()

    def slow(asked: StructuredOutputs) -> FakeGrammar:
        compiled.wait(30)
        return compile_fake(asked)

    engine = engine_with(slow)
    engine.add(make_request("a", [1], structured_outputs=structured(1, 3)))
    engine.abort(["a"])
    assert [output.finish_reason for output in engine.step()] == ["abort"]
    assert not engine.has_work
    compiled.set()


def test_an_engine_without_a_compiler_says_so() -> None:
    with pytest.raises(InvalidRequest, match="no structured output"):
        engine_with(None).add(make_request("a", [1], structured_outputs=structured(1, 3)))


class EndlessGrammar(FakeGrammar):
    """Allows end-of-text, which ends the answer and is no part of its language."""

    def accept(self, token_id: int) -> bool:
        return token_id != 9 and super().accept(token_id)

    def _allows(self, token: int) -> bool:
        return token == 9 if self.count == 2 else super()._allows(token)


def test_end_of_text_is_not_shown_to_the_grammar() -> None:
    engine = engine_with(lambda asked: EndlessGrammar(1, 20))
    engine.add(make_request("a", [1, 2], eos_token_ids=(9,), structured_outputs=structured(1, 20)))
    assert run(engine)["a"][-1] == "stop"


# When it breaks


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("moment", ["submit", "result"])
def test_after_a_loss_everyone_goes_on_where_he_was(window: int, moment: str) -> None:
    driver = Driver(max_in_flight=window)
    for number in range(5):
        driver.ask(str(number), [number] * 7, max_tokens=12, structured_outputs=structured(number, 9))
    for _ in range(6):
        driver.step()
    tokens = sum(len(answer.tokens) for answer in driver.answers.values())
    assert tokens
    setattr(driver.executor, f"lose_{moment}", True)
    while driver.engine.status().epoch == 0:
        driver.step()
    status = driver.engine.status()
    assert (status.epoch, status.state, status.running) == (1, "recovering", 0)
    assert status.free_blocks == status.blocks
    driver.drain()
    assert driver.engine.status().state == "ready"


def shrunken(*, recovery_timeout: float = 600.0) -> Driver:
    """An engine whose cache has room for 32 tokens any more, with a request that comes to 38 and is at 32."""
    driver = Driver(blocks=32, block_size=4, recovery=RecoveryConfig(recovery_timeout=recovery_timeout))
    driver.ask("small", [1] * 8, max_tokens=8)
    driver.ask("large", [2] * 30, max_tokens=8)
    driver.step()
    driver.executor.restart_layouts = [CacheLayout(8, 4, 1, VOCAB)]
    driver.executor.lose_submit = True
    while driver.answers["small"].reason is None or not driver.scheduler.parked:
        driver.step()
    assert driver.engine.status().blocks == 8
    return driver


def test_what_a_shrunken_cache_cannot_hold_goes_as_far_as_it_can_and_waits_for_a_larger_one() -> None:
    driver = shrunken()
    large = driver.answers["large"]
    assert len(large.tokens) == 3  # 33 tokens are known and 32 have room
    status = driver.engine.status()
    assert (status.state, status.running, status.waiting) == ("ready", 0, 1)
    before = driver.clock.now
    driver.step()
    assert driver.clock.now - before > 0.02, "a loop with nothing to do spins"
    with pytest.raises(Recovering, match="since workers were lost the KV cache holds 32"):
        driver.ask("as large", [2] * 30, max_tokens=8)
    driver.executor.restart_layouts = [CacheLayout(32, 4, 1, VOCAB)]
    driver.executor.returned = "Rank 1 on host2"
    for _ in range(100):
        driver.step()
        if driver.executor.restarts[-1] == 2:
            driver.executor.returned = None
    driver.drain()
    assert driver.engine.status().recoveries[-1].kind == "regained"


def test_what_waits_for_a_larger_cache_in_vain_is_told_so() -> None:
    driver = shrunken(recovery_timeout=5.0)
    large = driver.answers["large"]
    large.may_end.add("error")
    begin = driver.clock.now
    driver.drain()
    assert driver.clock.now - begin == pytest.approx(5.0, abs=0.2)
    assert large.output is not None
    assert large.output.error is not None
    assert (large.output.error.status, large.output.error.retry_after is None) == (503, False)
    assert "come to 33 tokens" in large.output.error.message


def test_what_waits_for_a_larger_cache_can_be_aborted() -> None:
    driver = shrunken()
    driver.abort("large")
    driver.drain()


def test_a_cache_that_shrinks_while_a_grammar_compiles() -> None:
    compiled = threading.Event()

    def slow(asked: StructuredOutputs) -> FakeGrammar:
        compiled.wait(30)
        return compile_fake(asked)

    engine = engine_with(slow)
    engine.add(make_request("grammar", [2] * 30, structured_outputs=structured(1, 3)))
    engine.add(make_request("plain", [1]))
    executor = engine._executor
    assert isinstance(executor, FakeExecutor)
    executor.restart_layouts = [CacheLayout(4, 4, 1, VOCAB)]
    executor.lose_submit = True
    while engine.status().state != "ready" or engine.status().epoch == 0:
        engine.step()
    compiled.set()
    while not engine._scheduler.parked:
        engine.step()
    executor.restart_layouts = [CacheLayout(32, 4, 1, VOCAB)]
    engine.recover(WorkerDied(0, "lost again"))
    assert run(engine)["grammar"][-1] == "stop"


def test_cached_tokens_are_counted_in_the_prompt_only() -> None:
    driver = Driver()
    wanted = driver.ask("a", [1, 2, 3], max_tokens=20).wanted
    driver.drain()
    driver.ask("b", [1, 2, 3], max_tokens=20, output_token_ids=tuple(wanted[:15]))
    counted = [output.num_cached_tokens for _ in range(2) for output in driver.step() if output.token_ids]
    assert counted[0] == 3
    driver.drain()


def test_losses_without_progress_end_every_request_and_then_the_engine() -> None:
    driver = Driver()
    driver.executor.poisons = lambda tokens: True
    for number in range(3):
        driver.ask(str(number), [number + 1]).may_end.add("error")
    driver.executor.restart_layouts = [RuntimeError("no such device")] * (MAX_TRIES - 1)
    begin = driver.clock.now
    outputs = []
    while driver.engine.status().state != "failed":
        outputs += driver.step()
    assert driver.clock.now - begin > sum(BACK_OFF_S)
    assert [output.error.status for output in outputs if output.error] == [503] * 3
    assert driver.engine.has_work
    for call in (driver.engine.step, lambda: driver.engine.add(make_request("new", [1]))):
        with pytest.raises(EngineDead, match="lost in a step"):
            call()
    assert len(driver.executor.restarts) == MAX_TRIES


def test_a_committed_token_forgives_earlier_losses() -> None:
    driver = Driver()
    driver.ask("a", [1, 2], max_tokens=46)
    for loss in range(2 * MAX_TRIES):
        driver.executor.lose_result = True
        while driver.engine.status().state != "ready" or driver.engine.status().epoch == loss:
            driver.step()
        driver.step()  # two tokens in all
    driver.drain()
    assert driver.engine.status().epoch == 2 * MAX_TRIES


def test_workers_that_cannot_be_restarted_are_tried_a_few_times() -> None:
    driver = Driver()
    driver.ask("a", [1])
    driver.executor.restart_layouts = [WorkerDied(1, "no memory", kind="out_of_memory")] * (MAX_TRIES - 1)
    driver.executor.lose_submit = True
    driver.drain()
    status = driver.engine.status()
    assert (status.epoch, status.state) == (MAX_TRIES, "ready")
    assert status.failures == {"failed": 1, "out_of_memory": MAX_TRIES - 1}


def test_status_counts() -> None:
    driver = Driver(max_num_seqs=1)
    for name in "ab":
        driver.ask(name, [1] * 9, max_tokens=2)
    driver.step()
    status = driver.engine.status()
    assert (status.running, status.waiting, status.step, status.computed_tokens) == (1, 1, 1, 9)
    assert status.free_blocks == status.blocks - 3
    assert status.step_seconds == pytest.approx(0.001)
    driver.drain()


def test_close_closes_the_executor() -> None:
    engine = engine_with()
    engine.close()
    engine.close()
    executor = engine._executor
    assert isinstance(executor, FakeExecutor)
    assert executor.closed

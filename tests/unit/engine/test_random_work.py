"""Random work on a strict fake executor: whatever happens, each request gets its own tokens, once, and one end.

A plain loop for the bulk, and a hypothesis machine that shrinks what it finds.
"""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from phalanx.engine.client import EngineRequest
from phalanx.engine.engine import PROBE
from phalanx.errors import InvalidRequest, QueueFull, Recovering
from phalanx.executor.base import CacheLayout, NoCapacity, WorkerDied
from tests.helpers.engine_driver import VOCAB, Driver, make_request
from tests.helpers.fake_executor import oracle
from tests.helpers.fake_grammar import compile_fake, structured

DEADLY = VOCAB - 3
"""Prompts that begin with this or a greater token end workers; no other request has one of these there."""


def random_request(rng: random.Random, request_id: str, max_model_len: int) -> EngineRequest:
    """Few different beginnings, so that prefixes are shared; now and then each option."""
    base = rng.choice([[1] * 40, [2, 3] * 20, list(range(40))])
    prompt = base[: rng.randint(1, 30)] + [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 1, 5]))]
    options: dict[str, object] = {"max_tokens": rng.choice([1, 2, 5, 12, 30])}
    if rng.random() < 0.3:
        options["cache_salt"] = rng.choice("ab")
    if rng.random() < 0.3:
        options["priority"] = rng.randint(-1, 1)
    if rng.random() < 0.3:
        options["eos_token_ids"] = (rng.randrange(VOCAB), rng.randrange(VOCAB))
    if rng.random() < 0.2:
        options["stop_token_ids"] = tuple(range(8))
    if rng.random() < 0.2:
        options["min_tokens"] = rng.randint(0, int(str(options["max_tokens"])))
    if rng.random() < 0.2:
        options["logprobs"] = 0
    if rng.random() < 0.15:
        options["prompt_logprobs"] = 0
    if rng.random() < 0.2:
        options["structured_outputs"] = structured(rng.randrange(7), rng.randint(1, 12))
    request = make_request(request_id, prompt, **options)  # type: ignore[arg-type]
    if rng.random() < 0.15:
        asked = request.sampling.structured_outputs
        wanted, _ = oracle(request, VOCAB, max_model_len, compile_fake(asked) if asked else None)
        options["output_token_ids"] = tuple(wanted[: rng.randint(1, len(wanted))])
        request = make_request(request_id, prompt, **options)  # type: ignore[arg-type]
    return request


class Chaos:
    """One engine and everything that can be done to it; `rng` decides."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.ids = 0
        rate = rng.choice([0.0, 0.5, 0.9, 1.0])
        self.driver = Driver(
            blocks=rng.choice([12, 13, 16, 24, 60]),
            block_size=4,
            max_num_seqs=rng.choice([1, 3, 8, 8, 8, 8]),
            max_num_batched_tokens=rng.choice([1, 5, 16, 64]),
            max_num_queued_reqs=rng.choice([3, 50]),
            max_in_flight=rng.choice([1, 1, 2, 3]),
            prefix_caching=rng.random() < 0.8,
            proposed=rng.choice([0, 0, 1, 3, 9]),
            guess=lambda: rng.random() < rate,
        )
        self.driver.executor.fail_row = self.fail_row
        self.driver.executor.poisons = lambda tokens: tokens[0] >= DEADLY and len(tokens) > 2 * (tokens[0] - DEADLY) + 5
        self.failing = 0

    def fail_row(self, slot: int, step_id: int) -> bool:
        if not self.failing:
            return False
        self.failing -= 1
        for request in self.driver.scheduler.running:
            if request.slot == slot and request.request_id != PROBE:
                self.driver.answers[request.request_id].may_end.add("error")
        return True

    def add(self) -> None:
        self.ids += 1
        request = random_request(self.rng, f"r{self.ids}", self.driver.max_model_len)
        for child in range(self.rng.choice([1, 1, 1, 3])):
            with suppress(QueueFull, InvalidRequest, Recovering):
                self.driver.add(_renamed(request, f"{request.request_id}#{child}"))

    def abort(self) -> None:
        running = self.driver.running()
        if running:
            self.driver.abort(self.rng.choice(running).request.request_id)

    def fail(self) -> None:
        self.failing = 1

    def lose_workers(self) -> None:
        executor = self.driver.executor
        if executor.lose_submit or executor.lose_result or self.driver.engine._quarantine.alone is not None:
            return  # who is at work at too many is refused, which is the business of another test
        if self.rng.random() < 0.3:  # in another size: who no longer fits waits for a larger one
            blocks = self.rng.choice([6, 12, 16, 24, 60])
            executor.restart_layouts.append(CacheLayout(blocks, 4, 1, VOCAB))
        if self.rng.random() < 0.2:
            executor.restart_layouts.insert(0, WorkerDied(1, "lost while starting"))
        executor.lose_submit = self.rng.random() < 0.5
        executor.lose_result = not executor.lose_submit

    def poison(self) -> None:
        """A request that ends its workers at one of its first tokens, unless it is finished before."""
        self.ids += 1
        prompt = [DEADLY + self.rng.randrange(3), *(self.rng.randrange(VOCAB) for _ in range(self.rng.randint(0, 9)))]
        with suppress(QueueFull, InvalidRequest, Recovering):
            self.driver.ask(f"p{self.ids}", prompt, max_tokens=self.rng.randint(1, 9)).may_end.add("error")

    def miss(self) -> None:
        """At the next loss devices are missing for a while."""
        missing = NoCapacity(1, "its host is gone", missing="a host")
        self.driver.executor.restart_layouts[:0] = [missing] * self.rng.randint(1, 3)

    def idle(self) -> None:
        if not self.driver.engine.has_work:
            self.driver.engine.tick()

    def step(self) -> None:
        self.driver.step()

    def finish(self) -> None:
        self.driver.executor.lose_submit = self.driver.executor.lose_result = False
        self.failing = 0
        self.driver.executor.poisons = lambda tokens: False
        self.driver.executor.restart_layouts = [CacheLayout(60, 4, 1, VOCAB)]
        self.driver.engine.recover(WorkerDied(0, "lost at the end"))
        self.driver.drain()
        self.driver.engine.close()


def _renamed(request: EngineRequest, request_id: str) -> EngineRequest:
    fields = {name: getattr(request, name) for name in EngineRequest.__struct_fields__}
    return EngineRequest(**{**fields, "request_id": request_id})


@pytest.mark.parametrize("seed", range(10))
def test_ten_thousand_random_operations(seed: int) -> None:
    rng = random.Random(seed)
    preemptions = prefix_hits = losses = accepted = refused = 0
    for _ in range(20):
        chaos = Chaos(rng)
        operations = ("step", "add", "abort", "fail", "lose_workers", "poison", "miss", "idle")
        weights = rng.choice([[70, 25, 5, 1, 1, 1, 1, 1], [80, 19, 0, 1, 0, 0, 0, 1], [70, 10, 0, 1, 5, 2, 1, 1]])
        for operation in rng.choices(operations, weights, k=500):
            getattr(chaos, operation)()
        chaos.finish()
        losses += sum(chaos.driver.engine.status().failures.values())
        preemptions += chaos.driver.scheduler.counters.preemptions
        prefix_hits += chaos.driver.scheduler.counters.prefix_hits
        speculation = chaos.driver.scheduler.counters.speculation
        accepted += speculation.accepted_tokens
        refused += speculation.draft_tokens - speculation.accepted_tokens
    assert preemptions, "the work is too easy to prove anything"
    assert prefix_hits > 500
    assert losses > 30
    assert min(accepted, refused) > 100


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.chaos: Chaos | None = None

    @precondition(lambda self: self.chaos is None)
    @rule(seed=st.integers(0, 2**16))
    def start(self, seed: int) -> None:
        self.chaos = Chaos(random.Random(seed))

    @precondition(lambda self: self.chaos is not None)
    @rule(
        name=st.sampled_from(
            ["step", "step", "step", "add", "add", "abort", "fail", "lose_workers", "poison", "miss", "idle"]
        )
    )
    def operate(self, name: str) -> None:
        getattr(self.chaos, name)()

    @invariant()
    def consistent(self) -> None:
        if self.chaos is not None:
            self.chaos.driver.check()

    def teardown(self) -> None:
        if self.chaos is not None:
            self.chaos.finish()


def test_engine_machine() -> None:
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=100,
            stateful_step_count=50,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )

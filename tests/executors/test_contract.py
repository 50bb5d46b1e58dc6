"""What every executor promises, by the same tests for each kind."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from typing import NoReturn

import msgspec
import numpy as np
import psutil
import pytest

from phalanx.errors import NotEnoughMemory, UserError
from phalanx.executor.base import CacheLayout, Executor, WorkerDied
from phalanx.step import ON_DEVICE, SamplingState, decode_plan, encode, unpack
from tests.helpers.plan_script import Script
from tests.helpers.plans import GREEDY, Answer, Run, admission, answer, plan
from tests.helpers.worker_model import VOCAB, engine_config

PROMPT = [3, 77, 12, 12, 45, 101, 9, 64, 2, 110, 31]
DRAWS = SamplingState(temperature=1.2, seed=99, top_p=0.95, frequency_penalty=0.4)


def run(executor: Executor, *runs: Run, **rest) -> Answer:
    return answer(executor.submit(plan(runs, **rest)).result())


def last(executor: Executor, token: int) -> int:
    """How a plan names the token to go on with: across stages it must be sent, else it may stay where it was drawn."""
    return ON_DEVICE if executor.max_in_flight == 1 else token


def generate(
    executor: Executor,
    prompt: list[int] = PROMPT,
    count: int = 12,
    sampling: SamplingState = GREEDY,
    *,
    slot: int = 0,
    chunks: tuple[int, ...] = (),
    blocks: list[int] | None = None,
    epoch: int = 0,
) -> list[int]:
    """One request through admission, prefill in `chunks` (then the rest), decode and release."""
    blocks = blocks or list(range(-(-(len(prompt) + count) // 4)))
    left, admit, out = len(prompt), [admission(slot, prompt, blocks, sampling=sampling)], []
    for size in (*chunks, left - sum(chunks)):
        got = run(executor, Run(slot, size), admit=admit, epoch=epoch)
        admit, left = [], left - size
        assert bool(got.tokens) == (left == 0) and not got.failures
    out.append(got.tokens[slot])
    while len(out) < count:
        token = last(executor, out[-1]) if len(out) % 2 else out[-1]
        out.append(run(executor, Run(slot, 1, token), epoch=epoch).tokens[slot])
    run(executor, release=[slot], epoch=epoch)
    return out


@pytest.mark.parametrize("sampling", [GREEDY, DRAWS])
class TestTokens:
    def test_equal_the_reference(self, executor, reference, sampling):
        assert generate(executor, sampling=sampling) == reference.generate(PROMPT, 12, sampling)

    @pytest.mark.parametrize("chunks", [(1,), (4, 4), (3, 5, 2), (1,) * 10, (10,)])
    def test_chunked_equals_whole(self, executor, sampling, chunks):
        assert generate(executor, sampling=sampling, chunks=chunks) == generate(executor, sampling=sampling)

    def test_blocks_and_slots_do_not_matter(self, executor, sampling):
        want = generate(executor, sampling=sampling)
        assert generate(executor, sampling=sampling, slot=7, blocks=[61, 3, 17, 44, 2, 9]) == want

    def test_a_slot_used_before_leaves_no_trace(self, executor, sampling):
        want = generate(executor, sampling=sampling)
        generate(executor, [90, 91, 92] * 9, 20, SamplingState(seed=1, repetition_penalty=1.8, logit_bias={5: 9.0}))
        assert generate(executor, sampling=sampling) == want

    def test_preempted_and_resumed_anywhere(self, executor, sampling):
        """Release, then admission with the tokens so far, in another slot and other blocks, with another row beside."""
        want = generate(executor, sampling=sampling)
        for after in (1, 5, 11):
            first = generate(executor, count=after, sampling=sampling)
            assert first == want[:after]
            resumed = admission(3, PROMPT + first, [40, 41, 42, 43, 44, 45], num_prompt=len(PROMPT), sampling=sampling)
            beside = admission(1, [50] * 9, [50, 51, 52], sampling=DRAWS)
            got = run(executor, Run(1, 4), Run(3, len(PROMPT) + after), admit=[beside, resumed])
            tokens = [*first, got.tokens[3]]
            while len(tokens) < 12:
                tokens.append(run(executor, Run(3, 1, tokens[-1])).tokens[3])
            run(executor, release=[1, 3])
            assert tokens == want

    def test_a_cached_prefix_equals_computing_it(self, executor, sampling):
        want = generate(executor, sampling=sampling)
        owner = admission(0, PROMPT[:9], [10, 11, 12], sampling=GREEDY)
        run(executor, Run(0, 9), admit=[owner])
        sharing = admission(5, PROMPT, [10, 11, 20, 21, 22, 23], num_computed=8, sampling=sampling)
        tokens = [run(executor, Run(5, 3), admit=[sharing], release=[0]).tokens[5]]
        while len(tokens) < 12:
            tokens.append(run(executor, Run(5, 1, last(executor, tokens[-1]))).tokens[5])
        assert tokens == want


def test_tokens_do_not_depend_on_the_batch(executor, reference):
    """Eight requests of different lengths and parameters at once, each equal to what it is alone."""
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (1, 2, 5, 8, 16, 17, 23, 30)]
    states = [GREEDY if i % 3 == 0 else msgspec.structs.replace(DRAWS, seed=i, top_k=i) for i in range(8)]
    blocks = np.random.default_rng(5).permutation(8 * 11).reshape(8, 11).tolist()
    admit = [admission(i, p, blocks[i], sampling=s) for i, (p, s) in enumerate(zip(prompts, states, strict=True))]
    got = run(executor, *[Run(i, len(p)) for i, p in enumerate(prompts)], admit=admit)
    out = [[got.tokens[i]] for i in range(8)]
    for _ in range(9):
        got = run(executor, *[Run(i, 1, last(executor, out[i][-1])) for i in rng.permutation(8).tolist()])
        for i in range(8):
            out[i].append(got.tokens[i])
    assert out == [reference.generate(p, 10, s) for p, s in zip(prompts, states, strict=True)]


@pytest.mark.parametrize("proposing", [False, True], ids=["", "proposing"])
@pytest.mark.parametrize("seed", range(4))
def test_random_plans_equal_the_reference(executor, reference, seed, proposing):
    """Whatever legal plans come, every token and log-probability is what computing from scratch gives."""
    script = Script(np.random.default_rng(seed), VOCAB, slots=8, blocks=90, block_size=4, max_len=60)
    script.on_device = executor.max_in_flight == 1
    script.reference = reference if proposing else None
    sampled = accepted = 0
    for _ in range(60):
        got = answer(executor.submit(script.next()).result())
        assert not got.failures
        assert sorted(got.tokens) == sorted(expected.request.slot for expected in script.expect)
        for expected in script.expect:
            request, want = expected.request, expected.chain(reference)
            assert got.chains[request.slot] == want
            if request.sampling.logprobs >= 0:
                known = reference.logprobs([*request.tokens, *want[:-1]], request.num_prompt)[-len(want) :]
                entries = got.chain_logprobs[request.slot]
                for entry, logprobs, token in zip(entries, known, want, strict=True):
                    check_logprobs(entry, logprobs, token, request.sampling.logprobs)
            sampled += 1
            accepted += len(want) - 1
        assert set(got.logprobs) == {e.request.slot for e in script.expect if e.request.sampling.logprobs >= 0}
        script.take(got)
    assert sampled > 100
    assert accepted > 100 or not proposing


def check_logprobs(entry, want: np.ndarray, token: int, num_top: int) -> None:
    order = np.argsort(-want, kind="stable")
    assert entry.logprob == pytest.approx(want[token], abs=1e-4)
    assert entry.rank == order.tolist().index(token) + 1
    assert list(unpack(entry.top_ids)) == order[:num_top].tolist()
    assert np.allclose(unpack(entry.top_logprobs, "f"), want[order[:num_top]], atol=1e-4)


@pytest.mark.parametrize("chunks", [(11,), (4, 4, 3), (1,) * 11])
def test_prompt_logprobs(executor, reference, chunks):
    asks = SamplingState(temperature=0.0, prompt_logprobs=3)
    want = reference.logprobs(PROMPT, len(PROMPT))
    admit, entries = [admission(2, PROMPT, [5, 6, 7], sampling=asks)], []
    for size in chunks:
        got = run(executor, Run(2, size), admit=admit)
        admit = []
        if got.tokens:
            token = got.tokens[2]
        if got.prompt_logprobs:
            start, more = got.prompt_logprobs[2]
            assert start == len(entries) + 1
            entries += more
    assert len(entries) == len(PROMPT) - 1
    for position, entry in enumerate(entries):
        check_logprobs(entry, want[position], PROMPT[position + 1], 3)
    assert not run(executor, Run(2, 1, last(executor, token))).prompt_logprobs


class TestResults:
    def test_come_in_the_order_of_the_plans(self, executor):
        """With as many plans in flight as there may be, and each plan's results its own."""
        prompts = [[3 + slot, 77, 12] for slot in range(4)]
        alone = [generate(executor, prompt, 1)[0] for prompt in prompts]
        futures = []
        for slot, prompt in enumerate(prompts):
            admit = [admission(slot, prompt, [slot])]
            futures.append(executor.submit(plan([Run(slot, 3)], admit=admit, step=slot + 7)))
            if len(futures) >= executor.max_in_flight:
                futures[-executor.max_in_flight].result()
        assert [future.result().step_id for future in futures] == [7, 8, 9, 10]
        assert [answer(future.result()).tokens for future in futures] == [{i: token} for i, token in enumerate(alone)]

    def test_echo_the_step_and_tell_its_time(self, executor):
        result = executor.submit(plan([Run(0, 2)], admit=[admission(0, [1, 2], [0])], step=41)).result()
        assert (result.epoch, result.step_id) == (0, 41)
        assert 0 < result.compute_s < 60

    def test_keep_the_order_of_the_rows(self, executor):
        admit = [admission(slot, [slot + 1], [slot]) for slot in range(5)]
        result = executor.submit(plan([Run(s, 1) for s in (3, 0, 4, 1)], admit=admit)).result()
        assert list(unpack(result.slots, "H")) == [3, 0, 4, 1]

    def test_an_empty_plan_has_an_empty_result(self, executor):
        assert run(executor) == Answer({}, {}, {})

    def test_survive_the_wire(self, executor):
        """A plan is bytes: sent, stored and replayed, it gives the same result."""
        sent = plan([Run(0, 11)], admit=[admission(0, PROMPT, [0, 1, 2], sampling=DRAWS)], step=1)
        first = executor.submit(sent).result()
        executor.restart(1)
        again = executor.submit(msgspec.structs.replace(decode_plan(encode(sent)), epoch=1)).result()
        assert again.tokens == first.tokens


class TestOneBadRow:
    """A request that cannot run fails alone; the others' tokens are what they are without it."""

    @pytest.mark.parametrize(
        ("bad", "sampling", "mask"),
        [
            ([5, VOCAB], GREEDY, None),
            ([5, 6], SamplingState(logit_bias={VOCAB: 1.0}), None),
            ([5, 6], SamplingState(temperature=float("nan")), None),
            ([5, 6], DRAWS, np.zeros(VOCAB, bool)),
        ],
    )
    def test_fails_alone(self, executor, bad, sampling, mask):
        want = generate(executor, count=3)
        good = admission(1, PROMPT, [0, 1, 2, 3])
        poison = admission(2, bad, [20, 21], sampling=sampling)
        got = run(executor, Run(2, 2, allowed=mask), Run(1, 11), admit=[poison, good])
        assert set(got.failures) == {2} and set(got.tokens) == {1}
        tokens = [got.tokens[1]]
        tokens.append(run(executor, Run(1, 1, last(executor, tokens[-1])), release=[2]).tokens[1])
        assert want[:2] == tokens
        after = run(executor, Run(2, 2), Run(1, 1, last(executor, tokens[-1])), admit=[admission(2, [5, 6], [20])])
        assert after.tokens[1] == want[2] and not after.failures


class TestEpochs:
    def test_a_plan_of_another_epoch_is_dropped(self, executor):
        for epoch in (1, -1):
            future = executor.submit(plan([Run(0, 2)], admit=[admission(0, [1, 2], [0])], epoch=epoch))
            assert future.cancelled()
        assert generate(executor, count=2)  # slot 0 was not taken

    def test_restart_forgets_every_request(self, executor):
        want = generate(executor, count=4)
        run(executor, Run(0, 11), Run(1, 2), admit=[admission(0, PROMPT, [0, 1, 2]), admission(1, [7, 8], [5])])
        layout = executor.restart(1)
        assert isinstance(layout, CacheLayout)
        assert executor.submit(plan([Run(0, 1, ON_DEVICE)], epoch=0)).cancelled()
        assert set(run(executor, Run(0, 1, 5), epoch=1).failures) == {0}
        assert generate(executor, count=4, epoch=1) == want
        executor.restart(5)
        assert executor.submit(plan([], epoch=2)).cancelled()
        assert generate(executor, count=4, epoch=5) == want


class TestDeath:
    """A step that breaks is WorkerDied with its cause; a restart makes the executor whole."""

    def broken_plan(self):
        good = plan([Run(0, 1)], admit=[admission(0, [1], [0])])
        return msgspec.structs.replace(good, rows=msgspec.structs.replace(good.rows, num_tokens=b"\x01"))

    def test_the_future_says_who_and_why(self, executor):
        with pytest.raises(WorkerDied) as caught:
            executor.submit(self.broken_plan()).result()
        states = [status.state for status in executor.check_health()]
        assert "ValueError" in caught.value.cause and states[caught.value.rank] == "dead"
        assert "ready" not in states
        with pytest.raises(WorkerDied):
            executor.submit(plan([Run(0, 1)], admit=[admission(0, [1], [0])])).result()

    def test_restart_makes_it_whole(self, executor):
        want = generate(executor)
        with pytest.raises(WorkerDied):
            executor.submit(self.broken_plan()).result()
        executor.restart(1)
        assert {status.state for status in executor.check_health()} == {"ready"}
        assert generate(executor, epoch=1) == want


class TestLife:
    def test_layout_and_health(self, executor, kind, model):
        config = engine_config(model)
        statuses = executor.check_health()
        assert [(s.rank, s.state, s.device) for s in statuses] == [(r, "ready", "cpu") for r in range(len(kind.layers))]
        assert tuple(s.layers for s in statuses) == kind.layers
        assert tuple(s.heads for s in statuses) == kind.heads
        assert len({s.pid for s in statuses}) == len(statuses)
        stored = (model / "model.safetensors").stat().st_size
        # The file has a header too, and every rank norms of its own.
        assert 0.95 * stored < sum(s.memory["weights"] for s in statuses) <= 1.05 * stored
        for status in statuses:
            assert psutil.pid_exists(status.pid)
            assert set(status.memory) == {"weights", "kv_cache", "activations", "free", "kv_room"}
            assert 0 < status.memory["kv_cache"] <= (config.cache.kv_cache_memory_bytes or 0)

    def test_asking_how_it_is_measures_nothing(self, executor, monkeypatch):
        """The engine asks many times a second, between two steps."""
        before = executor.check_health()

        def measured() -> NoReturn:
            raise AssertionError("memory was measured")

        monkeypatch.setattr("phalanx.worker.worker.host_memory", measured)
        assert executor.check_health() == before

    def test_the_layout_is_what_all_ranks_can_hold(self, executor):
        layout = executor.restart(1)
        caches = [status.memory["kv_cache"] for status in executor.check_health()]
        assert layout.blocks * layout.bytes_per_block == sum(caches)
        assert (layout.block_size, layout.vocab_size) == (4, VOCAB)

    def test_progress_goes_from_nothing_to_all(self, fresh, model):
        seen: dict[str, list[float]] = {}
        fresh.start(engine_config(model), lambda phase, share, _: seen.setdefault(phase, []).append(share))
        assert list(seen) == ["weights", "kv cache", "warm-up"]
        for shares in seen.values():
            assert shares == sorted(shares) and shares[-1] == pytest.approx(1.0) and min(shares) >= 0

    def test_close_is_idempotent_and_leaves_nothing(self, fresh, model):
        fresh.start(engine_config(model))  # once before, for what is made once and stays
        fresh.close()
        children, files = set(psutil.Process().children(recursive=True)), len(os.listdir("/proc/self/fd"))
        threads = threading.active_count()
        fresh.start(engine_config(model))
        generate(fresh, count=2)
        fresh.close()
        fresh.close()
        assert set(psutil.Process().children(recursive=True)) <= children
        assert not multiprocessing.active_children()
        assert threading.active_count() <= threads
        assert len(os.listdir("/proc/self/fd")) <= files
        assert fresh.check_health() == []

    def test_closed_or_never_started_runs_nothing(self, fresh, model):
        with pytest.raises(WorkerDied):
            fresh.submit(plan()).result()
        fresh.start(engine_config(model))
        fresh.close()
        with pytest.raises(WorkerDied):
            fresh.submit(plan()).result()
        with pytest.raises(WorkerDied):
            fresh.restart(1)

    def test_a_model_that_cannot_be_loaded_is_a_user_error_and_leaves_it_closed(self, fresh, model, tmp_path):
        with pytest.raises(UserError):
            fresh.start(engine_config(tmp_path / "nothing"))
        assert fresh.check_health() == []
        with pytest.raises(NotEnoughMemory, match="--max-model-len"):
            fresh.start(engine_config(model, kv_cache_memory_bytes=1000))
        assert fresh.check_health() == []
        fresh.start(engine_config(model))
        assert generate(fresh, count=2)

    def test_health_does_not_wait(self, executor):
        began = time.monotonic()
        for _ in range(20):
            executor.check_health()
        assert time.monotonic() - began < 2

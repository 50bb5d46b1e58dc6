"""White-box tests of one worker: what memory it may read, what a broken forward does, what its shell decides."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from phalanx.errors import ConfigError, NotEnoughMemory
from phalanx.executor.base import WorkerDied
from phalanx.executor.inprocess import InProcessExecutor
from phalanx.kernels.library import native
from phalanx.sampling.sampler import NO_SCORES
from phalanx.step import ON_DEVICE, SamplingState
from phalanx.worker import residency
from phalanx.worker import worker as worker_module
from phalanx.worker.kv_pool import KVPool
from phalanx.worker.limits import Memory
from phalanx.worker.worker import Worker, open_worker
from tests.helpers.plan_script import Reference, Script
from tests.helpers.plans import Run, admission, answer, plan
from tests.helpers.tiny_models import tiny_checkpoint
from tests.helpers.worker_model import engine_config, reference_decoder, write_model

PROMPT = [3, 77, 12, 12, 45, 101, 9, 64, 2, 110, 31]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def started(model: Path, **options) -> Worker:
    worker = open_worker(engine_config(model, **options))
    worker.load()
    worker.allocate()
    return worker


@pytest.fixture
def worker(model: Path) -> Iterator[Worker]:
    worker = started(model)
    yield worker
    worker.close()


def poison(worker: Worker, value: float, keep: tuple[int, ...] = ()) -> None:
    """Fill the KV cache, but for the blocks `keep`."""
    for cache in worker._pool.caches:
        for tensor in (cache.key, cache.value):
            kept = tensor[list(keep)].clone()
            tensor.fill_(value)
            tensor[list(keep)] = kept


def run(worker: Worker, *runs: Run, **rest):
    return answer(worker.run(plan(runs, **rest)))


def check_poison_does_not_show(model: Path, value: float, steps: int) -> None:
    """A worker whose cache is full of `value` answers a random script exactly as one with a clean cache."""
    clean, dirty = started(model), started(model)
    poison(dirty, value)
    vocab = clean.spec.vocab_size
    scripts = [Script(np.random.default_rng(8), vocab, slots=8, blocks=60, block_size=4, max_len=60) for _ in range(2)]
    sampled = 0
    for _ in range(steps):
        got = []
        for worker, script in ((clean, scripts[0]), (dirty, scripts[1])):
            got.append(answer(worker.run(script.next())))
            assert not got[-1].failures
            script.take(got[-1])
        assert got[0] == got[1]
        sampled += len(got[0].tokens)
    assert sampled > steps


def test_the_cache_of_before_is_gone_when_another_is_made(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, gone = started(model), []
    before = weakref.ref(worker._pool)

    def make(*args, **options):
        gone.append(before() is None)
        return KVPool(*args, **options)

    monkeypatch.setattr(worker_module, "KVPool", make)
    worker.allocate(blocks=worker._pool.blocks - 1, epoch=1)
    assert gone == [True]


class TestUninitialisedMemory:
    """SEC-31: nothing that was never written, or was left by others, can be seen."""

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
    def test_of_the_cache(self, model, value):
        """Many rows of different lengths, so that every kind of padding occurs; the script shares and reuses blocks."""
        check_poison_does_not_show(model, value, steps=40)

    @pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "qwen1"])
    def test_of_the_cache_with_windows_and_caps(self, family):
        """The other paths of attention: windows that cut a context, soft caps, prompt classes."""
        check_poison_does_not_show(tiny_checkpoint(family), float("nan"), steps=15)

    def test_of_prompt_logprobs_after_a_cached_prefix(self, worker, model):
        """Positions that were found in the cache have no log-probabilities; the others equal the uncached ones."""
        asks = SamplingState(temperature=0.0, prompt_logprobs=2)
        whole = run(worker, Run(0, 11), admit=[admission(0, PROMPT, [0, 1, 2], sampling=asks)]).prompt_logprobs[0]
        poison(worker, float("nan"), keep=(0, 1))
        cached = admission(1, PROMPT, [0, 1, 9], num_computed=8, sampling=asks)
        start, entries = run(worker, Run(1, 3), admit=[cached]).prompt_logprobs[1]
        assert start == 9
        for entry, want in zip(entries, whole[1][8:], strict=True):
            assert entry.logprob == pytest.approx(want.logprob, abs=1e-5)
            assert (entry.rank, entry.top_ids) == (want.rank, want.top_ids)

    def test_of_a_request_that_broke(self, worker, model):
        """A row whose cache holds NaN fails alone, and its blocks are harmless to whoever gets them next."""
        reference = Reference(reference_decoder(model))
        want = reference.generate(PROMPT, 3, SamplingState(temperature=0.0))
        admit = [admission(0, PROMPT, [0, 1, 2, 3]), admission(1, PROMPT[::-1], [4, 5, 6, 7])]
        first = run(worker, Run(0, 11), Run(1, 11), admit=admit)
        poison(worker, float("nan"), keep=(0, 1, 2, 3))
        got = run(worker, Run(0, 1, ON_DEVICE), Run(1, 1, ON_DEVICE))
        assert got.failures == {1: NO_SCORES}
        assert [first.tokens[0], got.tokens[0]] == want[:2]
        got = run(worker, Run(2, 11), Run(0, 1, ON_DEVICE), release=[1], admit=[admission(2, PROMPT, [7, 5, 4, 6])])
        assert got.tokens == {2: want[0], 0: want[2]}

    def test_nan_in_prompt_logprobs_is_that_rows_failure(self, worker):
        asks = SamplingState(temperature=0.0, prompt_logprobs=0)
        poison(worker, float("nan"))
        broken = admission(1, PROMPT, [0, 1, 9], num_computed=4, sampling=asks)
        got = run(worker, Run(1, 3), Run(2, 2), admit=[broken, admission(2, [1, 2], [5], sampling=asks)])
        assert got.failures == {1: NO_SCORES} and set(got.tokens) == {2} and set(got.prompt_logprobs) == {2}


class TestSteps:
    def test_greedy_rows_are_computed_without_sorting(self, worker, monkeypatch):
        def forbidden(*args):
            raise AssertionError("a greedy row without penalties needs the largest logit only")

        monkeypatch.setattr("phalanx.sampling.sampler.first_candidates", forbidden)
        monkeypatch.setattr("phalanx.sampling.sampler.row_keys", forbidden)
        assert run(worker, Run(0, 11), admit=[admission(0, PROMPT, [0, 1, 2])]).tokens

    def test_the_head_sees_only_rows_that_sample(self, worker, monkeypatch):
        rows = []
        logits = worker._decoder.logits
        monkeypatch.setattr(worker._decoder, "logits", lambda hidden: rows.append(len(hidden)) or logits(hidden))
        admit = [admission(0, PROMPT, [0, 1, 2]), admission(1, PROMPT, [3, 4, 5]), admission(2, PROMPT, [6, 7, 8])]
        run(worker, Run(0, 4), Run(1, 11), Run(2, 10), admit=admit)
        run(worker, Run(0, 4))
        assert rows == [1]

    def test_an_exception_kills_until_reset(self, model, monkeypatch):
        executor = InProcessExecutor()
        executor.start(engine_config(model))
        decoder = executor._worker._decoder
        forward = decoder.forward

        def broken(*args, **kwargs):
            raise RuntimeError("a kernel failed")

        monkeypatch.setattr(decoder, "forward", broken)
        with pytest.raises(WorkerDied, match="RuntimeError: a kernel failed") as caught:
            executor.submit(plan([Run(0, 1)], admit=[admission(0, [1], [0])])).result()
        assert isinstance(caught.value.__cause__, RuntimeError)
        monkeypatch.setattr(decoder, "forward", forward)
        executor.restart(1)
        future = executor.submit(plan([Run(0, 1)], admit=[admission(0, [1], [0])], epoch=1))
        assert answer(future.result()).tokens
        executor.close()

    def test_an_interrupt_passes_through(self, model, monkeypatch):
        executor = InProcessExecutor()
        executor.start(engine_config(model))

        def interrupted(*args, **kwargs):
            raise KeyboardInterrupt

        monkeypatch.setattr(executor._worker._decoder, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            executor.submit(plan([Run(0, 1)], admit=[admission(0, [1], [0])]))
        executor.close()

    def test_epochs(self, worker):
        assert worker.run(plan(epoch=3)) is None
        worker.reset(3)
        assert worker.run(plan(epoch=0)) is None
        assert worker.run(plan(epoch=3)) is not None


class TestShell:
    def test_threads_stay_within_the_cores(self, worker):
        assert torch.get_num_threads() <= len(os.sched_getaffinity(0))

    def test_beyond_its_beginning_the_cache_becomes_resident_only_with_use(self, model, monkeypatch):
        import psutil

        monkeypatch.setattr(residency, "MOST", 0)
        process = psutil.Process()
        options = {"max_model_len": 96, "block_size": 16, "max_num_seqs": 4000, "kv_cache_memory_bytes": "200M"}
        before = process.memory_info().rss
        worker = started(model, **options)
        assert worker.status().memory["kv_cache"] > 190e6
        assert process.memory_info().rss - before < 60e6
        worker.close()

    def test_weights_that_cannot_fit_are_refused_unread(self, model, monkeypatch):
        monkeypatch.setattr(worker_module, "host_memory", lambda: Memory(total=2**20, available=2**16))
        monkeypatch.setattr(worker_module, "load_decoder", lambda *args, **kwargs: pytest.fail("weights were read"))
        with pytest.raises(NotEnoughMemory, match="for its weights in float32"):
            open_worker(engine_config(model, kv_cache_memory_bytes=None)).load()

    def test_the_cache_is_no_larger_than_all_requests_can_use(self, model):
        worker = started(model, max_model_len=20, max_num_seqs=3, kv_cache_memory_bytes="50M")
        assert worker.layout().blocks == 3 * 5
        worker.close()

    @pytest.mark.parametrize("max_model_len", [1, 2, 16, 17])
    def test_any_context_length_starts(self, model, max_model_len):
        worker = started(model, max_model_len=max_model_len, max_num_seqs=1)
        assert answer(worker.run(plan([Run(0, 1)], admit=[admission(0, [5], [0])]))).tokens
        worker.close()

    @pytest.mark.parametrize(("max_model_len", "rows", "tokens"), [(80, 8, 256), (3, 8, 256), (80, 300, 7), (1, 2, 5)])
    def test_the_measuring_step_of_a_gpu_is_a_legal_one(self, model, monkeypatch, max_model_len, rows, tokens):
        """The step itself runs here; only the device's counters are made up."""
        options = {"max_model_len": max_model_len, "max_num_seqs": rows, "max_num_batched_tokens": tokens}
        worker = started(model, kv_cache_memory_bytes="10M", **options)
        for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda *args: None)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *args: 100)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *args: 350)
        results = []
        ran = worker_module.ModelRunner.run
        monkeypatch.setattr(worker_module.ModelRunner, "run", lambda *args: results.append(ran(*args)) or results[-1])
        assert worker._measured_activations(worker._decoder) == 250
        assert not any(result.failures for result in results)
        sampled = [len(answer(result).tokens) for result in results]
        assert sampled[0] == min(rows, tokens) and sampled[-1] == 0
        worker.close()

    @pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
    def test_a_missing_device_is_a_user_error(self, model):
        with pytest.raises(ConfigError, match="finds no CUDA device"):
            open_worker(engine_config(model, device="cuda"))

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    def test_other_types_run(self, model, dtype):
        worker = started(model, dtype=dtype)
        assert {cache.key.dtype for cache in worker._pool.caches} == {getattr(torch, dtype)}
        assert run(worker, Run(0, 11), admit=[admission(0, PROMPT, [0, 1, 2])]).tokens
        worker.close()

    @pytest.mark.skipif(native() is None, reason="the native library was not built")
    @pytest.mark.parametrize("cache", ["int8", "bfloat16"])
    def test_narrower_caches_run(self, model, cache):
        """The first token comes from what was just computed, and is near enough to the wide cache's to be the same."""
        tokens, sizes = [], []
        for dtype in ("auto", cache):
            worker = started(model, kv_cache_dtype=dtype)
            sizes.append(worker._pool.bytes_per_block)
            assert sizes[-1] == worker._needs().bytes_per_block
            tokens.append(run(worker, Run(0, 11), admit=[admission(0, PROMPT, [0, 1, 2])]).tokens)
            worker.close()
        assert tokens[0] == tokens[1]
        assert sizes[1] < sizes[0]

"""On a CUDA device: the same tokens as on the CPU in float32, and a KV cache sized from measured memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from phalanx.executor.inprocess import InProcessExecutor
from phalanx.sampling.order import first_candidates
from phalanx.step import SamplingState
from tests.helpers.plan_script import Reference, Script
from tests.helpers.plans import Run, admission, answer, plan
from tests.helpers.worker_model import VOCAB, engine_config, reference_decoder, write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none here"),
]

PROMPT = [3, 77, 12, 12, 45, 101, 9, 64, 2, 110, 31]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def executor(model: Path) -> Iterator[InProcessExecutor]:
    executor = InProcessExecutor()
    executor.start(engine_config(model, device="cuda"))
    yield executor
    executor.close()


@pytest.mark.parametrize("seed", range(3))
def test_random_plans_equal_the_cpu_reference(executor, model, seed):
    reference = Reference(reference_decoder(model))
    script = Script(np.random.default_rng(seed), VOCAB, slots=8, blocks=90, block_size=4, max_len=60)
    script.reference = reference if seed else None
    for _ in range(40):
        got = answer(executor.submit(script.next()).result())
        assert not got.failures
        for expected in script.expect:
            assert got.chains[expected.request.slot] == expected.chain(reference)
        script.take(got)


def test_logprobs_equal_the_cpu_reference(executor, model):
    reference = Reference(reference_decoder(model)).logprobs(PROMPT, len(PROMPT))
    asks = SamplingState(temperature=0.0, logprobs=2, prompt_logprobs=2)
    got = answer(executor.submit(plan([Run(0, 11)], admit=[admission(0, PROMPT, [0, 1, 2], sampling=asks)])).result())
    start, entries = got.prompt_logprobs[0]
    assert (start, len(entries)) == (1, 10)
    for position, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(reference[position, PROMPT[position + 1]], abs=1e-3)
    assert got.logprobs[0].rank == 1


def test_candidates_are_ordered_as_on_the_cpu():
    logits = (torch.randn(16, 5000, generator=torch.Generator().manual_seed(0)) * 3).bfloat16().float()
    for k in (1, 128, 5000):
        assert torch.equal(first_candidates(logits.cuda(), k).cpu(), first_candidates(logits, k))
    ties = torch.zeros(4, 5000)
    ties[:, [7, 9]] = 1.0
    assert ties.cuda().max(-1).indices.tolist() == [7] * 4  # greedy ties go to the lowest id


def test_the_cache_is_sized_from_measured_memory(model):
    executor = InProcessExecutor()
    config = engine_config(model, device="cuda", kv_cache_memory_bytes=None, gpu_memory_utilization=0.9)
    layout = executor.start(config)
    (status,) = executor.check_health()
    assert status.device.startswith("cuda") and status.memory["activations"] > 0
    assert layout.blocks == 8 * 20  # all requests at full length: a small model on a large device
    executor.close()

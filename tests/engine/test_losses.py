"""Real tokens across losses: a tiny model in this process, whose worker breaks in the middle of answers, must say what
an undisturbed one says, whatever was asked for, in every type that the native kernels compute in."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from phalanx import LLM, SamplingParams, StructuredOutputs
from phalanx.errors import EngineDead, PoisonRequest
from phalanx.executor.base import WorkerDied
from phalanx.kernels.library import native
from phalanx.step import StepPlan, StepResult
from tests.helpers.scopes import module_or_test
from tests.helpers.tiny_gguf import in_blocks
from tests.helpers.tiny_model import write_tiny_model

PROMPTS = ["hello world", "the stop", "héllo 🙂", "a longer prompt that fills more than one block of the cache"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a", "b"]}
ASKED = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 3},
    "cut": {"temperature": 1.3, "seed": 4, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalties": {
        "temperature": 0.8, "seed": 5, "presence_penalty": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.2,
    },
    "several": {"n": 3, "temperature": 1.0, "seed": 6},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
    "json": {"structured_outputs": StructuredOutputs(json=SCHEMA), "temperature": 1.0, "seed": 7, "ignore_eos": False},
    "regex": {"structured_outputs": StructuredOutputs(regex="[ab]{20}c+d"), "ignore_eos": False},
    "least": {"min_tokens": 12, "stop_token_ids": list(range(0, 256, 3))},
    "stop string": {"stop": ["e", "t"], "min_tokens": 6, "ignore_eos": False},
    "bias": {"logit_bias": {65: 4.0, 66: 4.0}, "bad_words": ["AB"], "temperature": 1.0, "seed": 8},
}  # fmt: skip


TYPES = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "blocks": {"dtype": "bfloat16", "quantization": "gguf"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int8 cache": {"dtype": "bfloat16", "quantization": "gguf", "kv_cache_dtype": "int8"},
}


@pytest.fixture(scope=module_or_test, params=TYPES)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    if native() is None and request.param != "float32":
        pytest.skip("PyTorch's products depend on what else is computed")
    options = {"kv_cache_memory_bytes": "8M", "max_num_batched_tokens": 32, **TYPES[request.param]}
    model = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    if options.get("quantization") == "gguf":
        options |= {"tokenizer": str(model)}
        model = in_blocks(model, tmp_path_factory.mktemp("blocks"))
    with LLM(str(model), **options) as llm:
        yield llm
        status = llm._engine.status()
        assert status.free_blocks == status.blocks


@pytest.fixture
def broken_at(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """Call it with the numbers of steps, counted from now on, in which the worker breaks after computing."""
    executor = llm._engine._executor
    submit = executor.submit
    steps: set[int] = set()
    count = 0

    def breaking(plan: StepPlan) -> Future[StepResult]:
        nonlocal count
        count += 1
        future = submit(plan)
        if count not in steps:
            return future
        broken: Future[StepResult] = Future()
        broken.set_exception(WorkerDied(0, "the test ended it", kind="killed"))
        return broken

    def at(*numbers: int) -> None:
        nonlocal count
        count = 0
        steps.clear()
        steps.update(numbers)

    monkeypatch.setattr(executor, "submit", breaking)
    return at


def all_of(outputs):
    """Everything a client can see but times and what the prefix cache gave."""
    return [
        [
            (c.index, c.text, c.token_ids, c.logprobs, c.cumulative_logprob, c.finish_reason, c.stop_reason)
            for c in output.outputs
        ]
        + [output.prompt_logprobs]
        for output in outputs
    ]


def close(one, other) -> bool:
    """Equal but for the noise of PyTorch's computing in other pieces, which only shows in log-probabilities."""
    if isinstance(one, float):
        return one == pytest.approx(other, abs=2e-4)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(close, one, other))
    if hasattr(one, "__dataclass_fields__"):
        return all(close(getattr(one, name), getattr(other, name)) for name in one.__dataclass_fields__)
    return one == other


@pytest.mark.recovery
@pytest.mark.parametrize("asked", ASKED)
def test_answers_are_the_same_across_losses(llm: LLM, broken_at, asked: str) -> None:
    params = SamplingParams(**{"max_tokens": 30, "temperature": 0.0, "ignore_eos": True, **ASKED[asked]})
    epoch = llm._engine.status().epoch
    broken_at()
    undisturbed = all_of(llm.generate(PROMPTS, params))
    assert llm._engine.status().epoch == epoch
    broken_at(1, 5, 9, 20)
    disturbed = all_of(llm.generate(PROMPTS, params))
    assert llm._engine.status().epoch >= epoch + 3
    assert disturbed == undisturbed if native() is not None else close(disturbed, undisturbed)


def test_who_breaks_the_worker_each_time_is_refused_with_one_error(llm: LLM, broken_at) -> None:
    broken_at(1, 2, 3)
    with pytest.raises(PoisonRequest) as refusal:
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=5))
    assert (refusal.value.status, refusal.value.retryable) == (500, False)
    broken_at()
    assert len(llm.generate(PROMPTS, SamplingParams(max_tokens=5))) == len(PROMPTS)


def test_without_recovery_a_loss_is_the_end(tmp_path) -> None:
    with LLM(str(write_tiny_model(tmp_path)), dtype="float32", enable_recovery=False) as llm:
        executor = llm._engine._executor

        def broken(plan: StepPlan) -> StepResult:
            raise RuntimeError("the device is gone")

        executor._worker.run = broken
        with pytest.raises(EngineDead, match="the device is gone"):
            llm.generate("hello", SamplingParams(max_tokens=3))

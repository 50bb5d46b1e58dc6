"""The demo model with tokens proposed for it: answers, log-probabilities and reasons are those without."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.speculation import WORK as WORK_OF_BENCHMARK
from phalanx import LLM, SamplingParams
from phalanx.kernels.library import native
from phalanx.outputs import RequestOutput
from phalanx.sampling_params import StructuredOutputs

CONFIG = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
CODE = (
    "def read(path):\n    with open(path) as file:\n        return file.read()\n\n"
    "def write(path, text):\n    with open(path, 'w') as file:\n        file.write(text)\n\n"
    "def append(path, text):\n    with open(path, 'a') as file:\n        file.write(text)\n\n"
)
LIST = "one two three four five six seven eight nine ten. " * 4
LINES = {
    "type": "object",
    "properties": {
        "lines": {
            "type": "array", "minItems": 4, "maxItems": 4,
            "items": {
                "type": "object", "properties": {"number": {"type": "integer"}, "name": {"enum": ["left", "right"]}},
                "required": ["number", "name"], "additionalProperties": False,
            },
        }
    },
    "required": ["lines"], "additionalProperties": False,
}  # fmt: skip
WORK: list[tuple[str, dict[str, Any]]] = [
    (CODE, {"temperature": 0.0, "max_tokens": 48}),
    (LIST, {"temperature": 0.0, "max_tokens": 40, "logprobs": 3, "ignore_eos": True}),
    (LIST, {"temperature": 0.7, "seed": 1, "max_tokens": 40, "n": 2}),
    (LIST, {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": 2, "max_tokens": 40, "logprobs": 0}),
    (CODE, {"temperature": 0.5, "seed": 3, "repetition_penalty": 1.1, "max_tokens": 40}),
    (LIST, {"temperature": 0.0, "presence_penalty": 0.4, "frequency_penalty": 0.1, "max_tokens": 40}),
    (LIST, {"temperature": 0.0, "stop": ["seven eight"], "max_tokens": 40}),
    (LIST, {"temperature": 0.0, "min_tokens": 30, "bad_words": [" six"], "logit_bias": {17: 1.0}, "max_tokens": 40}),
    ("Lines as JSON:", {"temperature": 0.0, "max_tokens": 90, "structured_outputs": StructuredOutputs(json=LINES)}),
    (LIST, {"temperature": 0.0, "max_tokens": 8, "prompt_logprobs": 1}),
]

ARITHMETIC: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16", "quantization": "none"},
    "blocks of the file": {"dtype": "bfloat16"},
}


def answers(llm: LLM, work: list[tuple[str, dict[str, Any]]] = WORK) -> list[RequestOutput]:
    prompts, params = [prompt for prompt, _ in work], [SamplingParams(**options) for _, options in work]
    return llm.generate(prompts, params, use_tqdm=False)


def opened(**options: Any) -> LLM:
    return LLM(max_model_len=512, kv_cache_memory_bytes="64M", max_num_seqs=8, **options)


@pytest.fixture(params=ARITHMETIC)
def arithmetic(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Kernels give a row the same bits in any batch; what PyTorch computes instead only does so nearly, in float32."""
    if native() is None and request.param != "float32":
        pytest.skip("the native library was not built")
    return ARITHMETIC[request.param]


def test_every_answer_is_the_same(arithmetic: dict[str, Any]) -> None:
    with opened(**arithmetic) as llm:
        want = answers(llm)
    with opened(**arithmetic, speculative_config=CONFIG) as llm:
        got = answers(llm)
        counts = llm._engine.status().speculation
    for mine, theirs in zip(got, want, strict=True):
        assert mine.outputs == theirs.outputs
        assert mine.prompt_logprobs == theirs.prompt_logprobs
    assert counts.accepted_tokens > 60 and counts.accepted_at[0] > counts.accepted_at[3] > 0
    assert counts.draft_tokens > counts.accepted_tokens


def test_one_request_takes_fewer_steps() -> None:
    work = [(CODE + CODE, {"temperature": 0.0, "max_tokens": 100, "ignore_eos": True})]
    steps, tokens = [], []
    for options in ({}, {"speculative_config": CONFIG}):
        with opened(dtype="float32", **options) as llm:
            tokens.append([output.outputs[0].token_ids for output in answers(llm, work)])
            steps.append(llm._engine.status().step)
    assert tokens[0] == tokens[1]
    assert steps[0] == 100
    assert steps[1] < 60


@pytest.mark.parametrize("name", ["edit", "summary"])
def test_what_quotes_its_prompt_takes_fewer_steps_by_a_third(name: str) -> None:
    """A file to be changed, and a text to be made shorter, as someone who chats asks for it."""
    work = WORK_OF_BENCHMARK[name]
    with opened(dtype="float32", speculative_config=CONFIG) as llm:
        params = SamplingParams(max_tokens=work.output_len, temperature=0.0)
        (output,) = llm.chat([{"role": "user", "content": work.instruction}], params, use_tqdm=False)
        steps = llm._engine.status().step
    assert len(output.outputs[0].token_ids) == work.output_len
    assert 3 * steps < 2 * work.output_len


def test_a_cramped_cache_changes_no_token() -> None:
    """Preempted, resumed and found in the prefix cache."""
    work = [(LIST, {"temperature": 0.8, "seed": seed, "max_tokens": 40}) for seed in range(4)]
    tokens = []
    for options in ({"kv_cache_memory_bytes": "64M"}, {"kv_cache_memory_bytes": 10 * 16 * 30 * 2 * 3 * 64 * 4}):
        with LLM(dtype="float32", max_model_len=112, max_num_seqs=4, speculative_config=CONFIG, **options) as llm:
            tokens.append([output.outputs[0].token_ids for output in answers(llm, work)])
            preemptions = llm._engine.status().preemptions
            assert llm._engine.status().speculation.accepted_tokens > 10
    assert preemptions > 0
    assert tokens[0] == tokens[1]

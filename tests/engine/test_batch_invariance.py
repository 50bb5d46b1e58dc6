"""What a request is answered depends on no other request, bit for bit: the demo model in every type that the native
kernels compute in, alone, in a batch, in pieces, and in a cache so small that requests are preempted."""

from __future__ import annotations

import pytest

from phalanx import LLM, SamplingParams
from phalanx.kernels.library import native
from phalanx.outputs import CompletionOutput

if native() is None:
    pytest.skip("the native library was not built", allow_module_level=True)

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "中国的首都是",
    "Once upon a time, there was a 🐉",
    "1, 2, 3,",
    "Dear Sir or Madam,\n\n" + "I write to you about the weather of last week. " * 9,
]
TYPES = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16", "quantization": "none"},
    "blocks": {"dtype": "bfloat16", "quantization": "gguf"},
    "int8 cache": {"dtype": "bfloat16", "quantization": "gguf", "kv_cache_dtype": "int8"},
}
ROOM = 64 << 20
WANTED = [
    SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=40, temperature=1.0, seed=11, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=40, temperature=1.2, top_p=0.9, top_k=50, seed=5, ignore_eos=True, logprobs=2),
]


def bits(choice: CompletionOutput) -> list[tuple[int, float]]:
    assert choice.logprobs is not None
    return [(position.chosen.token_id, position.chosen.logprob) for position in choice.logprobs]


@pytest.mark.parametrize("kind", TYPES)
def test_answers_are_the_same_alone_batched_in_pieces_and_after_preemption(kind: str) -> None:
    params = [WANTED[n % len(WANTED)] for n in range(len(PROMPTS))]

    def answers(llm: LLM) -> list[list[tuple[int, float]]]:
        return [bits(output.outputs[0]) for output in llm.generate(PROMPTS, params)]

    options = {**TYPES[kind], "max_model_len": 256}
    with LLM(**options, kv_cache_memory_bytes=ROOM) as llm:
        alone = [bits(llm.generate(each, its)[0].outputs[0]) for each, its in zip(PROMPTS, params, strict=True)]
        assert answers(llm) == alone
        block = ROOM // llm._engine.status().blocks
    cramped = {"max_num_batched_tokens": 24, "kv_cache_memory_bytes": 17 * block, "enable_prefix_caching": False}
    with LLM(**options, **cramped) as llm:
        assert answers(llm) == alone
        assert llm._engine.status().preemptions > 0

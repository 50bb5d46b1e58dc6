"""The demo model from text to text: through LLM, and through AsyncEngine with its own process."""

import pytest

from phalanx import LLM, AsyncEngine, EngineConfig, SamplingParams

PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "中国的首都是", "Once upon a time, there was a 🐉"]
GREEDY = SamplingParams(max_tokens=16, temperature=0.0)
DRAWN = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, seed=17)
OPTIONS = {"dtype": "float32", "max_model_len": 512}
QUESTION = [{"role": "user", "content": "What is 2+2?"}]
BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4


@pytest.fixture(scope="module")
def alone():
    """What each prompt is answered when it runs alone, and the text of a chat."""
    with LLM(**OPTIONS, kv_cache_memory_bytes="64M") as llm:
        choices = [llm.generate(prompt, DRAWN)[0].outputs[0] for prompt in PROMPTS]
        batch = [output.outputs[0] for output in llm.generate(PROMPTS, DRAWN)]
        assert [choice.token_ids for choice in batch] == [choice.token_ids for choice in choices]
        assert "Paris" in llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].text
        return choices, llm.chat(QUESTION, GREEDY)[0].outputs[0].text


async def test_the_engine_process_streams_the_same(alone):
    choices, chat = alone
    assert "4" in chat
    async with AsyncEngine(EngineConfig.from_options(**OPTIONS, kv_cache_memory_bytes="64M")) as engine:
        for prompt, expected in zip(PROMPTS[2:], choices[2:], strict=True):
            tokens, text = [], ""
            async for delta in engine.generate(prompt, DRAWN):
                tokens += delta.outputs[0].token_ids
                text += delta.outputs[0].text
            assert (tokens, text) == (expected.token_ids, expected.text)
        rendered = await engine.apply_chat_template(QUESTION)
        stream = await engine.submit(rendered, GREEDY, add_special_tokens=False, source="messages")
        assert "".join([delta.outputs[0].text async for delta in stream]) == chat


def test_a_cramped_cache_changes_no_token(alone):
    choices, _ = alone
    options = OPTIONS | {"max_model_len": 48, "kv_cache_memory_bytes": 4 * 16 * BYTES_PER_TOKEN}
    with LLM(**options, max_num_seqs=4) as llm:
        outputs = llm.generate(PROMPTS, DRAWN)
        assert [output.outputs[0].token_ids for output in outputs] == [choice.token_ids for choice in choices]
        assert llm._engine.status().preemptions > 0

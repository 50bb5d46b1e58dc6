"""The real demo model in float32 against transformers, on ten prompts of different kinds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phalanx.checkpoint.locate import locate
from phalanx.text.tokenizer import load_tokenizer
from tests.helpers.decoders import decoder_of
from tests.helpers.stepping import Driver

TOKENS = 24


def _chat(user: str, system: str | None = None) -> str:
    head = "" if system is None else f"<|im_start|>system\n{system}<|im_end|>\n"
    return f"{head}<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"


PROMPTS = {
    "plain": "The capital of France is",
    "chat": _chat("Name three fruits.", "You are a helpful AI assistant named SmolLM, trained by Hugging Face"),
    "empty system prompt": _chat("What is 2 + 2?", ""),
    "code": "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return ",
    "chinese": "人工智能的未来是",
    "emoji": "🎉🎂 Happy birthday! 👩‍👩‍👧‍👦 We wish you",
    "json": '{"name": "Ada", "born": 1815, "fields": ["mathematics",',
    "mathematics": "Let $x^2 + 3x - 4 = 0$. Then the roots are",
    "one token": "Once",
    "long": "\n".join(f"{i}. The number {i} squared is {i * i}, and its double is {2 * i}." for i in range(1, 28))
    + "\n28.",
}


@pytest.fixture(scope="module")
def gguf() -> Path:
    path = locate(None).weight_files[0]
    assert path.suffix == ".gguf"
    return path


def test_ten_prompts(gguf: Path) -> None:
    """Greedy tokens through our cache are what transformers would choose at each place, and logits agree.

    transformers sees each prompt with our answer in one pass: where its best token at every place is ours, its own
    greedy answer is the same.
    """
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(locate(None))
    decoder = decoder_of(gguf)
    driver = Driver(decoder, blocks=160, block_size=16)
    reference = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    for name, prompt in PROMPTS.items():
        ids = tokenizer.encode(prompt)
        stream = driver.stream(ids, room=TOKENS)
        first = driver.prefill(stream, [300, 1, 64])
        answer = driver.greedy_after(stream, first[-1], TOKENS)
        with torch.inference_mode():
            expected = reference(torch.tensor([ids + answer[:-1]])).logits[0]
        assert expected[len(ids) - 1 :].argmax(-1).tolist() == answer, name
        assert (first - expected[: len(ids)]).abs().max() < 1e-3, name
    assert len(tokenizer.encode(PROMPTS["long"])) > 500


def test_sizes_are_real(gguf: Path) -> None:
    """The numbers that the planner and the memory budget use are what is really held."""
    for dtype in (torch.float32, torch.bfloat16):
        decoder = decoder_of(gguf, dtype=dtype)
        name = str(dtype).removeprefix("torch.")
        assert decoder.nbytes == decoder.spec.weight_bytes(name) == 134_515_008 * dtype.itemsize
        caches = decoder.allocate_caches(2, 16)
        assert sum(c.key.nbytes + c.value.nbytes for c in caches) == 32 * decoder.spec.kv_bytes_per_token(name)

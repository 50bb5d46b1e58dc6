"""What one rank in this process answers: the reference that every layout must equal."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from phalanx.llm import LLM
from phalanx.sampling_params import SamplingParams


def continuations(model: str, prompts: Sequence[str], tokens: int) -> list[str]:
    """Greedy, in float32, end-of-text ignored. The model is loaded each time that something new is asked."""
    return list(_continuations(model, tuple(prompts), tokens))


@cache
def _continuations(model: str, prompts: tuple[str, ...], tokens: int) -> tuple[str, ...]:
    with LLM(model, dtype="float32") as llm:
        outputs = llm.generate(list(prompts), SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
        return tuple(output.outputs[0].text for output in outputs)

"""The demo model, split: in float32 the tokens of one rank, whatever the layout."""

from __future__ import annotations

import pytest

from phalanx import LLM, SamplingParams

OPTIONS = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": "64M", "max_num_seqs": 8}
PROMPTS = ["Once upon a time", "The capital of France is", "def fibonacci(n):", "Water boils at"]
LAYOUTS = {
    "tp2": {"tensor_parallel_size": 2},
    "2 and 1": {"pipeline_tensor_sizes": "2,1"},
    "tp3": {"tensor_parallel_size": 3},
    "tp4": {"tensor_parallel_size": 4},
    "tp7": {"tensor_parallel_size": 7},
    "pp2": {"pipeline_parallel_size": 2},
    "tp2 pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "pp3, as told": {"pipeline_parallel_size": 3, "pipeline_split": "20,4,6"},
    "tp2, 3 to 1": {"tensor_parallel_size": 2, "tensor_split": "3,1"},
}
FAST = ("tp2", "2 and 1")


def answers(**layout) -> list[list[int]]:
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    drawn = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.95, seed=11, ignore_eos=True)
    with LLM(**OPTIONS, **layout) as llm:
        assert llm.info.executor == ("mp" if layout else "inprocess")
        outputs = llm.generate(PROMPTS, [greedy, greedy, drawn, drawn], use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected():
    return answers()


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in LAYOUTS])
def test_equals_one_rank(expected, name):
    assert answers(**LAYOUTS[name]) == expected

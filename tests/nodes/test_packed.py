"""`--transport packed` between two hosts: long prompts travel as 8-bit integers, what is short as it is."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from phalanx import LLM, SamplingParams
from tests.helpers.hosts import Host
from tests.helpers.node_cluster import Cluster, running
from tests.helpers.one_rank import continuations
from tests.helpers.tiny_model import write_tiny_model

LONG = [3 + 7 * n % 250 for n in range(1500)]
"""Sums of 1500 × 32 float32: above 64 KiB."""
SHORT = ("hello there", "the quick brown fox")


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_tiny_model(tmp_path / "long", positions=2048))


def first_logprob(cluster: Cluster) -> float:
    body = {"prompt": LONG, "max_tokens": 1, "temperature": 0, "logprobs": 1}
    with cluster.hosts[0].network():
        answer = httpx.post("http://127.0.0.1:8000/v1/completions", json=body, timeout=60)
    found: float = answer.raise_for_status().json()["choices"][0]["logprobs"]["token_logprobs"][0]
    return found


def test_what_is_long_is_rounded_and_what_is_short_is_not(two_hosts: list[Host], model: str, tmp_path: Path) -> None:
    with LLM(model, dtype="float32", kv_cache_memory_bytes="8M") as llm:
        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=1)
        (output,) = llm.generate([{"prompt_token_ids": LONG}], params)
        (position,) = output.outputs[0].logprobs or ()
        exact = position.chosen.logprob
    options = ("-tp", "2", "--dtype", "float32", "--kv-cache-memory-bytes", "8M", "--transport", "packed")
    with running(two_hosts, tmp_path, model, *options) as cluster:
        assert [cluster.complete(prompt, 48) for prompt in SHORT] == continuations(model, SHORT, 48)
        rounded = first_logprob(cluster)
        assert 1e-5 < abs(rounded - exact) < 0.3, (rounded, exact)

"""Automatic shares over hosts that are not alike: the slow or small one gets less, and the answers stay the same."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from tests.helpers.hosts import Host, can_limit
from tests.helpers.node_cluster import Cluster
from tests.helpers.one_rank import continuations
from tests.helpers.tiny_model import HEADS, write_tiny_model

PROMPTS = ("hello there", "the quick brown fox")
TOKENS = 48
LAYERS = 8


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "deep", layers=LAYERS)


@pytest.fixture
def cluster_of(lasting_hosts: list[Host], tmp_path: Path):
    begun = []

    def start(model: Path, *options: str, **second: object) -> Cluster:
        """The second host is limited."""
        cluster = Cluster(lasting_hosts, tmp_path, str(model), "--dtype", "float32", *options)
        begun.append(cluster)
        cluster.start(0)
        cluster.start(1, **second)
        cluster.nodes[0].says("Ready: ")
        return cluster

    yield start
    for cluster in begun:
        cluster.close()


def workers(cluster: Cluster) -> list[dict]:
    with cluster.hosts[0].network():
        return httpx.get("http://127.0.0.1:8000/status").json()["workers"]


@pytest.mark.skipif(not can_limit("cpu"), reason="processor time cannot be limited here")
def test_a_slow_host_gets_fewer_heads(cluster_of, tiny: Path) -> None:
    """A quarter of a core, against all of this machine's."""
    cluster = cluster_of(tiny, "-tp", "2", cpus=0.25)
    heads = [worker["heads"] for worker in workers(cluster)]
    assert sum(heads) == HEADS and heads[0] == 4, cluster.outputs()
    assert re.search(r"Shares: auto, by measured speed 1\.00 / 0\.[12]\d and free memory ", cluster.nodes[0].output)
    assert [cluster.complete(prompt, TOKENS) for prompt in PROMPTS] == continuations(str(tiny), PROMPTS, TOKENS)


@pytest.mark.skipif(not can_limit("memory"), reason="memory cannot be limited here")
def test_a_small_host_gets_fewer_layers(cluster_of, deep: Path) -> None:
    """Half a gigabyte, of which a quarter is for a cache that could use 512 MB on each of two equal stages."""
    options = ("-pp", "2", "--max-num-seqs", "2048")
    cluster = cluster_of(deep, *options, memory_mb=512)
    layers = [worker["layers"] for worker in workers(cluster)]
    cut = int(layers[0].partition("-")[2])
    assert cut > LAYERS / 2, cluster.outputs()
    assert f"Pipeline split: {cut},{LAYERS - cut} layers" in cluster.nodes[0].output
    assert re.search(r"Shares: auto, by measured .*free memory \S+ GiB / \S+ MiB", cluster.nodes[0].output)
    assert [cluster.complete(prompt, TOKENS) for prompt in PROMPTS] == continuations(str(deep), PROMPTS, TOKENS)

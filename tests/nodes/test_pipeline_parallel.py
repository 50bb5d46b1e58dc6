"""Two stages on two hosts: equal to one rank; each way in which one of the nodes ends in good order.

The tests of this file share one cluster, in this order, until the last one ends it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.hosts import Host
from tests.helpers.node_cluster import Cluster, running
from tests.helpers.one_rank import continuations

PROMPTS = ("hello there", "the quick brown fox", "1 2 3 4 5 6 7 8 9")
TOKENS = 48


@pytest.fixture(scope="module")
def cluster(lasting_hosts: list[Host], tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Without a transport key."""
    folder = tmp_path_factory.mktemp("cluster")
    options = ("-pp", "2", "--dtype", "float32", "--replacement-timeout", "1")
    with running(lasting_hosts, folder, str(tiny), *options) as cluster:
        yield cluster


def test_equal_to_one_rank(cluster: Cluster, tiny: Path) -> None:
    expected = continuations(str(tiny), PROMPTS, TOKENS)
    assert [cluster.complete(prompt, TOKENS) for prompt in PROMPTS] == expected


def test_what_it_says(cluster: Cluster) -> None:
    head, other = cluster.nodes[0].output, cluster.nodes[1].output
    assert head.count("ANYBODY who can reach 10.77.0.10:29500 can join") == 1
    assert "WARNING: no transport key" in other
    assert "share every layer" not in head, "only stages talk across nodes"
    assert "Shares: auto, equal, because measured speed" in head, "the hosts are one machine"


def test_node_1_is_told_to_end(cluster: Cluster, tiny: Path) -> None:
    """SIGTERM there: it leaves, node 0 says who has left, and why, and goes on alone."""
    other = cluster.nodes[1].process
    begin = time.monotonic()
    other.send_signal(signal.SIGTERM)
    assert cluster.nodes[1].ends(5) == 0
    assert "SIGTERM: this node ends." in cluster.nodes[1].output
    cluster.nodes[0].says(r"Lost node 1 \(host1, 10\.77\.0\.11\), with rank 1: it was ended there by SIGTERM", 5)
    assert [cluster.complete(PROMPTS[0], TOKENS)] == continuations(str(tiny), PROMPTS[:1], TOKENS)
    assert time.monotonic() - begin < 12
    assert not cluster.hosts[1].pids()


def test_node_0_is_told_to_end(lasting_hosts: list[Host], tiny: Path, tmp_path: Path) -> None:
    """While it loads: nobody waits for anybody, and nothing is left."""
    for host in lasting_hosts:
        host.kill()
    cluster = Cluster(lasting_hosts, tmp_path, str(tiny), "-pp", "2", "--dtype", "float32")
    try:
        for rank in range(2):
            cluster.start(rank)
        cluster.nodes[1].says("starting rank 1 here")
        cluster.nodes[0].process.send_signal(signal.SIGTERM)
        assert cluster.nodes[0].ends(8) == 0
        assert cluster.nodes[1].ends(5) == 0
        assert "node 0 has ended" in cluster.nodes[1].output
        assert cluster.nothing_left()
    finally:
        cluster.close()

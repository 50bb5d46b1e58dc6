"""A replica on each of two hosts behind one server: both compute, and when one host is gone its streams go on at the
other, at the next token, whether it comes back or not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.hosts import Host
from tests.helpers.node_cluster import Cluster, running
from tests.helpers.one_rank import continuations
from tests.helpers.processes import wait_until
from tests.nodes.test_lost_nodes import PROMPT, TOKENS, Asking, ranks, status


@pytest.fixture(scope="module")
def cluster(lasting_hosts: list[Host], tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    options = ("-dp", "2", "--dtype", "float32", "--kv-cache-memory-bytes", "8M")
    with running(lasting_hosts, folder, str(tiny), *options, env={"PHALANX_TRANSPORT_KEY": "secret"}) as cluster:
        yield cluster


def states(cluster: Cluster) -> list[str]:
    return [engine["state"] for engine in status(cluster)["engines"]]


def test_each_host_has_a_replica(cluster: Cluster) -> None:
    assert ranks(cluster) == ["host0", "host1"]
    assert states(cluster) == ["ready", "ready"]
    assert status(cluster)["mesh"]["dp"] == 2
    assert "1 of 1 nodes are here" in cluster.nodes[0].output


@pytest.mark.recovery
def test_streams_outlive_their_host_and_it_is_used_again(cluster: Cluster, tiny: Path) -> None:
    (expected,) = continuations(str(tiny), [PROMPT], TOKENS)
    streams = [Asking(cluster) for _ in range(6)]
    for stream in streams:
        stream.under_way()
    assert all(engine["running"] for engine in status(cluster)["engines"])
    begin = time.monotonic()
    cluster.hosts[1].kill()
    assert [stream.answer() for stream in streams] == [expected] * 6
    assert states(cluster)[0] == "ready"
    assert "requests go on elsewhere" in cluster.nodes[0].output, cluster.outputs()
    assert time.monotonic() - begin < 60
    cluster.start(1)
    assert wait_until(lambda: states(cluster) == ["ready", "ready"], 90), cluster.outputs()
    streams = [Asking(cluster) for _ in range(4)]
    assert [stream.answer() for stream in streams] == [expected] * 4

"""One tensor group over two hosts that serve together: equal to one rank, listening where it should, and, at last, cut.

The tests of this file share one cluster, in this order.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from tests.helpers.hosts import Host
from tests.helpers.node_cluster import Cluster
from tests.helpers.one_rank import continuations
from tests.helpers.processes import wait_until
from tests.nodes.test_lost_nodes import PROMPT, TOKENS, Asking

PROMPTS = ("hello there", "the quick brown fox", "1 2 3 4 5 6 7 8 9")
SHORT = 48


@pytest.fixture(scope="module")
def cluster(lasting_hosts: list[Host], tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The hosts have a container bridge with one address, a port without a cable, and names that mean loopback."""
    for host in lasting_hosts:
        host.add_dead_end("docker0", "172.17.0.1/16")
        host.add_dead_end("eth9", "10.77.0.99/24", up=False)
    folder = tmp_path_factory.mktemp("cluster")
    env = {"PHALANX_TRANSPORT_KEY": "open sesame"}
    options = ("-tp", "2", "--dtype", "float32", "--replacement-timeout", "1")
    cluster = Cluster(lasting_hosts, folder, str(tiny), *options, env=env)
    try:
        for rank, host in enumerate(lasting_hosts):
            cluster.start(rank, hosts_file=f"127.0.0.1 localhost\\n127.0.1.1 {host.name}\\n")
        cluster.nodes[0].says("Ready: ")
        yield cluster
    finally:
        cluster.close()


def test_equal_to_one_rank(cluster: Cluster, tiny: Path) -> None:
    expected = continuations(str(tiny), PROMPTS, SHORT)
    assert [cluster.complete(prompt, SHORT) for prompt in PROMPTS] == expected


def test_what_it_says(cluster: Cluster) -> None:
    head, other = cluster.nodes[0].output, cluster.nodes[1].output
    assert "rank 0 on node 0, rank 1 on node 1 (host1, 10.77.0.11)" in head
    assert "share every layer across nodes" in head, "a tensor group across nodes gets a warning"
    assert "No transport key" not in head + other
    assert "open sesame" not in head + other
    assert "Node 1 of 2: joined node 0 (host0) at 10.77.0.10:29500; this node is 10.77.0.11." in other
    assert "starting rank 1 here" in other


def test_one_rank_a_host(cluster: Cluster) -> None:
    with cluster.hosts[0].network():
        status = httpx.get("http://127.0.0.1:8000/status").json()
    workers = {worker["rank"]: worker for worker in status["workers"]}
    assert {rank: worker["node"] for rank, worker in workers.items()} == {0: "host0", 1: "host1"}
    for rank, host in enumerate(cluster.hosts):
        assert workers[rank]["pid"] in host.pids()


def test_nothing_listens_to_every_network(cluster: Cluster) -> None:
    listening = {host.name: host.listening() for host in cluster.hosts}
    assert {address for address, _ in listening["host0"]} == {"127.0.0.1", "10.77.0.10"}
    assert [port for address, port in listening["host0"] if address == "127.0.0.1"] == [8000]
    assert {address for address, _ in listening["host1"]} == {"10.77.0.11"}
    assert len(listening["host1"]) == 1, "only the rank's own door"


def test_a_rank_of_another_node_is_replaced(cluster: Cluster, tiny: Path) -> None:
    """Killed in the middle of an answer: the answer goes on as if nothing had happened."""
    with cluster.hosts[0].network():
        workers = httpx.get("http://127.0.0.1:8000/status").json()["workers"]
    pid = next(worker["pid"] for worker in workers if worker["rank"] == 1)
    asking = Asking(cluster)
    asking.under_way()
    os.kill(pid, signal.SIGKILL)
    assert [asking.answer()] == continuations(str(tiny), [PROMPT], TOKENS)
    cluster.nodes[1].says(r"rank 1 has ended: it was killed by SIGKILL", 30)


def test_cut(cluster: Cluster, tiny: Path) -> None:
    """The network falls silent: that is noticed within five seconds, on both sides, and what is left goes on."""
    answers: list[tuple[float, str]] = []

    def ask() -> None:
        while len(answers) < 1000 and (not answers or answers[-1][0] < begin + 6):
            text = cluster.complete(PROMPTS[0], 200, timeout=30)
            answers.append((time.monotonic(), text))

    begin = time.monotonic() + 3600
    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.5)
    begin = time.monotonic()
    cluster.hosts[1].cut()
    asking.join(40)
    assert {text for _, text in answers} == set(continuations(str(tiny), PROMPTS[:1], 200))
    times = [at for at, _ in answers]
    assert max(b - a for a, b in pairwise(times)) < 8, "noticed in 3 s, waited for 1 s"
    lost = r"node 1 \(host1, 10\.77\.0\.11\) was lost, with rank 1: nothing has come from it for \d s"
    assert re.search(lost, cluster.nodes[0].output), cluster.outputs()
    assert cluster.nodes[1].ends(max(0.1, begin + 6 - time.monotonic())) == 1
    assert "Node 0 at 10.77.0.10:29500 was lost: nothing has come from it for" in cluster.nodes[1].output
    assert wait_until(lambda: not cluster.hosts[1].pids(), 5)
    cluster.nodes[0].process.send_signal(signal.SIGTERM)
    assert cluster.nodes[0].ends(10) == 0
    assert cluster.nothing_left()

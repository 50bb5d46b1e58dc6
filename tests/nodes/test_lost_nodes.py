"""Nodes that vanish in mid-stream: the model is split anew over those that are left, the text stays the same, and a
node that is started again is taken in when nobody is waiting."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.hosts import Host
from tests.helpers.node_cluster import Cluster, running
from tests.helpers.one_rank import continuations
from tests.helpers.processes import wait_until

PROMPT, TOKENS = "hello there", 240
OPTIONS = ("--dtype", "float32", "--replacement-timeout", "1")


class Asking(threading.Thread):
    """A long streamed answer, on its own thread. From `under_way` to `answer` it goes on slowly."""

    def __init__(self, cluster: Cluster):
        super().__init__(daemon=True)
        self.cluster, self.text, self.error = cluster, "", None
        cluster.pace.hold()
        self.start()

    def run(self) -> None:
        body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        url = "http://127.0.0.1:8000/v1/completions"
        try:
            with self.cluster.hosts[0].network(), httpx.stream("POST", url, json=body, timeout=120) as answer:
                answer.raise_for_status()
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        chunk = httpx.Response(200, content=line[6:]).json()
                        if "error" in chunk:
                            self.error = chunk["error"]
                            return
                        self.text += "".join(choice["text"] for choice in chunk["choices"])
        except httpx.HTTPError as error:
            self.error = error

    def under_way(self) -> None:
        assert wait_until(lambda: len(self.text) > 20 or self.error is not None, 60), self.cluster.outputs()
        assert self.is_alive() and self.error is None, f"{self.error}\n{self.cluster.outputs()}"

    def answer(self, seconds: float = 60) -> str:
        self.cluster.pace.release()
        self.join(seconds)
        assert not self.is_alive() and self.error is None, f"{self.error}\n{self.cluster.outputs()}"
        return self.text


def status(cluster: Cluster) -> dict[str, Any]:
    with cluster.hosts[0].network():
        return httpx.get("http://127.0.0.1:8000/status", timeout=10).json()


def ranks(cluster: Cluster) -> list[str]:
    """The node of each."""
    return [worker["node"] for worker in status(cluster)["workers"]]


@pytest.fixture(scope="module")
def expected(tiny: Path) -> str:
    return continuations(str(tiny), [PROMPT], TOKENS)[0]


def test_a_rank_that_dies_before_it_joins_is_named_with_its_node(
    two_hosts: list[Host], tiny: Path, tmp_path: Path
) -> None:
    cluster = Cluster(two_hosts, tmp_path, str(tiny), "-tp", "2", "--dtype", "float32")
    try:
        node = cluster.start(0)
        cluster.start(1, env={"PHALANX_FAULT": "at=join,rank=1,do=kill"})
        assert node.ends(60) == 1
        words = "error: Worker 1 on host1 died: it was killed by SIGKILL before it could join."
        assert node.output.splitlines()[-1] == words
        assert cluster.nothing_left()
    finally:
        cluster.close()


@pytest.mark.recovery
def test_a_killed_node_and_its_return(two_hosts: list[Host], tiny: Path, tmp_path: Path, expected: str) -> None:
    with running(two_hosts, tmp_path, str(tiny), "-tp", "2", *OPTIONS) as cluster:
        assert ranks(cluster) == ["host0", "host1"]
        asking = Asking(cluster)
        asking.under_way()
        two_hosts[1].kill()
        assert asking.answer() == expected
        assert ranks(cluster) == ["host0"]
        assert status(cluster)["places"] == {"configured": 2, "used": 1, "returned": None}
        cluster.start(1)
        cluster.nodes[0].says(r"Node 1 \(host1, 10\.77\.0\.11\) is back", 60)
        assert wait_until(lambda: ranks(cluster) == ["host0", "host1"], 60), cluster.outputs()
        assert cluster.complete(PROMPT, TOKENS) == expected
        whole = {"configured": 2, "used": 2, "returned": None}
        assert wait_until(lambda: status(cluster)["places"] == whole, 30), status(cluster)["places"]


@pytest.mark.recovery
@pytest.mark.slow
def test_another_machine_stands_in(three_hosts: list[Host], tiny: Path, tmp_path: Path, expected: str) -> None:
    """Beyond the configured nodes it is turned away; in place of one that is lost it is used, once nobody asks."""
    *two, spare = three_hosts
    with running(two, tmp_path, str(tiny), "-tp", "2", *OPTIONS) as cluster:
        cluster.hosts.append(spare)
        assert cluster.start(2).ends(30) == 1
        assert "A machine beyond these is not used" in cluster.nodes[2].output
        two[1].kill()
        asking = Asking(cluster)
        asking.under_way()
        cluster.hosts[1] = spare
        cluster.start(1)
        cluster.nodes[0].says(r"Node 1 \(host2, 10\.77\.0\.12\) is back", 60)
        assert asking.answer() == expected
        assert wait_until(lambda: ranks(cluster) == ["host0", "host2"], 60), cluster.outputs()
        assert cluster.complete(PROMPT, TOKENS) == expected


@pytest.mark.recovery
@pytest.mark.slow
def test_an_engine_lost_after_a_node(two_hosts: list[Host], tiny: Path, tmp_path: Path, expected: str) -> None:
    """The next engine does not wait for a node that does not come back, but takes it in when it does."""
    with running(two_hosts, tmp_path, str(tiny), "-tp", "2", *OPTIONS) as cluster:
        two_hosts[1].kill()
        assert cluster.complete(PROMPT, TOKENS) == expected
        asking = Asking(cluster)
        asking.under_way()
        os.kill(status(cluster)["engine"]["pid"], signal.SIGKILL)
        assert asking.answer() == expected
        assert ranks(cluster) == ["host0"]
        cluster.start(1)
        cluster.nodes[0].says(r"Node 1 \(host1, 10\.77\.0\.11\) is back", 60)
        assert wait_until(lambda: ranks(cluster) == ["host0", "host1"], 60), cluster.outputs()
        assert cluster.complete(PROMPT, TOKENS) == expected


@pytest.mark.recovery
@pytest.mark.slow
def test_down_to_the_last_and_up_again(three_hosts: list[Host], tiny: Path, tmp_path: Path, expected: str) -> None:
    """One node falls silent, one is killed; the latter comes back first, in mid-stream, and is not taken in before."""
    with running(three_hosts, tmp_path, str(tiny), "-tp", "3", *OPTIONS) as cluster:
        for host, left in ((2, ["host0", "host1"]), (1, ["host0"])):
            asking = Asking(cluster)
            asking.under_way()
            three_hosts[host].cut() if host == 2 else three_hosts[host].kill()
            assert asking.answer() == expected
            assert ranks(cluster) == left
        assert cluster.nodes[2].ends(10) == 1
        three_hosts[2].heal()
        for host, there in ((1, ["host0", "host1"]), (2, ["host0", "host1", "host2"])):
            cluster.start(host)
            cluster.nodes[0].says(rf"Node {host} \(host{host}, \S+\) is back", 60)
            assert wait_until(lambda there=there: ranks(cluster) == there, 60), cluster.outputs()
            assert cluster.complete(PROMPT, TOKENS) == expected


@pytest.mark.recovery
@pytest.mark.slow
def test_two_nodes_that_do_not_reach_each_other(
    three_hosts: list[Host], tiny: Path, tmp_path: Path, expected: str
) -> None:
    """Node 0 reaches both, so that neither is lost; one goes unused until the link is there again."""
    with running(three_hosts, tmp_path, str(tiny), "-tp", "3", *OPTIONS) as cluster:
        asking = Asking(cluster)
        asking.under_way()
        three_hosts[1].cut_from(three_hosts[2])
        assert asking.answer(90) == expected
        assert len(ranks(cluster)) == 2 and ranks(cluster)[0] == "host0", cluster.outputs()
        three_hosts[1].heal_to(three_hosts[2])
        assert wait_until(lambda: ranks(cluster) == ["host0", "host1", "host2"], 60), cluster.outputs()
        assert cluster.complete(PROMPT, TOKENS) == expected


@pytest.mark.recovery
@pytest.mark.slow
def test_a_frozen_node_wakes_up_too_late(two_hosts: list[Host], tiny: Path, tmp_path: Path, expected: str) -> None:
    with running(two_hosts, tmp_path, str(tiny), "-pp", "2", *OPTIONS) as cluster:
        asking = Asking(cluster)
        asking.under_way()
        two_hosts[1].signal_all(signal.SIGSTOP)
        assert asking.answer(90) == expected
        assert ranks(cluster) == ["host0"]
        two_hosts[1].signal_all(signal.SIGCONT)
        assert cluster.nodes[1].ends(15) == 1
        assert not two_hosts[1].pids()
        cluster.start(1)
        assert wait_until(lambda: ranks(cluster) == ["host0", "host1"], 60), cluster.outputs()
        assert cluster.complete(PROMPT, TOKENS) == expected


@pytest.mark.slow
def test_a_node_that_has_changed_is_not_taken_in(two_hosts: list[Host], tiny: Path, tmp_path: Path) -> None:
    with running(two_hosts, tmp_path, str(tiny), "-tp", "2", *OPTIONS) as cluster:
        two_hosts[1].kill()
        cluster.nodes[0].says("The model is split anew: 1 rank, on host0", 20)
        other = cluster.start(1, hide=[tiny])
        assert other.ends(60) == 1
        assert f"Node 1 (host1) cannot use the model: {tiny} holds no model" in other.output
        assert ranks(cluster) == ["host0"]

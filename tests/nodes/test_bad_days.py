"""Long links, other addresses, hung and killed nodes, sealed traffic, a real model: what takes longer to try."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path

import httpx
import pytest

from phalanx.checkpoint.locate import locate
from tests.helpers import bad_network
from tests.helpers.bad_network import bad_cable
from tests.helpers.hosts import Host, can_limit
from tests.helpers.node_cluster import Cluster, running
from tests.helpers.one_rank import continuations
from tests.helpers.processes import wait_until
from tests.helpers.source import ROOT

pytestmark = pytest.mark.slow

PROMPTS = ("hello there", "the quick brown fox")
OFF = "--no-enable-recovery"
SAID = "Xylophones quarrel with zeppelins"
"""A prompt whose tokens would be seen on the wire."""


def failure(cluster: Cluster, seconds: float) -> str:
    """The error that a client gets within `seconds`, asking again and again."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            cluster.complete("hello", 100, timeout=max(0.5, deadline - time.monotonic()))
        except httpx.HTTPStatusError as error:
            return error.response.text
    raise AssertionError("no error:\n" + cluster.outputs())


@pytest.mark.parametrize("layout", ["-tp", "-pp"])
def test_the_demo_model(layout: str, two_hosts: list[Host], tmp_path: Path) -> None:
    model = str(locate(None).weight_files[0])
    expected = continuations(model, PROMPTS, 64)
    with running(two_hosts, tmp_path, model, layout, "2", "--dtype", "float32", "--max-model-len", "512") as cluster:
        assert [cluster.complete(prompt, 64) for prompt in PROMPTS] == expected


def test_a_long_link(two_hosts: list[Host], tiny: Path, tmp_path: Path) -> None:
    """30 to 40 ms each way and one frame in a hundred lost: slow, and right."""
    if reason := bad_network.missing():
        pytest.skip(reason)
    expected = continuations(str(tiny), PROMPTS, 24)
    with bad_cable(two_hosts[1], delay=0.03, jitter=0.01, loss=0.01) as cable:
        with running(two_hosts, tmp_path, str(tiny), "-tp", "2", "--dtype", "float32") as cluster:
            begin = time.monotonic()
            assert [cluster.complete(prompt, 24) for prompt in PROMPTS] == expected
            assert time.monotonic() - begin > 2 * 24 * 0.12, "the delay counted"
            cable.silent = True  # shorter than what counts as lost
            time.sleep(1.8)
            cable.silent = False
            assert cluster.complete(PROMPTS[0], 24) == expected[0]
        assert cable.frames > 1000


@pytest.mark.parametrize("sealed", [False, True])
def test_what_can_be_read_on_the_way(sealed: bool, two_hosts: list[Host], tiny: Path, tmp_path: Path) -> None:
    """Keys never; contents only where encryption is not asked for."""
    if reason := bad_network.missing():
        pytest.skip(reason)
    key = "correct horse battery staple"
    arguments = ["-tp", "2", "--dtype", "float32", *(["--encrypt-transport"] if sealed else [])]
    with (
        bad_cable(two_hosts[1]) as cable,
        running(two_hosts, tmp_path, str(tiny), *arguments, env={"PHALANX_TRANSPORT_KEY": key}) as cluster,
    ):
        assert cluster.complete(SAID, 24) == continuations(str(tiny), (SAID,), 24)[0]
        recorded = bytes(cable.recorded)
    assert len(recorded) > 50_000
    assert key.encode() not in recorded
    for word in (b"model.safetensors", b"float32", b"host1", str(tiny).encode()):
        assert (word in recorded) is not sealed, word


def test_the_commands_of_the_documentation(two_hosts: list[Host], tiny: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs/multi-node.md").read_text()
    blocks = re.findall(r"```console\n(.*?)```", page, re.DOTALL)[:2]
    with contextlib.ExitStack() as ending:
        logs = []
        for host, node, block in zip(two_hosts, "ab", blocks, strict=True):
            ending.callback(host.kill)
            lines = [line.removeprefix(f"node-{node}$ ") for line in block.splitlines()]
            script = "\n".join(lines).replace("/models/x", str(tiny)).replace("10.0.0.1", two_hosts[0].address)
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            logs.append(tmp_path / f"{node}.log")
            with logs[-1].open("wb") as output:
                host.start(["bash", "-ec", script], env={"PATH": path, "OMP_NUM_THREADS": "1"}, stdout=output, stderr=2)
        assert wait_until(lambda: "Ready: " in logs[0].read_text(), 90), logs[0].read_text()


def test_ipv6(two_hosts: list[Host], tiny: Path, tmp_path: Path) -> None:
    cluster = Cluster(two_hosts, tmp_path, str(tiny), "-tp", "2", "--dtype", "float32")
    cluster.arguments[-1] = two_hosts[0].address6
    try:
        cluster.start_all()
        assert cluster.complete(PROMPTS[0], 24) == continuations(str(tiny), PROMPTS, 24)[0]
        assert "joined node 0 (host0) at [fd77::a]:29500; this node is fd77::b." in cluster.nodes[1].output
        assert {address for address, _ in two_hosts[1].listening()} == {"fd77::b"}
    finally:
        cluster.close()


def test_three_nodes_two_stages_of_different_width(three_hosts: list[Host], tiny: Path, tmp_path: Path) -> None:
    """One stage over two nodes, one on the third."""
    arguments = ("--pipeline-tensor-sizes", "2,1", "--dtype", "float32")
    with running(three_hosts, tmp_path, str(tiny), *arguments) as cluster:
        assert [cluster.complete(prompt, 24) for prompt in PROMPTS] == continuations(str(tiny), PROMPTS, 24)
        assert "Ranks 0 to 1 share every layer across nodes" in cluster.nodes[0].output


def test_a_killed_node(two_hosts: list[Host], tiny: Path, tmp_path: Path) -> None:
    """Without recovery: an error that says what happened."""
    with running(two_hosts, tmp_path, str(tiny), "-pp", "2", "--dtype", "float32", OFF) as cluster:
        begin = time.monotonic()
        two_hosts[1].kill()
        text = failure(cluster, 5)
        assert time.monotonic() - begin < 5
        assert re.search(r"node 1 \(host1, 10\.77\.0\.11\) was lost, with rank 1: the connection to it ended", text), (
            text
        )


def test_node_0_is_killed(two_hosts: list[Host], tiny: Path, tmp_path: Path) -> None:
    with running(two_hosts, tmp_path, str(tiny), "-pp", "2", "--dtype", "float32") as cluster:
        two_hosts[0].kill()
        assert cluster.nodes[1].ends(5) == 0
        assert "node 0 has ended" in cluster.nodes[1].output
        assert cluster.nothing_left()


def test_a_hung_node(two_hosts: list[Host], tiny: Path, tmp_path: Path) -> None:
    """Its kernel answers, its processes do not: that takes longer to be sure of. Without recovery."""
    with running(two_hosts, tmp_path, str(tiny), "-pp", "2", "--dtype", "float32", OFF) as cluster:
        two_hosts[1].signal_all(signal.SIGSTOP)
        text = failure(cluster, 30)
        assert "node 1 (host1, 10.77.0.11) was lost, with rank 1" in text
        assert "it has said nothing for 10 s" in text


def test_out_of_memory_on_one_node(two_hosts: list[Host], tiny: Path, tmp_path: Path) -> None:
    """A node with little memory: the others are told which, and why, before or after the kernel had to step in."""
    if not can_limit("memory"):
        pytest.skip("no control group with a memory limit can be made here")
    arguments = ("-pp", "2", "--dtype", "float32", "--kv-cache-memory-bytes", "3G")
    cluster = Cluster(two_hosts, tmp_path, str(tiny), *arguments)
    try:
        cluster.start(0)
        cluster.start(1, memory_mb=700)
        assert cluster.nodes[0].ends(60) == 1
        last = cluster.nodes[0].output.strip().splitlines()[-1]
        assert "memory" in last
        assert cluster.nodes[1].ends(10) in (0, 1)
        assert cluster.nothing_left()
    finally:
        cluster.close()


def test_four_starts_at_once(two_hosts: list[Host], tiny: Path, tmp_path: Path) -> None:
    """On one machine's ports: one server gets the meeting port, the others say who has it."""
    cluster = Cluster(two_hosts, tmp_path, str(tiny), "-pp", "2", "--dtype", "float32", "--port", "0")
    try:
        heads = [cluster.start(0) for _ in range(3)]
        cluster.start(1)
        one = wait_until(lambda: sum("Ready: " in head.output for head in heads) == 1, 90)
        assert one, "\n----\n".join(head.output for head in heads)
        losers = [head for head in heads if "Ready: " not in head.output]
        for head in losers:
            assert head.ends(20) == 1
            assert "Port 29500 on 10.77.0.10 is in use by another program." in head.output
    finally:
        cluster.close()

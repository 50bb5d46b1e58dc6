"""Node 0 gathers the others: who is waited for, who is turned away, and what is found out before anything is loaded.

Node 0's launcher runs in the test, in the network of host 0; the other nodes are real processes.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phalanx.checkpoint.locate import locate
from phalanx.config import EngineConfig
from phalanx.distributed.mesh import Mesh
from phalanx.distributed.transports.abort import Abort, GroupBroken
from phalanx.distributed.transports.secure_stream import SecureStream
from phalanx.engine.resolution import for_engine, resolved
from phalanx.errors import ConfigError, PhalanxError
from phalanx.executor.keys import derive, root_secret
from phalanx.executor.launcher import Layout
from phalanx.executor.node_messages import FRAME, LIMIT, NodeHello, Refused, Welcome, decode_to_node, encode
from phalanx.executor.nodes import NodesLauncher
from phalanx.executor.survey import versions
from tests.helpers.hosts import Host, ip
from tests.helpers.node_cluster import Cluster, Node
from tests.helpers.processes import wait_until

KEY = "open sesame"


class Gathering:
    """A launcher on host 0, gathering on a thread."""

    def __init__(self, hosts: list[Host], model: Path, **settings: float):
        ranks = len(hosts)
        config = EngineConfig.from_options(
            model=str(model), dtype="float32", tensor_parallel_size=ranks, nnodes=ranks, transport_key=KEY,
            master_addr=hosts[0].address,
        )  # fmt: skip
        checkpoint = locate(str(model))
        config, _ = for_engine(resolved(config, checkpoint), checkpoint)
        self.failure: PhalanxError | None = None
        with hosts[0].network():
            self.launcher = NodesLauncher(config, Layout(Mesh(tp=ranks)), **settings)
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            self.launcher.gather()
        except PhalanxError as error:
            self.failure = error

    def done(self, seconds: float = 30.0) -> PhalanxError | None:
        """What it failed with."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "still gathering"
        return self.failure


Begin = Callable[..., tuple[Gathering, Cluster]]


@pytest.fixture
def gather(tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Begin]:
    caplog.set_level(logging.INFO)
    begun: list[tuple[Gathering, Cluster]] = []

    def begin(hosts: list[Host], **settings: float) -> tuple[Gathering, Cluster]:
        arguments = ("-tp", str(len(hosts)), "--dtype", "float32")
        cluster = Cluster(hosts, tmp_path, str(tiny), *arguments, env={"PHALANX_TRANSPORT_KEY": KEY})
        begun.append((Gathering(hosts, tiny, **settings), cluster))
        return begun[-1]

    yield begin
    for gathering, cluster in begun:
        gathering.launcher.close()
        cluster.close()


def test_a_late_node_is_waited_for(two_hosts: list[Host], gather: Begin, caplog: pytest.LogCaptureFixture) -> None:
    gathering, cluster = gather(two_hosts, report=0.2)
    assert wait_until(lambda: "Waiting at 10.77.0.10:29500 for node 1 of 2" in caplog.text, 30)
    node = cluster.start(1)
    assert gathering.done() is None
    assert "Node 1 of 2 (host1, 10.77.0.11) has joined." in caplog.text
    assert "2 of 2 nodes are here and reach each other: rank 0 on node 0, rank 1 on node 1" in caplog.text
    begin = time.monotonic()
    gathering.launcher.close()
    assert node.ends(5) == 0, "it ends when node 0 does"
    assert time.monotonic() - begin < 5
    assert "node 0 has ended, and so does this node" in node.output
    assert KEY not in node.output + caplog.text


def test_nodes_say_what_they_have(two_hosts: list[Host], gather: Begin, caplog: pytest.LogCaptureFixture) -> None:
    """Unless their own command names a split."""
    for options, knows in (((), True), (("--tensor-split", "1,1"), False)):
        gathering, cluster = gather(two_hosts)
        node = cluster.start(1, *options)
        assert gathering.done() is None
        here, there = (gathering.launcher.capacity(seat) for seat in (0, 1))
        assert here is not None and here.shared and here.speed
        assert (there is not None and there.available > 0) is knows
        gathering.launcher.close()
        assert node.ends(5) == 0


def test_node_0_may_be_late(two_hosts: list[Host], gather: Begin, tiny: Path, tmp_path: Path) -> None:
    cluster = Cluster(
        two_hosts, tmp_path, str(tiny), "-tp", "2", "--dtype", "float32", env={"PHALANX_TRANSPORT_KEY": KEY}
    )
    node = cluster.start(1)
    node.says(r"waiting for node 0 at 10\.77\.0\.10:29500: Connection refused \(0 s; gives up after 600 s\)", 20)
    gathering, _ = gather(two_hosts)
    assert gathering.done() is None
    two_hosts[1].signal_all(signal.SIGTERM)
    assert node.ends(5) == 0


def test_waiting_has_a_limit(two_hosts: list[Host], gather: Begin) -> None:
    gathering, _ = gather(two_hosts, limit=0.5)
    failure = gathering.done(30)
    assert isinstance(failure, ConfigError)
    assert "Waited 0.5 s at 10.77.0.10:29500 for node 1 of 2, in vain" in str(failure)


def test_callers_that_do_not_belong(two_hosts: list[Host], gather: Begin, caplog: pytest.LogCaptureFixture) -> None:
    """Another key, no key, a number too high, another count of nodes, rubbish: told so, counted, and no hindrance."""
    gathering, cluster = gather(two_hosts)
    wrong = cluster.start(1, env={"PHALANX_TRANSPORT_KEY": "guess"})
    assert wrong.ends(60) == 1
    assert "turned this node away: the transport keys differ" in wrong.output
    assert "Set the same PHALANX_TRANSPORT_KEY" in wrong.output
    assert wait_until(lambda: gathering.launcher.refused == 1, 30)
    turned_away = "Turned away a caller from 10.77.0.11: it does not have the transport key"
    assert wait_until(lambda: turned_away in caplog.text, 5), "said right after it is counted"
    one_too_many = cluster.start(1, "--nnodes", "3", "-tp", "3", "--node-rank", "2")
    assert one_too_many.ends(60) == 1
    assert "Node 0 was started with --nnodes 2, node 2 (host1) with --nnodes 3." in one_too_many.output
    assert wait_until(lambda: "with --nnodes 3. (2 turned away so far.)" in caplog.text, 5)
    with two_hosts[1].network(), socket.create_connection(("10.77.0.10", 29500)) as rubbish:
        rubbish.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 10)
        rubbish.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert rubbish.recv(1) == b"", "nothing is said to who has no key"
    assert wait_until(lambda: gathering.launcher.refused == 3, 30)
    good = cluster.start(1)
    assert gathering.done() is None
    twin = cluster.start(1)
    assert twin.ends(60) == 1
    assert "There is a node 1 already: host1, 10.77.0.11." in twin.output
    assert wait_until(lambda: gathering.launcher.refused == 4, 30)
    assert good.process.poll() is None


@pytest.mark.parametrize("where", [0, 1])
def test_mute_callers_keep_no_node_out(
    where: int, two_hosts: list[Host], gather: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those of another host nor those of the node's own."""
    monkeypatch.setattr("phalanx.executor.nodes._KNOCK_S", 60.0)
    gathering, _ = gather(two_hosts)
    with contextlib.ExitStack() as stack, two_hosts[where].network():
        for _ in range(40):
            stack.enter_context(socket.create_connection(("10.77.0.10", 29500)))
        assert wait_until(lambda: len(gathering.launcher._doorkeeper.callers) == 32, 30)
        with joined(two_hosts[1]) as stream:
            assert isinstance(decode_to_node(stream.receive(LIMIT, 5)[1]), Welcome)
            assert len(gathering.launcher._doorkeeper.callers) == 31, "who has the key takes no place, the mute stay"


def test_a_node_without_the_model(two_hosts: list[Host], gather: Begin, tiny: Path) -> None:
    gathering, cluster = gather(two_hosts)
    node = cluster.start(1, hide=[tiny.parent])
    failure = gathering.done()
    assert isinstance(failure, ConfigError)
    assert failure.message == f"Node 1 (host1) lacks {tiny}."
    assert "Put the model on host1" in str(failure)
    assert node.ends(30) == 1
    assert f"Node 1 (host1) lacks {tiny}." in node.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dtype", "bfloat16"], r"--dtype is float32 on node 0 \(.*\) and bfloat16 on node 1 \(host1\)"),
        (["--model", "COPY"], r"the model's path is .*/tiny on node 0 .* and .*/copy on node 1"),
        (["-pp", "2", "-tp", "1"], r"--tensor-parallel-size is 2 on node 0 .* and 1 on node 1"),
    ],
)
def test_nodes_that_differ(
    arguments: list[str], words: str, two_hosts: list[Host], gather: Begin, tiny: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny, copy)
    gathering, cluster = gather(two_hosts)
    if "COPY" in arguments:
        cluster.arguments[0] = str(copy)
        arguments = []
    node = cluster.start(1, *arguments)
    failure = gathering.done()
    assert isinstance(failure, ConfigError)
    with pytest.raises(ConfigError, match=words):
        raise failure
    assert node.ends(30) == 1
    assert "Nodes differ: " in node.output


@contextmanager
def joined(host: Host, **changes: object) -> Iterator[SecureStream]:
    """A node that speaks the protocol, and lies."""
    hello = NodeHello(1, 2, "liar", host.address, 1, 1, versions())
    for name, value in changes.items():
        hello = type(hello)(**{**{f: getattr(hello, f) for f in hello.__struct_fields__}, name: value})
    never = Abort()
    with host.network():
        sock = socket.create_connection(("10.77.0.10", 29500))
    stream = SecureStream(sock, never, "node 0")
    try:
        stream.handshake(derive(root_secret(KEY, 29500), "join"), client=True, encrypt=False, timeout=5)
        stream.send(FRAME, encode(hello), 5)
        yield stream
    finally:
        stream.close()
        never.close()


def test_another_version_is_refused(two_hosts: list[Host], gather: Begin) -> None:
    gathering, _ = gather(two_hosts)
    with joined(two_hosts[1], versions={**versions(), "torch": "1.0"}) as stream:
        answer = decode_to_node(stream.receive(LIMIT, 5)[1])
    assert isinstance(answer, Refused)
    assert answer.message.startswith("Nodes differ: torch is 2.")
    assert answer.message.endswith("and 1.0 on node 1 (liar).")
    assert wait_until(lambda: gathering.launcher.refused == 1, 30)


def test_a_node_that_leaves_while_others_are_awaited(two_hosts: list[Host], gather: Begin) -> None:
    gathering, _ = gather(two_hosts)
    with joined(two_hosts[1]) as stream:
        stream.receive(LIMIT, 5)
    failure = gathering.done(30)
    assert "Node 1 (liar, 10.77.0.11) left before the start: the connection to it ended." in str(failure)


def test_a_node_may_come_back_while_others_are_awaited(
    three_hosts: list[Host], gather: Begin, caplog: pytest.LogCaptureFixture
) -> None:
    gathering, cluster = gather(three_hosts)
    with joined(three_hosts[1], nnodes=3) as stream:
        stream.receive(LIMIT, 5)
    assert wait_until(lambda: "Lost node 1 (liar, 10.77.0.11): the connection to it ended." in caplog.text, 30)
    for rank in (1, 2):
        cluster.start(rank)
    assert gathering.done() is None
    assert gathering.launcher.refused == 0


def test_a_node_that_has_joined_is_arriving_until_it_is_looked_at(two_hosts: list[Host], gather: Begin) -> None:
    gathering, _ = gather(two_hosts, patience=0.0)
    assert gathering.done() is None, "it goes on with the one that is there"
    launcher = gathering.launcher
    assert (launcher.available(), launcher.arriving()) == ({0}, set())
    with joined(two_hosts[1]) as stream:
        stream.receive(LIMIT, 5)
        assert wait_until(lambda: launcher.arriving() == {1}, 5)
        assert launcher.available() == {0}
    assert wait_until(lambda: launcher.arriving() == set(), 5)


def test_nonsense_from_a_node_ends_it(two_hosts: list[Host], gather: Begin) -> None:
    gathering, _ = gather(two_hosts)
    with joined(two_hosts[1]) as stream:
        stream.receive(LIMIT, 5)
        stream.send(FRAME, b"\x81\xa1x\x01", 5)
        failure = gathering.done(30)
        assert "left before the start" in str(failure)
        with pytest.raises(GroupBroken):  # a few messages may come before the end
            deque(iter(lambda: stream.receive(LIMIT, 5), None))


def test_a_pair_that_cannot_meet_is_named(three_hosts: list[Host], gather: Begin) -> None:
    ip("-n", three_hosts[1].namespace, "route", "add", "unreachable", f"{three_hosts[2].address}/32")
    gathering, cluster = gather(three_hosts)
    nodes: list[Node] = [cluster.start(1), cluster.start(2)]
    failure = gathering.done()
    assert isinstance(failure, ConfigError)
    assert "Node 1 (host1) cannot reach node 2 (host2) at 10.77.0.12:" in failure.message
    assert "No route to host" in failure.message
    assert "Open the ports between these nodes in the firewall, or set PHALANX_HOST_IP on " in str(failure)
    for node in nodes:
        assert node.ends(30) == 1
        assert "cannot reach node 2 (host2)" in node.output


def test_an_address_that_leads_elsewhere(two_hosts: list[Host], gather: Begin) -> None:
    """Every machine with containers has a bridge with this address; a connection to it stays on the machine."""
    for host in two_hosts:
        host.add_dead_end("docker0", "172.17.0.1/16")
    gathering, cluster = gather(two_hosts)
    cluster.start(1, env={"PHALANX_HOST_IP": "172.17.0.1"})
    failure = gathering.done()
    assert "cannot reach node 1 (host1) at 172.17.0.1:" in str(failure)
    assert "set PHALANX_HOST_IP on node 1 (host1) to an address that the other nodes reach" in str(failure)


def test_an_address_of_nobody(two_hosts: list[Host], gather: Begin, caplog: pytest.LogCaptureFixture) -> None:
    """Said by the node itself, before it calls node 0."""
    gathering, cluster = gather(two_hosts)
    node = cluster.start(1, env={"PHALANX_HOST_IP": "192.0.2.1"})
    assert node.ends(60) == 1
    assert "PHALANX_HOST_IP is 192.0.2.1, which is not an address of this node. Set it to" in node.output
    assert gathering.launcher.refused == 0
    assert "Turned away" not in caplog.text


def test_what_listens(two_hosts: list[Host], gather: Begin) -> None:
    gathering, cluster = gather(two_hosts)
    for host in two_hosts:
        host.add_dead_end("docker0", "172.17.0.1/16")
    cluster.start(1)
    assert gathering.done() is None
    for host in two_hosts:
        assert {address for address, _ in host.listening()} <= {host.address}

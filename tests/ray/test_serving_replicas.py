"""Two replicas on a Ray cluster of three hosts, one on each of two, the server on a head without devices, 20 streams.

Each host, actor and rank is killed, frozen or cut off, a raylet is killed: every stream ends with the text of an
undisturbed one, and the replica that was lost serves again. (Without recovery streams go on too, at the other one.)
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from tests.helpers.hosts import missing
from tests.helpers.processes import wait_until
from tests.helpers.ray_hosts import RayHosts, ray_hosts
from tests.helpers.ray_serving import Served, actor_of, kill_raylet
from tests.helpers.scopes import module_or_test
from tests.helpers.tiny_model import write_tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing() or "there are hosts"),
    pytest.mark.timeout(600),
]


BACK_S = 180
"""For a host to be a node of Ray again and to have a rank, on a machine where much else runs."""
PATIENT = ("--recovery-timeout", str(BACK_S))


@pytest.fixture(scope="module")
def bed() -> Iterator[RayHosts]:
    with ray_hosts((0, 1, 1)) as made:
        yield made


@pytest.fixture(scope=module_or_test)
def served(bed: RayHosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(bed, str(write_tiny_model(tmp_path_factory.mktemp("tiny"))), "-dp", *PATIENT)
    yield made
    made.close()


def whole(served: Served) -> bool:
    """Whether both replicas come to serve, each on its host."""
    ready = lambda: served.engines() == ["ready", "ready"] and served.nodes().count("host1") == 1  # noqa: E731
    return wait_until(lambda: ready() or "failed" in served.engines(), BACK_S) and ready()


@pytest.mark.recovery
@pytest.mark.parametrize("index", [1, 2])
@pytest.mark.parametrize("deed", ["kill", "freeze", "cut", "raylet"])
def test_a_host_is_lost(bed: RayHosts, served: Served, deed: str, index: int) -> None:
    assert whole(served), served.serving.output
    host = bed.hosts[index]
    strikes: dict[str, Callable[[], object]] = {
        "kill": lambda: bed.end(index),
        "freeze": lambda: host.signal_all(signal.SIGSTOP),
        "cut": host.cut,
        "raylet": lambda: kill_raylet(host),
    }
    try:
        silence = served.streams_through(strikes[deed])
        print(f"{deed} of {host.name}: the longest silence of a stream was {silence:.1f} s")
        assert "ready" in served.engines()
    finally:
        bed.bring_back(index, 1)
    assert whole(served), served.serving.output
    served.streams_through(lambda: None)


@pytest.mark.parametrize("host", ["host1", "host2"])
@pytest.mark.parametrize(
    ("whose", "deed"),
    [
        pytest.param("actor", signal.SIGKILL, marks=pytest.mark.recovery),
        ("actor", signal.SIGSTOP),
        pytest.param("rank", signal.SIGKILL, marks=pytest.mark.recovery),
        pytest.param("rank", signal.SIGSTOP, marks=pytest.mark.recovery),
    ],
)
def test_an_actor_or_a_rank_is_lost(served: Served, whose: str, deed: signal.Signals, host: str) -> None:
    """An actor that is stopped holds up nobody: its rank goes on."""
    assert whole(served), served.serving.output
    rank = served.pid_of_rank(host)
    victim = actor_of(rank) if whose == "actor" else rank
    silence = served.streams_through(lambda: os.kill(victim, deed))
    print(f"{deed.name} to the {whose} on {host}: the longest silence of a stream was {silence:.1f} s")
    if whose == "actor" and deed == signal.SIGSTOP:
        assert served.pid_of_rank(host) == rank
        os.kill(victim, signal.SIGCONT)
    assert whole(served), served.serving.output
    served.streams_through(lambda: None)

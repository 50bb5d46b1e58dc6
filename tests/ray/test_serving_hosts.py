"""A server on a Ray cluster of three hosts, two tensor ranks on two of them, 20 streams: a host is killed, frozen, cut
off and healed, its link flaps, is half open or slow, its raylet is killed, the head is started again. Every stream ends
with the text of an undisturbed one. (The short form of a silent host is in `test_silent_host`.)
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers import bad_network
from tests.helpers.bad_network import Cable, bad_cable
from tests.helpers.hosts import missing
from tests.helpers.processes import wait_until
from tests.helpers.ray_hosts import RayHosts, ray_hosts
from tests.helpers.ray_serving import Served, kill_raylet, raylets
from tests.helpers.tiny_model import write_tiny_model

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing() or "there are hosts"),
    pytest.mark.timeout(600),
]

CPUS = (0, 2, 1)
NOTICED_S = 3.0
"""A network that falls silent, at the latest."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def bed() -> Iterator[RayHosts]:
    with ray_hosts(CPUS) as made:
        yield made


@pytest.fixture
def served(bed: RayHosts, tiny: str) -> Iterator[Served]:
    made = Served(bed, tiny)
    yield made
    made.close()


@pytest.mark.recovery
@pytest.mark.slow
@pytest.mark.parametrize("index", [1, 2])
@pytest.mark.parametrize("deed", ["kill", "freeze", "cut", "raylet"])
def test_a_host_is_lost(bed: RayHosts, served: Served, deed: str, index: int) -> None:
    """Host 1 leaves no room for its rank, so that the model is split anew over one; host 2 does. What comes back is
    taken in."""
    host = bed.hosts[index]
    strike = {
        "kill": lambda: bed.end(index),
        "freeze": lambda: host.signal_all(signal.SIGSTOP),
        "cut": host.cut,
        "raylet": lambda: kill_raylet(host),
    }[deed]
    try:
        silence = served.streams_through(strike)
        assert host.name not in served.nodes()
        print(f"{deed} of {host.name}: the longest silence of a stream was {silence:.1f} s")
    finally:
        bed.bring_back(index, CPUS[index])
    served.streams_through(lambda: None)
    assert wait_until(lambda: len(served.nodes()) == 2, 90), served.serving.output
    served.streams_through(lambda: None)


@pytest.fixture
def patient(bed: RayHosts, tiny: str) -> Iterator[Served]:
    """With the hang timeout that users have: TCP sends again what was lost at longer and longer intervals."""
    made = Served(bed, tiny, "-tp", "--hang-timeout", "10")
    yield made
    made.close()


def flap(cable: Cable) -> None:
    for _ in range(2):
        cable.silent = True
        time.sleep(0.5)
        cable.silent = False
        time.sleep(0.3)


def delay(cable: Cable) -> None:
    cable.delay, cable.jitter = 0.01, 0.02


@pytest.mark.slow
@pytest.mark.skipif(bool(bad_network.missing()), reason=bad_network.missing() or "there are bad cables")
@pytest.mark.parametrize("trouble", [flap, delay])
def test_a_link_that_is_bad_and_no_loss(bed: RayHosts, patient: Served, trouble: Callable[[Cable], None]) -> None:
    with bad_cable(bed.hosts[2]) as cable:
        silence = patient.streams_through(lambda: trouble(cable))
        assert cable.frames > 1000
        assert patient.serving.status()["recoveries"] == [], patient.serving.output
        assert patient.nodes() == ["host1", "host2"]
        print(f"{trouble.__name__}: the longest silence of a stream was {silence:.1f} s")


@pytest.mark.recovery
@pytest.mark.slow
@pytest.mark.skipif(bool(bad_network.missing()), reason=bad_network.missing() or "there are bad cables")
def test_a_link_that_is_half_open(bed: RayHosts, patient: Served) -> None:
    """What the host sends arrives, what is sent to it does not."""
    struck = 0.0

    def deafen() -> None:
        nonlocal struck
        struck, cable.deaf = time.time(), True

    try:
        with bad_cable(bed.hosts[2]) as cable:
            silence = patient.streams_through(deafen)
            loss = patient.serving.status()["recoveries"][0]
            noticed = loss["since"] - struck
            print(f"half open: noticed after {noticed:.2f} s, the longest silence of a stream was {silence:.1f} s")
            assert "Rank 1 on host2 was lost: " in patient.serving.output and loss["kind"] == "network", loss
            assert noticed <= NOTICED_S and patient.nodes() == ["host1", "host1"], patient.serving.output
    finally:
        bed.bring_back(2, CPUS[2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kept", "layout"),
    [
        pytest.param(True, "-tp", marks=pytest.mark.recovery, id="with GCS fault tolerance, -tp"),
        pytest.param(True, "-dp", id="with GCS fault tolerance, -dp"),
        pytest.param(False, "-tp", id="without, -tp"),
        pytest.param(False, "-dp", id="without, -dp"),
    ],
)
def test_the_head_is_started_again(tiny: str, tmp_path: Path, kept: bool, layout: str) -> None:
    """The server is on a worker's host. What it serves goes on either way; whether a rank that is lost afterwards can
    be replaced depends on whether the head remembers."""
    storage = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(tmp_path / "gcs")} if kept else {}
    cpus = 2 if layout == "-tp" else 1  # a replica on each host
    with ray_hosts((0, cpus, cpus), **storage) as bed:
        served = Served(bed, tiny, layout, on=1)
        try:

            def restart() -> None:
                bed.end(0)
                time.sleep(1)
                bed.node(0, cpus=0)

            served.streams_through(restart)
            if kept:
                time.sleep(5)
                victim = next(w for w in served.serving.status()["workers"] if w["node"] == "host2")
                served.streams_through(lambda: os.kill(victim["pid"], signal.SIGKILL))
                return
            # The new head knows neither the other nodes nor the engine's job: their raylets end, and so does the
            # engine's process, for which the server waits until its host is a node of the cluster again.
            ended = lambda: not any(raylets(bed.hosts[index]) for index in (1, 2))  # noqa: E731
            assert wait_until(ended, 90), served.serving.output
            for index in (2, 1):
                bed.node(index, cpus=cpus)
            served.streams_through(lambda: None)
        finally:
            served.close()

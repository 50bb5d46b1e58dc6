"""A host that falls silent under 20 streams, on a Ray cluster that looks after its nodes as it does by default: Phalanx
notices by itself, and streams go on long before Ray has noticed anything. What else happens to hosts is in
`test_serving_hosts`, where Ray is made to hurry."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import bad_network
from tests.helpers.bad_network import bad_cable
from tests.helpers.hosts import missing
from tests.helpers.ray_hosts import RayHosts, ray_hosts
from tests.helpers.ray_serving import Served
from tests.helpers.server import demo_checkpoint
from tests.helpers.tiny_model import write_tiny_model

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing() or "there are hosts"),
    pytest.mark.timeout(600),
]

NOTICE_S, NEXT_TOKEN_S = 3.2, 6.0
TRIES = 3
"""The best counts, since the machine may have other work."""
RAY_S = 10.0
"""Ray needs longer than that, and half a minute or more as a rule."""

WATCH = """
import sys, time, ray
ray.init(log_to_driver=False)
dead = lambda: {n["NodeManagerHostname"] for n in ray.nodes() if not n["Alive"]}
print("Ray: watching", flush=True)
while sys.argv[1] not in dead():
    time.sleep(0.1)
print("Ray:", time.time(), flush=True)
"""


class RaysView:
    """When Ray gives a host up, seen from the head."""

    def __init__(self, bed: RayHosts, host: str):
        head = bed.hosts[0]
        self._process = head.start([sys.executable, "-c", WATCH, host], env=bed.env, stdout=subprocess.PIPE)
        assert self._said() == "watching"

    def _said(self) -> str:
        assert self._process.stdout is not None
        return next(line[5:].strip() for line in map(bytes.decode, self._process.stdout) if line.startswith("Ray: "))

    def at(self) -> float:
        """`time.time()`, after a minute or so."""
        return float(self._said())


def cut_off(model: str, layout: str, *more: str, ray_too: bool = False) -> tuple[float, float, float | None]:
    """Seconds from the cut until Phalanx noticed, until the last stream had its next token, and until Ray noticed."""
    with ray_hosts((0, 2 if layout == "-tp" else 1, 1), alert=False) as bed:
        served = Served(bed, model, layout, "--hang-timeout", "10", *more)
        try:
            view = RaysView(bed, "host2") if ray_too else None
            assert sorted(served.nodes()) == ["host1", "host2"]
            served.streams_through(bed.hosts[2].cut)
            assert layout == "-dp" or served.nodes() == ["host1", "host1"]
            noticed, moved = served.noticed("host2"), served.moved
            gave_up = view.at() - served.struck if view is not None else None
            print(f"{layout}: noticed {noticed:.2f} s, next token {moved:.2f} s, Ray noticed {gave_up} s after the cut")
            return noticed, moved, gave_up
        finally:
            served.close()


@pytest.mark.recovery
@pytest.mark.parametrize("layout", ["-tp", pytest.param("-dp", marks=pytest.mark.slow)])
def test_a_host_that_falls_silent(layout: str, tmp_path: Path) -> None:
    """Its rank goes to the other host, which has room, or its streams to the other replica."""
    for _ in range(TRIES):
        noticed, moved, _ = cut_off(str(write_tiny_model(tmp_path)), layout)
        if noticed < NOTICE_S and moved < NEXT_TOKEN_S:
            break
    assert noticed < NOTICE_S and moved < NEXT_TOKEN_S


@pytest.mark.recovery
@pytest.mark.slow
@pytest.mark.skipif(bool(bad_network.missing()), reason=bad_network.missing() or "there are bad cables")
def test_a_host_that_hears_nothing(tmp_path: Path) -> None:
    """Its link is half open: what it sends arrives, such as that its rank has ended. It is not tried again."""
    with ray_hosts((0, 2, 1), alert=False) as bed:
        served = Served(bed, str(write_tiny_model(tmp_path)), "-tp", "--hang-timeout", "10")
        try:
            with bad_cable(bed.hosts[2]) as cable:
                served.streams_through(lambda: setattr(cable, "deaf", True))
            noticed, found = served.noticed("host2"), served.serving.status()
            print(f"half open: noticed {noticed:.2f} s, next token {served.moved:.2f} s after it")
            (loss,) = found["recoveries"]
            assert (loss["rank"], loss["node"], loss["kind"]) == (1, "host2", "network"), served.serving.output
            assert "has not answered for" in loss["cause"] and found["failures"] == {"network": 1}, loss
            assert noticed < NOTICE_S and served.nodes() == ["host1", "host1"], served.serving.output
        finally:
            served.close()


@pytest.mark.recovery
@pytest.mark.slow
def test_the_demo_model_and_what_ray_says() -> None:
    """Weights of hundreds of megabytes; and Phalanx did not hear it from Ray."""
    model, room = str(demo_checkpoint().weight_files[0]), ("--kv-cache-memory-bytes", "128M", "--max-model-len", "512")
    noticed, _, gave_up = cut_off(model, "-tp", *room, ray_too=True)
    assert noticed < NOTICE_S and gave_up is not None and gave_up > RAY_S

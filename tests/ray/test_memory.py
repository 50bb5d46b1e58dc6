"""Memory that runs out under a rank on Ray: Ray's own monitor ends the rank's actor, or the kernel ends the rank. Who
did it is said, and no stream is lost."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.hosts import can_limit, missing
from tests.helpers.processes import alive, wait_until
from tests.helpers.ray_hosts import RayHosts, ray_hosts
from tests.helpers.ray_serving import Served, actor_of
from tests.helpers.tiny_model import write_tiny_model
from tests.helpers.worlds import Groups, memory_missing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.recovery,
    pytest.mark.skipif(bool(missing()), reason=missing() or "there are hosts"),
    pytest.mark.skipif(not can_limit("memory"), reason="no control group with a memory limit can be made here"),
    pytest.mark.timeout(600),
]

MEMORY_MB = 1600
THRESHOLD = 0.8
MONITOR = {"RAY_memory_monitor_refresh_ms": "100", "RAY_memory_usage_threshold": str(THRESHOLD)}
HOG = """
import pathlib, sys, time
group, limit = pathlib.Path(sys.argv[1]), int(sys.argv[2])

def used():
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    current = next(p for p in (group / "memory.usage_in_bytes", group / "memory.current") if p.exists())
    return int(current.read_text()) - int(stat.get("total_inactive_file", stat["inactive_file"]))

held = []
while used() < limit:
    held.append(bytearray(b"x" * (4 << 20)))
time.sleep(60)
"""
"""Takes memory in a control group until so many bytes of it cannot be dropped, and keeps it."""


@pytest.fixture(scope="module")
def bed() -> Iterator[RayHosts]:
    """The third host has little memory, and Ray's monitor looks after it."""
    with ray_hosts((0, 1, 0)) as made:
        made.end(2)
        made.node(2, cpus=1, memory_mb=MEMORY_MB, env=MONITOR)
        yield made


@pytest.fixture
def served(bed: RayHosts, tmp_path: Path) -> Iterator[Served]:
    """With the hang timeout that users have: a rank stands still for as long as its supervisor is starved."""
    made = Served(bed, str(write_tiny_model(tmp_path / "tiny")), "-tp", "--hang-timeout", "10")
    yield made
    made.close()


def test_the_memory_monitor(bed: RayHosts, served: Served) -> None:
    """A neighbour takes the node's memory. Ray ends its youngest worker, which is our actor, until there is enough."""
    group = bed.hosts[2].groups[-1]
    victim, blocks = actor_of(served.pid_of_rank("host2")), served.serving.status()["kv"]["blocks"]

    def strike() -> None:
        limit = int(MEMORY_MB * (THRESHOLD + 0.05)) << 20
        script = f'echo $$ > {group}/cgroup.procs; exec "$@"'
        hog = subprocess.Popen(["sh", "-ec", script, "sh", sys.executable, "-c", HOG, str(group), str(limit)])
        try:
            assert wait_until(lambda: not alive(victim), 30), served.serving.output
        finally:
            hog.kill()
            hog.wait()

    served.streams_through(strike)
    found = served.serving.status()
    cause = found["recoveries"][0]["cause"]
    assert cause.startswith("Ray's memory monitor ended it, because host2 was running out of memory "), cause
    assert re.search(r"\(1\.\d+ of 1\.56 GB in use, it steps in at 80%\)$", cause), cause
    assert f" on host2 was lost: {cause}" in served.serving.output
    assert found["failures"] == {"out_of_memory": 1} and sorted(served.nodes()) == ["host1", "host2"]
    assert found["kv"]["blocks"] < blocks  # so that it does not happen again


@pytest.mark.skipif(bool(memory_missing()), reason=memory_missing() or "there are groups")
def test_the_kernel(bed: RayHosts, served: Served) -> None:
    groups, victim = Groups(), served.pid_of_rank("host1")

    def strike() -> None:
        groups.starve(victim, 1 << 16)
        assert wait_until(lambda: not alive(victim), 30), served.serving.output

    try:
        served.streams_through(strike)
        cause = served.serving.status()["recoveries"][0]["cause"]
        assert cause.startswith("it was killed by SIGKILL (out of memory: the kernel ended it"), cause
        assert "monitor" not in served.serving.output
    finally:
        groups.close()

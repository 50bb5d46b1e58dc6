"""A signal to a server on a cluster that lives on: after five seconds the cluster has nothing of it any more."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from phalanx.executor.ray_view import RayView
from tests.helpers.processes import alive, wait_until
from tests.helpers.ray_cluster import RayCluster, ray_cluster
from tests.helpers.runs import LONG_LOAD, Run, bring_to
from tests.helpers.tiny_model import write_tiny_model

LEFT_S = 5.0
DRAIN_S = 15.0
"""A stream that is under way may end first."""
OPTIONS = ["--dtype", "float32", "--kv-cache-memory-bytes", "8M", "--port", "0", "-tp", "2"]
CODES = {("load", "SIGINT"): 128 + signal.SIGINT}
"""How it ends, where that is not with 0 or as it was told to."""
QUICK = {("load", "SIGINT"), ("busy", "SIGKILL")}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(h1={"num_cpus": 1}, h2={"num_cpus": 1}) as made:
        yield made


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.mark.parametrize(
    ("phase", "name"),
    [
        pytest.param(phase, name, marks=() if (phase, name) in QUICK else pytest.mark.slow)
        for phase in ("load", "idle", "busy")
        for name in ("SIGINT", "SIGTERM", "SIGKILL")
    ],
)
def test_serve(cluster: RayCluster, tiny: str, phase: str, name: str) -> None:
    assert cluster.is_clean()
    env = {**cluster.settings, "RAY_ADDRESS": cluster.address}
    command = ["-m", "phalanx", "serve", tiny, *OPTIONS, "--distributed-executor-backend", "ray"]
    run = Run(*command, fault=LONG_LOAD.get(phase, ""), env=env)
    try:
        bring_to(run, phase)
        actors = [actor.pid for actor in RayView(cluster.ray).living_actors()]
        assert len(actors) == 2 and len(cluster.groups()) == 1, (actors, cluster.groups(), run.text)

        def left() -> list[object]:
            return [*cluster.actors(), *cluster.groups(), *run.living(), *filter(alive, actors)]

        os.kill(run.process.pid, getattr(signal, name))
        wait_until(lambda: not left(), DRAIN_S if (phase, name) == ("busy", "SIGTERM") else LEFT_S)
        assert not left(), run.text
        assert run.process.wait(1) == CODES.get((phase, name), -signal.SIGKILL if name == "SIGKILL" else 0)
        assert "Traceback" not in run.text
    finally:
        run.clear_up()

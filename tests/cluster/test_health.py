"""Tries, status, monitor and dead nodes on a real Ray cluster of several nodes."""

from __future__ import annotations

import http.server
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from phalanx.cluster import (
    RayActorPool,
    RayConfig,
    create_placement_group,
    fault_tolerant_execute,
    get_cluster_status,
    handle_dead_nodes,
    monitor_cluster_health,
)
from phalanx.cluster.health_state import HealthLimits
from phalanx.errors import ConfigError, InvalidRequest
from tests.helpers.processes import wait_until
from tests.helpers.ray_cluster import RayCluster, ray_cluster


class Clerk:
    def __init__(self, folder: str = ""):
        self.folder = folder

    def pid(self) -> int:
        return os.getpid()

    def fail(self, times: int, kind: str) -> str:
        """Until it has been called `times` times."""
        path = Path(self.folder, kind)
        path.write_text(path.read_text() + "x" if path.exists() else "x")
        if len(path.read_text()) > times:
            return "done"
        if kind == "exit":
            os.kill(os.getpid(), signal.SIGKILL)
        raise {"value": ValueError, "user": InvalidRequest, "os": OSError}[kind]("as it was told")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(a={"num_cpus": 2}, b={"num_cpus": 2}) as made:
        yield made


@pytest.mark.slow
def test_calls_are_tried_again_when_that_can_help(cluster, tmp_path) -> None:
    clerk = cluster.ray.remote(max_restarts=5, num_cpus=0)(Clerk).remote(str(tmp_path))
    assert fault_tolerant_execute(clerk, "fail", 2, kind="os") == "done"
    assert fault_tolerant_execute(clerk, "fail", 1, "exit", max_retries=8) == "done", "the actor came back"
    for kind, error in (("value", ValueError), ("user", InvalidRequest)):
        began = time.monotonic()
        with pytest.raises(error, match="as it was told"):
            fault_tolerant_execute(clerk, "fail", 9, kind)
        assert (tmp_path / kind).read_text() == "x" and time.monotonic() - began < 2
    (tmp_path / "os").unlink()
    with pytest.raises(OSError, match="as it was told"):
        fault_tolerant_execute(clerk, "fail", 9, "os", max_retries=2)
    assert (tmp_path / "os").read_text() == "xxx"
    with pytest.raises(ConfigError, match="no method 'fly'"):
        fault_tolerant_execute(clerk, "fly")
    with pytest.raises(ConfigError, match="`max_retries` must be 0 or more"):
        fault_tolerant_execute(clerk, "pid", max_retries=-1)
    cluster.ray.kill(clerk)


@pytest.mark.slow
def test_the_status(cluster) -> None:
    clerk = cluster.ray.remote(num_cpus=1, name="clerk")(Clerk).remote()
    pid = cluster.ray.get(clerk.pid.remote())
    status = get_cluster_status()
    assert status["resources"]["CPU"] == 4 and len(status["nodes"]) == 3 and all(n["alive"] for n in status["nodes"])
    (actor,) = [each for each in status["actors"] if each["pid"] == pid]
    assert (actor["class"], actor["name"], actor["resources"]["CPU"]) == ("Clerk", "clerk", 1)
    assert wait_until(lambda: get_cluster_status()["available_resources"]["CPU"] == 3, 30)
    json.dumps(status)
    cluster.ray.kill(clerk)


class Hook:
    """An HTTP server that keeps what it is sent."""

    def __init__(self) -> None:
        self.events: list[dict] = []
        kept = self.events

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                kept.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self.server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/"


@pytest.mark.slow
def test_a_monitor_and_a_node_that_dies(cluster) -> None:
    """Events reach log, metrics and webhook; actors of a pool on the dead node are made again elsewhere."""
    hook = Hook()
    third = cluster.add("c", num_cpus=2)
    with RayActorPool(Clerk, 3, actor_options={"num_cpus": 1}) as pool:
        monitor = monitor_cluster_health(0.3, pools=[pool], webhook=hook.url)
        try:
            assert {each["node"] for each in pool.describe()} >= {third}, "spread over the nodes"
            assert wait_until(lambda: b"cluster_nodes 4.0" in generate_latest(monitor.registry), 10)
            cluster.kill("c")
            assert wait_until(lambda: "node_lost" in [e.kind for e in monitor.events], 15), monitor.events
            assert wait_until(lambda: {e["node"] for e in pool.describe()} <= {cluster.id("a"), cluster.id("b")}, 15)
            assert wait_until(lambda: set(pool.health_check().values()) == {"ready"}, 30), pool.describe()
            assert wait_until(lambda: any(e["kind"] == "node_lost" and e["subject"] == third for e in hook.events), 30)
            assert b'cluster_events_total{kind="node_lost"} 1.0' in generate_latest(monitor.registry)
            dead = [each for each in handle_dead_nodes([pool]) if each.node == third]
            assert len(dead) == 1 and dead[0].replaced == (), "it was seen to already"

            # an actor that is killed is an event, one that is ended is not
            victim = cluster.ray.remote(num_cpus=0)(Clerk).remote()
            ended = cluster.ray.remote(num_cpus=0)(Clerk).remote()
            pid = cluster.ray.get(victim.pid.remote())
            cluster.ray.get(ended.pid.remote())
            time.sleep(1.0)
            os.kill(pid, signal.SIGKILL)
            cluster.ray.kill(ended)
            lost = lambda: [e.message for e in monitor.events if e.kind == "actor_lost"]  # noqa: E731
            assert wait_until(lambda: any(f"Clerk (pid {pid})" in text for text in lost()), 10), lost()
            time.sleep(0.7)
            assert not any(ended._actor_id.hex() == e.subject for e in monitor.events)
        finally:
            began = time.monotonic()
            monitor.stop()
        assert time.monotonic() - began < 5
        assert not [t for t in threading.enumerate() if t.name in ("phalanx-cluster-monitor", "phalanx-webhook")]
    hook.server.shutdown()


@pytest.mark.slow
def test_no_room_and_full_memory_are_events(cluster) -> None:
    monitor = monitor_cluster_health(0.2, limits=HealthLimits(memory=0.0001, looks=1))
    try:
        assert wait_until(lambda: "memory_high" in [e.kind for e in monitor.events], 20), monitor.events
        group = cluster.ray.util.placement_group([{"CPU": 64}], name="huge")
        assert wait_until(lambda: any("No room: placement group huge" in e.message for e in monitor.events), 10)
        cluster.ray.util.remove_placement_group(group)
        assert wait_until(lambda: any(e.kind == "no_capacity" and e.over for e in monitor.events), 10)
    finally:
        monitor.stop()


@pytest.mark.slow
def test_groups_of_several_bundles(cluster) -> None:
    small = {"gpus_per_node": 0, "cpus_per_node": 1, "memory_per_node": 0.1}
    group = create_placement_group(RayConfig(num_nodes=2, placement_strategy="STRICT_SPREAD", **small))
    nodes = cluster.ray.util.placement_group_table(group)["bundles_to_node_id"]
    assert set(nodes.values()) == {cluster.id("a"), cluster.id("b")}
    cluster.ray.util.remove_placement_group(group)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"interval": 0}, "`interval` must be between"),
        ({"interval": "10"}, "`interval` must be between"),
        ({"webhook": "file:///etc/passwd"}, "http or https"),
    ],
)
def test_mistakes(options, said) -> None:
    with pytest.raises(ConfigError, match=said):
        monitor_cluster_health(**options)

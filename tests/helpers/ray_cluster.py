"""A Ray cluster of several nodes on the loopback interface of this machine, and what is left of anything on it.

The nodes are raylets, each with its own id, resources and labels; they share address, memory and files. For nodes that
are apart there is `tests.helpers.hosts`. One cluster at a time in a process.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from phalanx import env
from phalanx.executor.ray_session import LOCAL_SETTINGS, loopback, quietly
from phalanx.executor.ray_view import RayView
from tests.helpers.processes import wait_until

_NODE = {
    "node_ip_address": "127.0.0.1",
    "include_dashboard": False,
    "include_log_monitor": False,
    "no_monitor": True,
    "object_store_memory": 80_000_000,
}


@dataclass
class RayCluster:
    cluster: Any
    ray: Any
    settings: dict[str, str]
    head: str
    nodes: dict[str, Any] = field(default_factory=dict)
    """By name: Ray's node objects."""

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, name: str, **options: Any) -> str:
        """Start a node; its id."""
        with env.changed(**self.settings), loopback(), quietly():
            self.nodes[name] = self.cluster.add_node(**_NODE, **options)
        return self.id(name)

    def id(self, name: str) -> str:
        return str(self.nodes[name].node_id)

    def kill(self, name: str) -> None:
        """Its processes at once, as in a crash: those below its raylet would go on for a second, until they look.
        Returns when the head knows, if this process is connected to it."""
        node, below = self.nodes.pop(name), []
        for raylet in node.all_processes["raylet"]:
            with contextlib.suppress(psutil.Error):
                below += psutil.Process(raylet.process.pid).children(recursive=True)
        with quietly():
            self.cluster.remove_node(node, allow_graceful=False)
        for process in below:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if self.ray.is_initialized():
            wait_until(lambda: str(node.node_id) not in RayView(self.ray).alive(), 10)

    def groups(self) -> list[str]:
        """Names of the placement groups that are not removed."""
        table = self.ray.util.placement_group_table()
        return [group["name"] for group in table.values() if group["state"] != "REMOVED"]

    def actors(self) -> list[str]:
        return [actor.class_name for actor in RayView(self.ray).living_actors()]

    def taken(self) -> dict[str, float]:
        """CPUs in use, by node id."""
        return {
            site.node: taken
            for site in RayView(self.ray).nodes()
            if (taken := site.total.get("CPU", 0.0) - site.free.get("CPU", 0.0))
        }

    def is_clean(self, seconds: float = 30.0) -> bool:
        """Whether no actor, no group and nothing taken is left, at the latest in `seconds`."""
        return wait_until(lambda: not (self.actors() or self.groups() or self.taken()), seconds)


@contextlib.contextmanager
def ray_cluster(**workers: dict[str, Any]) -> Iterator[RayCluster]:
    """A head without CPUs, to which this process is connected, and a node for each name with these options of Ray."""
    with tempfile.TemporaryDirectory(prefix="phxray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        (Path(folder) / "ray").mkdir()
        yield from _in(folder, workers)


def _in(folder: str, workers: dict[str, dict[str, Any]]) -> Iterator[RayCluster]:
    """`folder` has a short path: sockets lie below."""
    settings = {
        **LOCAL_SETTINGS,
        "RAY_TMPDIR": folder,  # Ray notes the address there, so that nobody else joins
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_timeout_ms": "1000",
        "RAY_health_check_failure_threshold": "3",
    }
    with env.changed(**settings), loopback(), quietly():
        import ray
        from ray.cluster_utils import Cluster

        made = Cluster(initialize_head=True, head_node_args={**_NODE, "num_cpus": 0, "temp_dir": f"{folder}/ray"})
        ray.init(address=made.address, log_to_driver=False, configure_logging=False)
    cluster = RayCluster(made, ray, settings, str(made.head_node.node_id))
    try:
        for name, options in workers.items():
            cluster.add(name, **options)
        yield cluster
    finally:
        with quietly():
            ray.shutdown()
            made.shutdown()

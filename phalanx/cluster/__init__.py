"""Phalanx on a Ray cluster: resources, pools of actors, engines made of them, and their health.

Each name is imported when it is first used; none of them imports Ray before it needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.cluster.actor_pool import RayActorPool as RayActorPool
    from phalanx.cluster.communication import RayCommunicationController as RayCommunicationController
    from phalanx.cluster.health import fault_tolerant_execute as fault_tolerant_execute
    from phalanx.cluster.health import get_cluster_status as get_cluster_status
    from phalanx.cluster.health import handle_dead_nodes as handle_dead_nodes
    from phalanx.cluster.health import monitor_cluster_health as monitor_cluster_health
    from phalanx.cluster.messages import Request as Request
    from phalanx.cluster.messages import Response as Response
    from phalanx.cluster.messages import SamplingConfig as SamplingConfig
    from phalanx.cluster.ray_config import RayConfig as RayConfig
    from phalanx.cluster.ray_engine import RayDistributedEngine as RayDistributedEngine
    from phalanx.cluster.ray_worker import RayWorker as RayWorker
    from phalanx.cluster.resources import RayResources as RayResources
    from phalanx.cluster.resources import create_placement_group as create_placement_group
    from phalanx.cluster.resources import optimize_gpu_memory as optimize_gpu_memory
    from phalanx.cluster.resources import setup_ray_resources as setup_ray_resources

_HOME = {
    "RayActorPool": "phalanx.cluster.actor_pool",
    "RayCommunicationController": "phalanx.cluster.communication",
    "RayConfig": "phalanx.cluster.ray_config",
    "RayDistributedEngine": "phalanx.cluster.ray_engine",
    "RayResources": "phalanx.cluster.resources",
    "RayWorker": "phalanx.cluster.ray_worker",
    "Request": "phalanx.cluster.messages",
    "Response": "phalanx.cluster.messages",
    "SamplingConfig": "phalanx.cluster.messages",
    "create_placement_group": "phalanx.cluster.resources",
    "fault_tolerant_execute": "phalanx.cluster.health",
    "get_cluster_status": "phalanx.cluster.health",
    "handle_dead_nodes": "phalanx.cluster.health",
    "monitor_cluster_health": "phalanx.cluster.health",
    "optimize_gpu_memory": "phalanx.cluster.resources",
    "setup_ray_resources": "phalanx.cluster.resources",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'phalanx.cluster' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])

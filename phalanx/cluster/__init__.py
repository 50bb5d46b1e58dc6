"""Phalanx on a Ray cluster: resources, pools of actors, engines made of them, and their health.

Each name is imported when it is first used; none of them imports Ray before it needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.cluster.ray_config import RayConfig as RayConfig
    from phalanx.cluster.resources import RayResources as RayResources
    from phalanx.cluster.resources import create_placement_group as create_placement_group
    from phalanx.cluster.resources import optimize_gpu_memory as optimize_gpu_memory
    from phalanx.cluster.resources import setup_ray_resources as setup_ray_resources

_HOME = {
    "RayConfig": "phalanx.cluster.ray_config",
    "RayResources": "phalanx.cluster.resources",
    "create_placement_group": "phalanx.cluster.resources",
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

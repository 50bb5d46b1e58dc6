"""`RayConfig`: which Ray cluster to use, what is reserved on it, and how its GPUs are set. Data and its checks only.

address, num_cpus, num_gpus, resources, temp_dir                 the cluster (`resources.setup_ray_resources`)
use_placement_groups, placement_strategy, num_nodes, *_per_node  the group (`resources.create_placement_group`)
cudnn_*, memory_fraction, gpu_ids                                the devices (`resources.optimize_gpu_memory`)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.errors import ConfigError
from phalanx.executor.placement import STRATEGIES


@dataclass(frozen=True)
class RayConfig:
    """Immutable. Raises ConfigError that names the field."""

    address: str = "auto"
    """`auto` joins the cluster that runs (RAY_ADDRESS, or what `ray start` noted on this machine) and otherwise starts
    a local one; `local` always starts one; else the head's `host:port`, which must answer."""
    num_cpus: int = 0
    """CPUs that a local cluster offers; 0: as many as the machine has. A cluster that is joined must have so many."""
    num_gpus: int = 0
    """Likewise, GPUs."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Likewise, custom resources by name."""
    temp_dir: str | None = None
    """Where a local cluster keeps its files; at most 30 characters, because sockets lie below. Default: /tmp."""
    use_placement_groups: bool = True
    """Whether `setup_ray_resources` reserves a group."""
    placement_strategy: str = "PACK"
    """PACK: on few nodes; SPREAD: on many; STRICT_PACK: on one; STRICT_SPREAD: each bundle on a node of its own."""
    cpus_per_node: float = 8
    """Of each of the group's `num_nodes` bundles."""
    gpus_per_node: float = 1
    memory_per_node: float = 64
    """GB (10^9 bytes) of main memory."""
    num_nodes: int = 1
    """Bundles of the group. Whether they are on different nodes is the strategy's business."""
    cudnn_benchmark: bool = True
    """Let cuDNN measure its algorithms and take the fastest."""
    cudnn_deterministic: bool = False
    """Only algorithms that give the same bits each time."""
    memory_fraction: float = 0.9
    """Share of each GPU's memory to use, above 0 and at most 1."""
    gpu_ids: tuple[int, ...] | None = None
    """The GPUs to use, by number; None: all. A local cluster hands out no others."""

    def __post_init__(self) -> None:
        _text("address", self.address)
        if "://" in self.address:
            raise ConfigError(
                f"`address` is '{self.address}': a Ray client cannot hold workers.",
                fix="Run on a node of the cluster, with the head's host:port, or 'auto'.",
            )
        if self.address not in ("auto", "local") and not _is_host_and_port(self.address):
            raise ConfigError(
                f"`address` is '{self.address}'.",
                fix="Use 'auto', 'local', or the head's host:port, such as host:6379.",
            )
        for name in ("num_cpus", "num_gpus"):
            _number(name, getattr(self, name), whole=True)
        for name in ("cpus_per_node", "gpus_per_node", "memory_per_node"):
            _number(name, getattr(self, name))
        _number("num_nodes", self.num_nodes, low=1, whole=True)
        _resources(self.resources)
        object.__setattr__(self, "resources", dict(self.resources))
        if self.temp_dir is not None:
            _text("temp_dir", self.temp_dir)
        if self.placement_strategy not in STRATEGIES:
            raise ConfigError(
                f"`placement_strategy` is '{self.placement_strategy}'.", fix=f"Choose one of {', '.join(STRATEGIES)}."
            )
        for name in ("use_placement_groups", "cudnn_benchmark", "cudnn_deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"`{name}` must be True or False, got {getattr(self, name)!r}.")
        _number("memory_fraction", self.memory_fraction)
        if not 0 < self.memory_fraction <= 1:
            raise ConfigError(f"`memory_fraction` is {self.memory_fraction:g}; it must be above 0 and at most 1.")
        if self.gpu_ids is not None:
            object.__setattr__(self, "gpu_ids", _gpu_ids(self.gpu_ids))
            if self.num_gpus > len(self.gpu_ids or ()):
                raise ConfigError(f"`num_gpus` is {self.num_gpus}, but `gpu_ids` names {len(self.gpu_ids or ())}.")
        if self.use_placement_groups and not self.bundle:
            raise ConfigError(
                "The placement group's bundles would be empty: cpus_per_node, gpus_per_node and memory_per_node are 0.",
                fix="Set one of them, or use_placement_groups=False.",
            )

    @property
    def bundle(self) -> dict[str, float]:
        """What one bundle of the group takes, in Ray's names; memory in bytes."""
        amounts = {
            "CPU": float(self.cpus_per_node),
            "GPU": float(self.gpus_per_node),
            "memory": float(int(self.memory_per_node * 1e9)),
        }
        return {name: amount for name, amount in amounts.items() if amount > 0}


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"`{name}` must be a text, got {value!r}.")


def _is_host_and_port(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and 0 < int(port) < 65536


def _number(name: str, value: Any, *, low: int = 0, whole: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise ConfigError(f"`{name}` must be {'an integer' if whole else 'a number'}, got {value!r}.")
    if not low <= value < math.inf:
        raise ConfigError(f"`{name}` is {value}; it must be at least {low}.")


def _resources(value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(f"`resources` must be a mapping of names to amounts, got {type(value).__name__}.")
    for name, amount in value.items():
        _text("resources", name)
        if name in ("CPU", "GPU", "memory", "object_store_memory"):
            raise ConfigError(f"`resources` names {name}, which is not a custom one.", fix="Use num_cpus or num_gpus.")
        _number(f"resources['{name}']", amount)


def _gpu_ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
        raise ConfigError(f"`gpu_ids` must be a list of GPU numbers, got {value!r}.")
    ids = tuple(value)
    for number in ids:
        _number("gpu_ids", number, whole=True)
    if not ids or len(set(ids)) < len(ids):
        raise ConfigError(f"`gpu_ids` is {list(ids)}.", fix="Name each GPU once, or leave it out to use all.")
    return ids

"""What Phalanx uses of Ray: the cluster (joined, or started here), a placement group on it, and how GPUs are set.

    resources = setup_ray_resources(RayConfig(num_cpus=4, cpus_per_node=2, gpus_per_node=0, memory_per_node=1))
    ...
    resources.close()

A process has one connection to Ray, and so it has at most one `RayResources` at a time: `setup_ray_resources` replaces
the one before. A local cluster listens on the loopback interface only and wants a token (`executor.ray_session`); open
ones are never started. Does not place ranks: that is the executor's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Self

from phalanx import env
from phalanx.cluster.ray_config import RayConfig
from phalanx.distributed.mesh import Mesh
from phalanx.errors import ConfigError
from phalanx.executor.placement import Demand, NoRoom, Site, amounts, arrange, shortage
from phalanx.executor.ray_session import RaySession, import_ray
from phalanx.executor.ray_view import RayView

log = logging.getLogger(__name__)

PLACE_S = 8.0
"""Seconds for others to let go of what would be enough."""
_TRY_S = 2.0
"""Seconds for Ray to reserve what was free when we looked."""
_PAUSE_S = 0.25
_EPSILON = 1e-6


class RayResources:
    """A connection to Ray and the group that is reserved on it. Make it with `setup_ray_resources`; `close` gives
    everything back."""

    def __init__(self, config: RayConfig, *, at_least: float = 0.0):
        """A local cluster without `num_cpus` offers `at_least` so many CPUs, or those of the machine if it has more.
        Raises ConfigError; nothing is left then."""
        self.config = config
        self.group: Any = None
        """Ray's placement group, or None."""
        gpus = config.num_gpus or len(config.gpu_ids or ())
        seen = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, config.gpu_ids))} if config.gpu_ids is not None else {}
        with env.changed(**seen):
            self._session: RaySession | None = RaySession(
                cpus=config.num_cpus or max(at_least, os.cpu_count() or 1),
                gpus=gpus,
                resources=config.resources,
                folder=config.temp_dir,
                address=config.address,
            )
        self.started: bool = self._session.started
        """Whether the cluster was started here, and ends with this."""
        try:
            if not self.started:
                self._check(config)
            if config.use_placement_groups:
                self.group = create_placement_group(config)
        except BaseException:
            self.close()
            raise

    @property
    def ray(self) -> ModuleType:
        """Ray, connected. Raises ConfigError once this is closed."""
        if self._session is None:
            raise ConfigError("The connection to Ray is closed.", fix="Call setup_ray_resources again.")
        return self._session.ray

    @property
    def address(self) -> str:
        """The head's, as host:port."""
        return str(self.ray.get_runtime_context().gcs_address)

    @property
    def closed(self) -> bool:
        return self._session is None

    def _check(self, config: RayConfig) -> None:
        """A cluster that was there already is as it is. Raises ConfigError when it has less than was asked for."""
        asked = {"CPU": config.num_cpus, "GPU": config.num_gpus, **config.resources}
        has = self.ray.cluster_resources()
        missing = {name: amount for name, amount in asked.items() if has.get(name, 0.0) + _EPSILON < amount}
        if missing:
            raise ConfigError(
                f"The Ray cluster at {self.address} is running already, and has less than is asked for: "
                f"{amounts(missing)} asked, {amounts({name: has.get(name, 0.0) for name in missing})} there.",
                fix="Ask for less, add nodes with `ray start --address=…`, or use address='local'.",
            )
        if config.temp_dir is not None:
            log.warning("temp_dir %s is not used: the Ray cluster at %s runs already.", config.temp_dir, self.address)

    def give_back(self) -> None:
        """Remove the group; the connection stays. Idempotent."""
        group, self.group = self.group, None
        if group is not None and self._session is not None and self.ray.is_initialized():
            with contextlib.suppress(Exception):  # the head may be gone, and the group with it
                self.ray.util.remove_placement_group(group)

    def close(self) -> None:
        """Idempotent. A cluster that was started here ends."""
        self.give_back()
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Current:
    """The resources of this process. The state is Ray's own: it allows one connection in a process."""

    resources: RayResources | None = None


def setup_ray_resources(config: RayConfig | None = None) -> RayResources:
    """Join or start the cluster that `config` describes and reserve its placement group.

    What was set up before is closed. Raises ConfigError within some 10 seconds: an address where nobody answers, a
    wrong token, other versions, less than is asked for, no room; nothing is left then.
    """
    close_current()
    _Current.resources = RayResources(config or RayConfig())
    return _Current.resources


def current() -> RayResources | None:
    """What `setup_ray_resources` has made and nobody has closed."""
    if _Current.resources is not None and _Current.resources.closed:
        _Current.resources = None
    return _Current.resources


def close_current() -> None:
    resources, _Current.resources = _Current.resources, None
    if resources is not None:
        resources.close()


def create_placement_group(config: RayConfig) -> Any:
    """Ray's placement group of `num_nodes` bundles, reserved; Ray removes it when this process ends.

    Raises ConfigError within 10 s when it cannot be had: what is asked, what exists, what is taken by whom.
    """
    ray = import_ray()
    if not ray.is_initialized():
        raise ConfigError("This process is not connected to Ray.", fix="Call setup_ray_resources first.")
    view, bundle = RayView(ray), config.bundle
    mesh, demand, strategy = Mesh(tp=config.num_nodes), Demand(bundle), config.placement_strategy
    deadline = time.monotonic() + PLACE_S
    while True:
        sites = view.nodes()
        if _fits(mesh, demand, sites, strategy):
            group = ray.util.placement_group([bundle] * config.num_nodes, strategy=strategy, name=view.new_name())
            if group.wait(_TRY_S):
                return group
            ray.util.remove_placement_group(group)
        would_fit = _fits(mesh, demand, sites, strategy, when_empty=True)
        if time.monotonic() > deadline or not would_fit:
            break
        time.sleep(_PAUSE_S)
    bundles = f"{config.num_nodes} bundle{'s' if config.num_nodes > 1 else ''}"
    asked = f"{config.num_nodes} × {demand}, strategy {strategy}"
    wait = "End what holds them, or ask" if would_fit else "Add nodes with `ray start --address=…`, or ask"
    raise ConfigError(
        f"The Ray cluster has no place for a placement group of {bundles}. "
        f"{shortage(asked, demand, sites, view.takers())}",
        fix=f"{wait} for less: num_nodes, cpus_per_node, gpus_per_node, memory_per_node, or another "
        "placement_strategy.",
    )


def _fits(mesh: Mesh, demand: Demand, sites: list[Site], strategy: str, *, when_empty: bool = False) -> bool:
    try:
        arrange(mesh, demand, sites, strategy, when_empty=when_empty)
    except NoRoom:
        return False
    return True


@dataclass(frozen=True)
class DeviceSettings:
    """What `optimize_gpu_memory` did, in words."""

    applied: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    """With the reason."""


def optimize_gpu_memory(config: RayConfig | None = None) -> DeviceSettings:
    """Set cuDNN and the share of GPU memory for this process, as far as it has such devices; says what was skipped.

    `memory_fraction` bounds what PyTorch may allocate on each GPU of `gpu_ids` (None: on all). Raises ConfigError for a
    GPU that is not there when there are others.
    """
    import torch

    config = config or RayConfig()
    if not torch.cuda.is_available():
        why = "this process has no CUDA device"
        names = ["cudnn_benchmark", "cudnn_deterministic", "memory_fraction"]
        names += [] if config.gpu_ids is None else ["gpu_ids"]
        found = DeviceSettings(skipped=tuple(f"{name} ({why})" for name in names))
    else:
        found = _set_cuda(torch, config)
    for line in found.skipped:
        log.info("Skipped: %s.", line)
    return found


def _set_cuda(torch: ModuleType, config: RayConfig) -> DeviceSettings:
    count = torch.cuda.device_count()
    gpus = tuple(range(count)) if config.gpu_ids is None else config.gpu_ids
    missing = [number for number in gpus if number >= count]
    if missing:
        raise ConfigError(f"`gpu_ids` names GPU {missing[0]}, but this process sees {count}, numbered from 0.")
    applied, skipped = [], []
    if torch.backends.cudnn.is_available():
        torch.backends.cudnn.benchmark = config.cudnn_benchmark
        torch.backends.cudnn.deterministic = config.cudnn_deterministic
        applied += [f"cudnn_{name} {getattr(config, f'cudnn_{name}')}" for name in ("benchmark", "deterministic")]
    else:
        skipped += ["cudnn_benchmark (PyTorch has no cuDNN here)", "cudnn_deterministic (PyTorch has no cuDNN here)"]
    for number in gpus:
        torch.cuda.set_per_process_memory_fraction(config.memory_fraction, number)
        applied.append(f"memory_fraction {config.memory_fraction:g} on GPU {number}")
    return DeviceSettings(tuple(applied), tuple(skipped))

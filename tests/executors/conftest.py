"""Every kind of executor, one model, and a reference that computes everything from scratch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from phalanx import env
from phalanx.config import EngineConfig
from phalanx.distributed.mesh import Mesh
from phalanx.executor.base import Executor
from phalanx.executor.hub import HubExecutor
from phalanx.executor.inprocess import InProcessExecutor
from phalanx.executor.launcher import Layout
from phalanx.executor.multiprocess import SupervisorLauncher, SupervisorProcess
from phalanx.executor.ray import RayLauncher
from phalanx.executor.ray_places import RayPlaces
from tests.helpers.plan_script import Reference
from tests.helpers.worker_model import engine_config, reference_decoder, write_model


class Warm:
    """What all tests of a module share, so that torch is imported once: a supervisor, and actors on a local Ray."""

    def __init__(self, model: Path):
        self.model = model
        self.supervisor = SupervisorProcess(zygote=True)
        self._places: dict[Mesh, RayPlaces] = {}

    def config(self, **options: object) -> EngineConfig:
        return engine_config(self.model, distributed_executor_backend="ray", num_cpus_per_worker=0.5, **options)

    def places(self, mesh: Mesh) -> RayPlaces:
        if mesh not in self._places:
            self._places[mesh] = RayPlaces(mesh, self.config().parallel, "cpu")
            with env.changed(RAY_ADDRESS="local"):
                self._places[mesh].open()
        return self._places[mesh]

    def close(self) -> None:
        for places in reversed(self._places.values()):
            places.close()
        self.supervisor.close()


@dataclass(frozen=True)
class Kind:
    """One way to run the model."""

    make: Callable[[Warm], Executor]
    layers: tuple[str, ...]
    """What each rank holds, and how many heads."""
    heads: tuple[int, ...]


def ranks(mesh: Mesh, **layout: tuple[int, ...]) -> Callable[[Warm], Executor]:
    def make(warm: Warm) -> Executor:
        launcher = SupervisorLauncher(mesh.world_size, "cpu", supervisor=warm.supervisor, keep=True)
        return HubExecutor(launcher, Layout(mesh, **layout))

    return make


def on_ray(mesh: Mesh, **layout: tuple[int, ...]) -> Callable[[Warm], Executor]:
    def make(warm: Warm) -> Executor:
        shape = Layout(mesh, **layout)
        return HubExecutor(RayLauncher(warm.config(), shape, places=warm.places(mesh)), shape)

    return make


KINDS = {
    "inprocess": Kind(lambda _: InProcessExecutor(), ("0-3",), (6,)),
    "mp-tp2": Kind(ranks(Mesh(tp=2)), ("0-3",) * 2, (3, 3)),
    "mp-pp2": Kind(ranks(Mesh(pp=2), stage_layers=(2, 1)), ("0-2", "2-3"), (6, 6)),
    "mp-widths": Kind(ranks(Mesh.of_widths((2, 1))), ("0-2", "0-2", "2-3"), (3, 3, 6)),
    "ray-tp2": Kind(on_ray(Mesh(tp=2)), ("0-3",) * 2, (3, 3)),
    "ray-pp2": Kind(on_ray(Mesh(pp=2), stage_layers=(2, 1)), ("0-2", "2-3"), (6, 6)),
}
SLOW = {"mp-pp2", "ray-pp2"}
"""Kinds that differ from the others in parts which other kinds show."""


@pytest.fixture(scope="module")
def warm(model: Path) -> Iterator[Warm]:
    shared = Warm(model)
    yield shared
    shared.close()


@pytest.fixture(params=[pytest.param(k, marks=[pytest.mark.slow] * (k in SLOW)) for k in sorted(KINDS)])
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def fresh(kind: Kind, warm: Warm) -> Iterator[Executor]:
    """An executor of each kind, not started."""
    executor = kind.make(warm)
    yield executor
    executor.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def executor(fresh: Executor, model: Path) -> Executor:
    """Started with the small configuration."""
    fresh.start(engine_config(model))
    return fresh


@pytest.fixture(scope="session")
def reference(model: Path) -> Reference:
    return Reference(reference_decoder(model))

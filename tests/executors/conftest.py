"""Every kind of executor, one model, and a reference that computes everything from scratch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from phalanx.distributed.mesh import Mesh
from phalanx.executor.base import Executor
from phalanx.executor.hub import HubExecutor, Layout
from phalanx.executor.inprocess import InProcessExecutor
from phalanx.executor.multiprocess import SupervisorLauncher, SupervisorProcess
from tests.helpers.plan_script import Reference
from tests.helpers.worker_model import engine_config, reference_decoder, write_model


@dataclass(frozen=True)
class Kind:
    """One way to run the model. `make` gets the supervisor that all tests share, so that torch is imported once."""

    make: Callable[[SupervisorProcess], Executor]
    layers: tuple[str, ...]
    """What each rank holds, and how many heads."""
    heads: tuple[int, ...]


def ranks(mesh: Mesh, **layout: tuple[int, ...]) -> Callable[[SupervisorProcess], Executor]:
    def make(supervisor: SupervisorProcess) -> Executor:
        launcher = SupervisorLauncher(mesh.world_size, "cpu", supervisor=supervisor, keep=True)
        return HubExecutor(launcher, Layout(mesh, **layout))

    return make


KINDS = {
    "inprocess": Kind(lambda _: InProcessExecutor(), ("0-3",), (6,)),
    "mp-tp2": Kind(ranks(Mesh(tp=2)), ("0-3",) * 2, (3, 3)),
    "mp-pp2": Kind(ranks(Mesh(pp=2), stage_layers=(2, 1)), ("0-2", "2-3"), (6, 6)),
    "mp-widths": Kind(ranks(Mesh.of_widths((2, 1))), ("0-2", "0-2", "2-3"), (3, 3, 6)),
}


@pytest.fixture(scope="session")
def supervisor() -> Iterator[SupervisorProcess]:
    process = SupervisorProcess(zygote=True)
    yield process
    process.close()


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def fresh(kind: Kind, supervisor: SupervisorProcess) -> Iterator[Executor]:
    """An executor of each kind, not started."""
    executor = kind.make(supervisor)
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

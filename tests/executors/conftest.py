"""Every kind of executor, one model, and a reference that computes everything from scratch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.executor.base import Executor
from phalanx.executor.inprocess import InProcessExecutor
from tests.helpers.plan_script import Reference
from tests.helpers.worker_model import engine_config, reference_decoder, write_model

KINDS = {"inprocess": InProcessExecutor}


@pytest.fixture(params=sorted(KINDS))
def fresh(request: pytest.FixtureRequest) -> Iterator[Executor]:
    """An executor of each kind, not started."""
    executor = KINDS[request.param]()
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

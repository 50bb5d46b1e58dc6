"""Fixtures for tests of ranks as processes; a `conftest.py` imports those that it wants."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.executor.multiprocess import SupervisorProcess
from tests.helpers.worker_model import write_model


@pytest.fixture(scope="session")
def supervisor() -> Iterator[SupervisorProcess]:
    """One for all, so that torch is imported once."""
    process = SupervisorProcess(zygote=True)
    yield process
    process.close()


@pytest.fixture(scope="session")
def rank_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small one."""
    return write_model(tmp_path_factory.mktemp("model"))

"""One supervisor for the tests whose ranks are processes of this node, and one small model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.executor.multiprocess import SupervisorProcess
from tests.helpers.tiny_model import write_tiny_model
from tests.helpers.worker_model import write_model


@pytest.fixture(scope="session")
def supervisor() -> Iterator[SupervisorProcess]:
    process = SupervisorProcess(zygote=True)
    yield process
    process.close()


@pytest.fixture(scope="session")
def rank_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With tokenizer and chat template."""
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny")))

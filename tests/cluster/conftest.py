"""What all tests of the cluster share: no Ray of this machine is found, and one small model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx import env
from tests.helpers.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("cluster") / "model"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """No Ray of this machine is found. The token is its user's: Ray reads it once in a process."""
    folder = tmp_path_factory.mktemp("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        with env.changed(RAY_TMPDIR=str(folder), OMP_NUM_THREADS="1"):
            yield folder

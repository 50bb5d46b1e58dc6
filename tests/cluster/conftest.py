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
    """No Ray of this machine is found, and no token of its user."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
            patch.delenv(name, raising=False)
        with env.changed(RAY_TMPDIR=str(home), HOME=str(home), OMP_NUM_THREADS="1"):
            yield home

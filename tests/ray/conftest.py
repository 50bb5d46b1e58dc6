"""The small model that all tests here run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.plan_script import Reference
from tests.helpers.worker_model import reference_decoder, write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def reference(model: Path) -> Reference:
    return Reference(reference_decoder(model))

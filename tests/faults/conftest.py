"""One supervisor for the tests whose ranks are processes of this node, and small models."""

from __future__ import annotations

import pytest

from tests.helpers.rank_fixtures import rank_model, supervisor
from tests.helpers.tiny_model import write_tiny_model

__all__ = ["rank_model", "supervisor", "tiny_model"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With tokenizer and chat template."""
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny")))

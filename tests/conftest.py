"""Shared by all tests: the repository root on the path, so that `tests.helpers` can be imported, and their checks kept.

pytest turns the asserts of test modules into code that `python -O` keeps; those of the helpers are treated likewise.
"""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
pytest.register_assert_rewrite("tests.helpers")


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    """A command that runs in a test's own process sets them up for itself; the next test wants to see their lines."""
    yield
    logger = logging.getLogger("phalanx")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)

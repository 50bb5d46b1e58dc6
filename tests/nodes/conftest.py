"""Test beds of several hosts; skipped, with the reason, where there can be none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import hosts
from tests.helpers.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def _bed(count: int) -> Iterator[list[hosts.Host]]:
    if reason := hosts.missing():
        pytest.skip(reason)
    with hosts.test_bed(count) as bed:
        yield bed


@pytest.fixture
def two_hosts() -> Iterator[list[hosts.Host]]:
    yield from _bed(2)


@pytest.fixture
def three_hosts() -> Iterator[list[hosts.Host]]:
    yield from _bed(3)


@pytest.fixture(scope="module")
def lasting_hosts() -> Iterator[list[hosts.Host]]:
    """Two hosts for all tests of a module."""
    yield from _bed(2)

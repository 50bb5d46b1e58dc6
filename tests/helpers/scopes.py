"""How long fixtures live."""

from __future__ import annotations

import pytest


def module_or_test(fixture_name: str, config: pytest.Config) -> str:
    """For a server that outlives what a test does to it; with `--without-recovery` it does not."""
    return "function" if config.getoption("--without-recovery") else "module"

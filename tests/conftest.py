"""Shared by all tests: the repository root on the path, so that `tests.helpers` can be imported, and their checks kept.

pytest turns the asserts of test modules into code that `python -O` keeps; those of the helpers are treated likewise.

With `--without-recovery` nothing recovers, and the tests that are marked `recovery` have to fail, for want of it: what
proves that they test it. Others are left out.
"""

import logging
import os
import re
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
pytest.register_assert_rewrite("tests.helpers")

from phalanx.config import EngineConfig  # noqa: E402

hypothesis.settings.register_profile("phalanx", deadline=None)  # no test is judged by the clock of a busy machine
hypothesis.settings.load_profile("phalanx")

FOR_WANT_OF_RECOVERY = re.compile(
    r"The engine process is gone|The engine lost its workers and could not go on"
    r"|The connection to the router at \S+ was lost"
)
"""What a client is told then."""


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "nothing recovers, and tests that are marked `recovery` have to fail for that reason; others are left out"
    parser.addoption("--without-recovery", action="store_true", help=words)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--without-recovery"):
        os.environ["PHALANX_ENABLE_RECOVERY"] = "false"  # for commands; what is started from Python does not look at it
        recovering = EngineConfig.from_options
        EngineConfig.from_options = lambda **options: recovering(**{"enable_recovery": False, **options})  # type: ignore


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--without-recovery"):
        others = [item for item in items if item.get_closest_marker("recovery") is None]
        items[:] = [item for item in items if item not in others]
        config.hook.pytest_deselected(items=others)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if item.config.getoption("--without-recovery") and report.when == "call" and not report.skipped:
        if report.passed:
            report.outcome, report.longrepr = "failed", "it passes without recovery"
        elif FOR_WANT_OF_RECOVERY.search(report.longreprtext):
            report.outcome = "passed"
    return report


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    """A command that runs in a test's own process sets them up for itself; the next test wants to see their lines."""
    yield
    logger = logging.getLogger("phalanx")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)

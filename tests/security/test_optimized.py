"""SEC-20: `python -O` takes no check away, neither from the product nor from these tests.

The product has no assert at all (test_source.py), and `make test-optimized` runs the suite with every process under -O.
Here: that a false statement of a test or of a helper is noticed under -O, and the checks of files and values.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

HELPER = "def check(value):\n    assert value\n"
TESTS = """
from tests.helpers.checks import check

def test_true():
    check(not __debug__)

def test_false():
    assert __debug__

def test_false_in_a_helper():
    check(__debug__)
"""


def pytest_optimized(folder: Path, *arguments: str) -> tuple[int, int]:
    """How many tests passed and failed."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        "-o",
        "addopts=",
        *arguments,
    ]
    environment = {**os.environ, "PYTHONOPTIMIZE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    counts = {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    assert "error" not in counts, done.stdout
    return counts.get("passed", 0), counts.get("failed", 0)


def test_false_statements_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "tests/helpers").mkdir(parents=True)
    shutil.copy(ROOT / "tests/conftest.py", tmp_path / "tests/conftest.py")
    (tmp_path / "tests/helpers/checks.py").write_text(HELPER)
    (tmp_path / "tests/test_checks.py").write_text(TESTS)
    assert pytest_optimized(tmp_path, "tests/test_checks.py") == (1, 2)


def test_lying_files_and_values_are_refused() -> None:
    passed, failed = pytest_optimized(
        ROOT, "tests/security/test_files.py", "tests/unit/test_sampling_params.py", "-k", "broken or sampling"
    )
    assert (passed > 90, failed) == (True, 0)

"""Shared by all tests: the repository root on the path, so that `tests.helpers` can be imported, and their checks kept.

pytest turns the asserts of test modules into code that `python -O` keeps; those of the helpers are treated likewise.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
pytest.register_assert_rewrite("tests.helpers")

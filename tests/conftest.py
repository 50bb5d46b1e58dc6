"""Shared by all tests: the repository root on the path, so that `tests.helpers` can be imported."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

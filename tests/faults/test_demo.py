"""`make demo`: an answer goes on although a rank is killed, and five lines say how."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.recovery
@pytest.mark.slow
def test_demo() -> None:
    done = subprocess.run([sys.executable, "scripts/demo.py"], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "\033" not in done.stdout  # no terminal, no colours
    _, _, told = done.stdout.partition("What happened\n")
    starts = ["killed", "noticed", "replaced", "went on", "the text"]
    lines = told.splitlines()
    assert len(lines) == 5 and all(line.startswith(f"  {start}") for line, start in zip(lines, starts, strict=True)), (
        told
    )
    assert "it was killed by SIGKILL" in lines[1] and lines[4].endswith("character by character")

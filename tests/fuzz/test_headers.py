"""SEC-21, SEC-22: the fuzzer of file headers, without atheris. docs/security.md has the runs with it."""

import subprocess
import sys
from pathlib import Path

import pytest

FUZZER = Path(__file__).with_name("fuzz_headers.py")


def fuzz(kind: str, runs: int, folder: Path) -> str:
    command = [sys.executable, str(FUZZER), kind, "--runs", str(runs), "--seed", "21", "--keep", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_a_few_changes(kind: str, tmp_path: Path) -> None:
    said = fuzz(kind, 20_000, tmp_path)
    assert "20,000 runs" in said
    assert " 0 accepted" not in said


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_many_changes(kind: str, tmp_path: Path) -> None:
    assert "1,000,000 runs" in fuzz(kind, 1_000_000, tmp_path)

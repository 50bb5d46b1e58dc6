"""The kernels' own tests, and those of tapes and native steps with what ranks exchange in them, against a library that
watches its memory and its arithmetic: AddressSanitizer and UBSan."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ABOVE = ("test_tapes.py", "test_decoding.py", "test_decoding_ranks.py")
"""Of `tests/parity`: whole steps. Ranks are forked, so they have the same library."""
CMAKE = Path(sys.executable).with_name("cmake")

RUN = """
import sys
import phalanx.kernels
phalanx.kernels.__path__.insert(0, sys.argv[1])
from phalanx.kernels.library import native
assert native().__file__.startswith(sys.argv[1]), native()
import pytest
raise SystemExit(pytest.main(sys.argv[2:]))
"""


def build(folder: Path) -> Path:
    """Where the library is. Built once for a state of the sources; the next run builds what has changed."""
    output = folder / "library"
    configure = [
        str(CMAKE), "-S", str(ROOT / "native"), "-B", str(folder), "-G", "Ninja", "-DPHALANX_SANITIZE=ON",
        f"-DPHALANX_OUTPUT={output}", f"-DPython_EXECUTABLE={sys.executable}", "--log-level=WARNING",
    ]  # fmt: skip
    for command in (configure, [str(CMAKE), "--build", str(folder), "-j", "1"]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return output


def runtime(name: str) -> str:
    found = subprocess.run(["c++", f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip(f"the compiler has no {name}")
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_kernels_under_sanitizers() -> None:
    if not CMAKE.exists() or shutil.which("c++") is None:
        pytest.skip("there is nothing to build with")
    # The second is there from the beginning, so that the first finds what it watches for exceptions.
    preload = f"{runtime('libasan.so')} {runtime('libstdc++.so')}"
    library = build(ROOT / "build" / "sanitized")
    builds = {"test_sanitized.py", "test_arm.py"}
    tests = sorted(str(p) for p in Path(__file__).parent.glob("test_*.py") if p.name not in builds)
    tests += [str(ROOT / "tests" / "parity" / name) for name in ABOVE]
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(library), "-q", "-s", "-x", "-n0", "-p", "no:cacheprovider", *tests],
        cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {
            "LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter keeps what it has
            "UBSAN_OPTIONS": "print_stacktrace=1", "OMP_NUM_THREADS": "1", "PHALANX_KERNELS": "",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[:8000]  # a report begins with what it is about

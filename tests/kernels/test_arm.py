"""The kernels for 64-bit Arm, where there is a cross compiler and an emulator: no machine of that kind is needed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.source import ROOT

COMPILER, EMULATORS = "aarch64-linux-gnu-g++", ("qemu-aarch64-static", "qemu-aarch64")
KERNELS = ROOT / "native" / "kernels"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_kernels_for_arm(tmp_path: Path) -> None:
    compiler, emulator = shutil.which(COMPILER), next(filter(None, map(shutil.which, EMULATORS)), None)
    if compiler is None or emulator is None:
        pytest.skip(f"there is no {COMPILER} or no {EMULATORS[0]}")
    sets = re.search(
        r"set\(ISAS generic dotprod\)\s+set\(ISA_dotprod (\S+)\)", (ROOT / "native/CMakeLists.txt").read_text()
    )
    assert sets is not None
    common = ["-std=c++17", "-O2", "-Wall", "-Wno-psabi", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]
    objects = []

    def compile(source: Path, *flags: str) -> None:
        objects.append(str(tmp_path / f"{len(objects)}.o"))
        command = [compiler, *common, *flags, f"-I{ROOT / 'native'}", "-c", str(source), "-o", objects[-1]]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:4000]

    for kernel in sorted(KERNELS.glob("*.cpp")):
        compile(kernel, "-DPHALANX_ISA=generic")
        compile(kernel, "-DPHALANX_ISA=dotprod", sets[1])
    compile(ROOT / "native" / "cpu.cpp")
    compile(Path(__file__).with_name("arm.cpp"))
    subprocess.run([compiler, "-static", *objects, "-o", str(tmp_path / "arm")], check=True)
    done = subprocess.run([emulator, str(tmp_path / "arm")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "all the same\n"), done.stdout + done.stderr

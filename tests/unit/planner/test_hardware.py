"""Hardware facts: this machine's are plausible, and made-up machines are read right."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from phalanx.planner import hardware
from phalanx.planner.hardware import detect

MEMINFO = "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    8000000 kB\n"
KB = 1024


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_this_machine():
    found = detect()
    assert found.device in ("cpu", "cuda")
    assert 1 <= found.cores <= os.cpu_count()
    assert 0 < found.memory_available <= found.memory_total <= psutil.virtual_memory().total
    assert found.cpu_model


def test_without_torch():
    code = "import sys, phalanx.planner.hardware as h; h.detect(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_fewer_cores_by_affinity():
    allowed = os.sched_getaffinity(0)
    code = (
        "import os; os.sched_setaffinity(0, {%d}); from phalanx.planner.hardware import detect; print(detect().cores)"
    )
    done = subprocess.run([sys.executable, "-c", code % min(allowed)], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_memory_of_a_machine_without_limits(tmp_path):
    found = detect(write(tmp_path, {"proc/meminfo": MEMINFO}))
    assert (found.memory_total, found.memory_available) == (16_000_000 * KB, 8_000_000 * KB)


def test_control_group_version_2(tmp_path):
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/pod/inner\n",
            "sys/fs/cgroup/pod/memory.max": "4096000\n",
            "sys/fs/cgroup/pod/memory.current": "3000000\n",
            "sys/fs/cgroup/pod/memory.stat": "anon 1\ninactive_file 500000\n",
            "sys/fs/cgroup/pod/inner/memory.max": "max\n",
            "sys/fs/cgroup/pod/inner/cpu.max": "50000 100000\n",
        },
    )
    found = detect(tmp_path)
    assert found.memory_total == 4_096_000
    assert found.memory_available == 4_096_000 - 3_000_000 + 500_000
    assert found.cores == 1


def test_control_group_version_1_with_a_path_of_the_host(tmp_path):
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "2048000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "48000\n",
            "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 8000\n",
        },
    )
    found = detect(tmp_path)
    assert (found.memory_total, found.memory_available) == (2_048_000, 2_008_000)


def test_a_limit_above_the_machine_is_none(tmp_path):
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "5:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
        },
    )
    assert detect(tmp_path).memory_total == 16_000_000 * KB


@pytest.mark.parametrize(
    ("cpuinfo", "native"),
    [
        ("model name\t: Old\nflags\t\t: fpu avx2\n", False),
        ("model name\t: New\nflags\t\t: fpu avx2 avx512_bf16\n", True),
        ("model name\t: Newer\nflags\t\t: fpu amx_bf16\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("", False),
    ],
)
def test_bfloat16_by_instruction_set(cpuinfo, native, tmp_path):
    found = detect(write(tmp_path, {"proc/cpuinfo": cpuinfo, "proc/meminfo": MEMINFO}))
    assert found.native_bfloat16 is native


@pytest.mark.parametrize("built", [True, False])
def test_a_gpu_counts_only_with_a_torch_that_can_use_it(built, tmp_path, monkeypatch):
    write(tmp_path, {"dev/nvidia0": "", "proc/meminfo": MEMINFO})
    monkeypatch.setattr(hardware, "torch_has_cuda", lambda: built)
    assert detect(tmp_path).device == ("cuda" if built else "cpu")


def test_torch_version_file_is_read_like_torch_reads_it():
    import torch

    assert hardware.torch_has_cuda() == (torch.version.cuda is not None)

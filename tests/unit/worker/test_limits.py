"""Memory and cores within control groups, read from made-up `/proc` and `/sys` trees."""

import os

import numpy as np
import psutil
import pytest

from phalanx.worker.limits import host_memory, untouched, usable_cores

GIB = 2**30


def tree(root, files: dict[str, str]):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "limit", "used"),
    [
        pytest.param(
            {
                "proc/self/cgroup": "0::/app/inner\n",
                f"{V2}/app/memory.max": f"{2 * GIB}\n",
                f"{V2}/app/memory.current": f"{GIB}\n",
                f"{V2}/app/memory.stat": f"anon 5\ninactive_file {GIB // 2}\n",
                f"{V2}/app/inner/memory.max": "max\n",
                f"{V2}/app/inner/memory.current": f"{GIB}\n",
            },
            2 * GIB,
            GIB // 2,
            id="v2, the limit is the parent's and cached files do not count",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/\n",
                f"{V2}/memory.max": f"{GIB}\n",
                f"{V2}/memory.current": f"{GIB // 4}\n",
            },
            GIB,
            GIB // 4,
            id="v2, a container's own namespace",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "12:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n",
                f"{V1}/memory.limit_in_bytes": f"{GIB}\n",
                f"{V1}/memory.usage_in_bytes": f"{GIB // 2}\n",
                f"{V1}/memory.stat": f"total_inactive_file {GIB // 4}\n",
            },
            GIB,
            GIB // 4,
            id="v1, the path is the host's and is not there",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "9:memory:/a/b\n",
                f"{V1}/a/b/memory.limit_in_bytes": f"{GIB}\n",
                f"{V1}/a/b/memory.usage_in_bytes": f"{2 * GIB}\n",
                f"{V1}/a/memory.limit_in_bytes": f"{3 * GIB}\n",
                f"{V1}/a/memory.usage_in_bytes": "1\n",
            },
            GIB,
            GIB,
            id="v1, more used than allowed",
        ),
    ],
)
def test_a_group_limits_memory(tmp_path, files, limit, used):
    memory = host_memory(tree(tmp_path, files))
    assert memory.total == limit
    assert memory.available == min(limit - used, memory.available)
    assert memory.available == limit - used or psutil.virtual_memory().available < limit


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/\n", f"{V2}/memory.max": "max\n"},
        {"proc/self/cgroup": "nonsense\n\n::\n", f"{V2}/memory.max": "x\n", f"{V2}/memory.current": "-\n"},
        {
            "proc/self/cgroup": "1:memory:/\n",
            f"{V1}/memory.limit_in_bytes": "9223372036854771712\n",
            f"{V1}/memory.usage_in_bytes": "1\n",
        },
    ],
)
def test_without_a_limit_the_machine_counts(tmp_path, files):
    memory = host_memory(tree(tmp_path, files))
    assert memory.total == psutil.virtual_memory().total
    assert 0 < memory.available <= memory.total


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"proc/self/cgroup": "0::/x\n", f"{V2}/x/cpu.max": "100000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/x\n", f"{V2}/x/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/x\n", f"{V2}/x/cpu.max": "max 100000\n"}, None),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "100000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            1,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({}, None),
    ],
)
def test_a_quota_limits_cores(tmp_path, files, cores):
    affinity = len(os.sched_getaffinity(0))
    assert usable_cores(tree(tmp_path, files)) == (affinity if cores is None else cores)


def test_affinity_limits_cores(tmp_path):
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cores(tmp_path) == 1
    finally:
        os.sched_setaffinity(0, before)


def test_memory_is_taken_where_it_is_first_written():
    memory = np.zeros(64 * 2**20, np.uint8)
    address = memory.ctypes.data
    assert untouched(address, memory.nbytes) > 60 * 2**20
    memory[: 32 * 2**20] = 1
    assert 28 * 2**20 < untouched(address, memory.nbytes) <= 32 * 2**20
    memory[:] = 1
    assert untouched(address, memory.nbytes) == 0
    assert untouched(address, 0) == untouched(0, 2**20) == 0, "none of ours"

"""What the operating system lets this process use: memory and cores, container limits included.

A container's limit is not what the machine reports. Control groups (cgroup v1 and v2) limit each level of a hierarchy,
so every level from the process's own group to the root counts. Reads files under `/proc` and `/sys` only; where they
are missing or unreadable, the machine's own figures stand.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

UNLIMITED = 2**60
"""cgroup v1 writes a huge number for "no limit"."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one device, or of the host."""

    total: int
    available: int
    """What can still be used without pushing anybody out."""


def host_memory(root: Path = Path("/")) -> Memory:
    """The host's memory within the limits of this process's control groups."""
    machine = psutil.virtual_memory()
    total, available = int(machine.total), int(machine.available)
    for limit, used in _group_limits(root):
        total = min(total, limit)
        available = min(available, max(limit - used, 0))
    return Memory(total, available)


def untouched(address: int, nbytes: int) -> int:
    """How many of these bytes of our memory are reserved only: nothing was written there, and so they count as free."""
    first, end = -(-address // mmap.PAGESIZE), (address + nbytes) // mmap.PAGESIZE  # whole pages
    resident = np.ones(max(end - first, 0), np.uint8)
    start, size = ctypes.c_void_p(first * mmap.PAGESIZE), ctypes.c_size_t(resident.size * mmap.PAGESIZE)
    if not resident.size or ctypes.CDLL(None).mincore(start, size, ctypes.c_void_p(resident.ctypes.data)):
        return 0
    return int(np.count_nonzero(resident & 1 == 0)) * mmap.PAGESIZE


def usable_cores(root: Path = Path("/")) -> int:
    """Cores this process may run on: its affinity mask, and its groups' CPU quota rounded up."""
    return max(1, math.ceil(core_time(root)))


def core_time(root: Path = Path("/")) -> float:
    """Seconds of processor time that this process may have each second: its cores, or less by its groups' quota."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return min([cores, *_cpu_quotas(root)])


def _group_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use that cannot be dropped) of every group that has a limit."""
    for folder in group_folders(root, "memory"):
        for limit_name, used_name, cache_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = number(folder / limit_name), number(folder / used_name)
            if limit is not None and used is not None and limit < UNLIMITED:
                yield limit, max(used - (statistic(folder / "memory.stat", cache_name) or 0), 0)


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Cores' worth of time of every group that has a quota."""
    for folder in group_folders(root, "cpu"):
        fields = _text(folder / "cpu.max").split()
        if len(fields) == 2 and fields[0].isdigit() and fields[1].isdigit() and int(fields[1]) > 0:
            yield int(fields[0]) / int(fields[1])
        quota, period = number(folder / "cpu.cfs_quota_us"), number(folder / "cpu.cfs_period_us")
        if quota is not None and period is not None and quota > 0 and period > 0:
            yield quota / period


def group_folders(root: Path, controller: str, process: int | str = "self") -> Iterator[Path]:
    """The folders of a process's groups for `controller`, from its own up to the mount point."""
    for line in _text(root / f"proc/{process}/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup"
        if controllers:  # v1: one mount a controller, named after it or after the set it is in
            names = [controllers, controller]
            mount = next((mount / name for name in names if (mount / name).is_dir()), mount / controller)
        # In a container without its own namespace the path is the host's and is not there; the mount point is ours.
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for depth in range(len(parts), -1, -1):
            folder = mount.joinpath(*parts[:depth])
            if folder.is_dir():
                yield folder


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def number(path: Path) -> int | None:
    """The one that a file holds; None where there is none."""
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def statistic(path: Path, name: str) -> int | None:
    """The number behind `name`, in a file with a line for each."""
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return None

"""What this machine has: cores, memory, instruction sets, a GPU or none. Found in milliseconds and without torch.

Covers what the configuration is resolved against (`phalanx.config.resolve`) and what `doctor` and `collect-env` show.
Does not cover other machines, the details of a GPU (those need torch), or how fast the processor reads memory
(`phalanx.worker.capacity`).

Limits of a container count: cores are those the process may run on, capped by its CPU quota; memory is capped by the
tightest control group above the process, versions 1 and 2.
"""

from __future__ import annotations

import importlib.util
import math
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

_NATIVE_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Names of the bfloat16 product instructions in /proc/cpuinfo: x86 `flags`, and `bf16` of arm64 `Features`."""


@dataclass(frozen=True)
class Hardware:
    device: str
    """What `--device auto` means here: cuda or cpu."""
    cores: int
    """Cores this process may use, at least 1."""
    cpu_model: str
    cpu_flags: frozenset[str]
    memory_total: int
    """Bytes: the machine's, or the control group's limit where that is lower."""
    memory_available: int
    """Bytes that can be taken without swapping."""
    architecture: str = "x86_64"

    @property
    def native_bfloat16(self) -> bool:
        """Whether the processor multiplies bfloat16 numbers itself."""
        return not _NATIVE_BFLOAT16.isdisjoint(self.cpu_flags)


def detect(root: Path = Path("/")) -> Hardware:
    """The facts of this machine. `root` is where /proc, /sys and /dev are found."""
    model, flags = _cpu(root)
    total, available = _memory(root)
    return Hardware(
        device="cuda" if (root / "dev/nvidia0").exists() and torch_has_cuda() else "cpu",
        cores=_cores(root),
        cpu_model=model,
        cpu_flags=flags,
        memory_total=total,
        memory_available=available,
        architecture=platform.machine(),
    )


def torch_has_cuda() -> bool:
    """Whether the installed torch was built for CUDA, read from its version file: importing torch takes seconds."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return False
    text = _read(Path(next(iter(found.submodule_search_locations))) / "version.py")
    stated = re.search(r"^cuda\b[^=\n]*=\s*(\S+)", text, re.MULTILINE)
    return bool(stated) and stated[1] != "None"  # type: ignore[index]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _cpu(root: Path) -> tuple[str, frozenset[str]]:
    text = _read(root / "proc/cpuinfo")
    name = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    model = name[1].strip() if name else platform.processor() or platform.machine()
    return model, frozenset(flags[1].split()) if flags else frozenset()


def _cores(root: Path) -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    for folder in _groups(root, "cpu"):
        quota = _read(folder / "cpu.max").split()  # version 2: "max 100000" or "150000 100000"
        if len(quota) != 2:
            quota = [_read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()]
        if quota[0].isdigit() and quota[1].isdigit() and int(quota[1]):
            count = min(count, math.ceil(int(quota[0]) / int(quota[1])))
    return max(1, count)


def _memory(root: Path) -> tuple[int, int]:
    text = _read(root / "proc/meminfo")
    stated = {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s*(\d+) kB$", text, re.MULTILINE)}
    total = stated.get("MemTotal", 0)
    available = stated.get("MemAvailable", stated.get("MemFree", 0))
    if not total:
        import psutil

        machine = psutil.virtual_memory()
        total, available = machine.total, machine.available
    for folder in _groups(root, "memory"):
        limit = _read(folder / "memory.max").strip() or _read(folder / "memory.limit_in_bytes").strip()
        if not limit.isdigit() or int(limit) >= total:  # "max", or version 1's huge number for no limit
            continue
        used = _read(folder / "memory.current").strip() or _read(folder / "memory.usage_in_bytes").strip()
        # Cached file pages count as used but are given back under pressure.
        cached = re.search(r"^(?:total_)?inactive_file (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
        free = int(limit) - (int(used) if used.isdigit() else 0) + (int(cached[1]) if cached else 0)
        total, available = int(limit), max(0, min(available, free, int(limit)))
    return total, available


def _groups(root: Path, controller: str) -> list[Path]:
    """The control-group folders above this process that can limit `controller`, innermost first."""
    folders: list[Path] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        relative = Path(path.lstrip("/"))
        # In a container the path is often the host's and does not exist here; its ancestors then do.
        folders += [base / part for part in (relative, *relative.parents) if ".." not in part.parts]
    return [folder for folder in folders if folder.is_dir()]

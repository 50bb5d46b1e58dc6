"""What a process died of, in words: its wait status, and whether the kernel ended it for want of memory.

The kernel does not say so to the parent; it counts. A control group counts the processes that it lost that way
(`oom_kill`, in cgroup v1 and v2), whichever limit was reached; where that cannot be read, the machine's count since its
boot must do. Reads files under `/proc` and `/sys` only.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from phalanx.worker.limits import group_folders
from phalanx.worker.memory import readable

_COUNTERS = ("memory.events", "memory.oom_control")
_LIMITS = ("memory.max", "memory.limit_in_bytes")
_UNLIMITED = 2**60


class MemoryKills:
    """Compares the kernel's counts from one death to the next. `root` is where /proc and /sys are found."""

    def __init__(self, root: Path = Path("/")):
        self._root = root
        self._machine = self._machine_count()
        self._groups: dict[Path, int] = {}
        self.watch("self")

    def watch(self, process: int | str) -> None:
        """Remember the count of the group that `process` is in now."""
        folder = self._group(process)
        if folder is not None and folder not in self._groups:
            self._groups[folder] = _count(folder)

    def blame(self, process: int | str) -> str | None:
        """Why the kernel ended `process`, which is a zombie, when it was for want of memory."""
        folder = self._group(process)
        before, self._machine = self._machine, self._machine_count()
        if folder is not None and any((folder / name).exists() for name in _COUNTERS):
            earlier, now = self._groups.get(folder, 0), _count(folder)
            self._groups[folder] = now
            return self._words(process) if now > earlier else None
        return self._words(process) if self._machine > before else None

    def _words(self, process: int | str) -> str:
        limits = [n for f in group_folders(self._root, "memory", process) for n in _numbers(f) if n < _UNLIMITED]
        if not limits:
            return "out of memory: the kernel ended it, the machine had none left"
        return (
            "out of memory: the kernel ended it, its control group may use "
            f"{readable(min(limits))}; give it more, or the KV cache less"
        )

    def _group(self, process: int | str) -> Path | None:
        return next(group_folders(self._root, "memory", process), None)

    def _machine_count(self) -> int:
        return _field(self._root / "proc/vmstat", "oom_kill")


def _count(folder: Path) -> int:
    return max(_field(folder / name, "oom_kill") for name in _COUNTERS)


def _numbers(folder: Path) -> list[int]:
    texts = [_text(folder / name).strip() for name in _LIMITS]
    return [int(text) for text in texts if text.isdigit()]


def _field(path: Path, name: str) -> int:
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def describe(status: int, why: str | None = None) -> str:
    """A wait status in words; `why` is what `MemoryKills` says, or the process said itself."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
        return f"it was killed by {name}" + (f" ({why})" if why and name == "SIGKILL" else "")
    return f"it ended with status {os.waitstatus_to_exitcode(status)}" + (f" ({why})" if why else "")

"""What a process died of, in words: its wait status, and whether the kernel ended it for want of memory.

The kernel does not say so to the parent; it counts. A control group counts the processes that it lost that way
(`oom_kill`, in cgroup v1 and v2), whichever limit was reached, its own or the machine's; where no group counts, the
machine's own count can only hint. Counts are looked at now and then, so that only what happened lately is blamed. Reads
files under `/proc` and `/sys` only.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.worker.limits import group_folders
from phalanx.worker.memory import readable

_COUNTERS = ("memory.events.local", "memory.events", "memory.oom_control")
"""The first that counts stands: `memory.events` also counts the groups below."""
_LIMITS = ("memory.max", "memory.limit_in_bytes")
_UNLIMITED = 2**60


@dataclass
class _Sample:
    machine: int
    groups: dict[Path, int] = field(default_factory=dict)


class MemoryKills:
    """Processes that the kernel ended for want of memory. `root` is where /proc and /sys are found."""

    def __init__(self, root: Path = Path("/")):
        self._root = root
        self._own = list(group_folders(root, "memory"))
        """Ours, in which a process begins: where one was that nobody has looked at."""
        self._folders: dict[int, list[Path]] = {}
        """The groups of each process, its own first: a dead one has none any more."""
        self._older = self._newer = self._sample()

    def look(self, processes: Iterable[int]) -> None:
        """Remember the groups of these and how the counts stand: call it when a process starts, and once a second or
        less often. The calls before the last one are what `blame` compares with."""
        for process in processes:
            folders = list(group_folders(self._root, "memory", process))
            if folders:
                self._folders[process] = folders
        self._older, self._newer = self._newer, self._sample()

    def blame(self, process: int) -> str | None:
        """Why the kernel has just ended `process`, if it was for want of memory."""
        folders = self._folders.pop(process, self._own)
        count = _count(folders[0]) if folders else None
        if count is not None:
            before = self._older.groups.get(folders[0])
            if before is None:  # first looked at lately: what it had lost by then, it had lost earlier
                before = self._newer.groups.get(folders[0], count)
            if count <= before:
                return None
            limits = [n for folder in folders for n in _numbers(folder) if n < _UNLIMITED]
            if limits:
                return (
                    f"out of memory: the kernel ended it, its control group may use {readable(min(limits))}; give it "
                    "more, or the KV cache less"
                )
            return "out of memory: the kernel ended it"
        if _machine(self._root) > self._older.machine:
            return "out of memory, it seems: at that time the kernel ended a process for want of it"
        return None

    def _sample(self) -> _Sample:
        known = [folders[0] for folders in (self._own, *self._folders.values()) if folders]
        groups = {folder: _count(folder) or 0 for folder in known}
        return _Sample(_machine(self._root), groups)


def _count(folder: Path) -> int | None:
    """How many processes of a group were lost; None where it does not count them."""
    return next((count for name in _COUNTERS if (count := _field(folder / name, "oom_kill")) is not None), None)


def _machine(root: Path) -> int:
    return _field(root / "proc/vmstat", "oom_kill") or 0


def _numbers(folder: Path) -> list[int]:
    texts = [_text(folder / name).strip() for name in _LIMITS]
    return [int(text) for text in texts if text.isdigit()]


def _field(path: Path, name: str) -> int | None:
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


_KINDS = {
    "out_of_memory": ("out of memory", "memory monitor", "NotEnoughMemory"),
    "hung": ("showed no progress", "wait for each other", "does not respond", "it hangs"),
    "network": (
        "has not answered",
        "nothing has come from",
        "the network",
        "connection ended",
        "its node",
        "cannot reach",
    ),
    "killed": ("killed by", "was killed", "ray.kill"),
    "ended": ("ended with status", "ended with its supervisor", "ended there by", "its actor is gone"),
}


def kind_of(cause: str) -> str:
    """One of `base.WorkerDied.KINDS`: what a cause in words amounts to, whoever put it into words."""
    return next((kind for kind, signs in _KINDS.items() if any(sign in cause for sign in signs)), "failed")


def describe(status: int, why: str | None = None) -> str:
    """A wait status in words; `why` is what `MemoryKills` says, or the process said itself."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
        return f"it was killed by {name}" + (f" ({why})" if why and name == "SIGKILL" else "")
    return f"it ended with status {os.waitstatus_to_exitcode(status)}" + (f" ({why})" if why else "")

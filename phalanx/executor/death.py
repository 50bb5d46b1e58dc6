"""What a process died of, in words: its wait status, and whether the kernel ended it for want of memory.

The kernel does not say so to the parent; it counts. A control group counts the processes that it lost that way
(`oom_kill`, in cgroup v1 and v2), whichever limit was reached, its own or the machine's; where no group counts, the
machine's own count can only hint. Counts are looked at now and then, so that only what happened lately is blamed: a
process that has much memory, or little of a busy processor, takes its time to end. A group's count explains as many
deaths, the first ones; it does not say whose they were. Reads files under `/proc` and `/sys` only.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.worker.limits import UNLIMITED, group_folders, number, statistic
from phalanx.worker.memory import readable

_COUNTERS = ("memory.events.local", "memory.events", "memory.oom_control")
"""The first that counts stands: `memory.events` also counts the groups below."""
_LIMITS = ("memory.max", "memory.limit_in_bytes")
_LATELY_S = 10.0
"""The most that lies between what the kernel decides and the end of the process."""


@dataclass
class _Sample:
    at: float
    machine: int
    groups: dict[Path, int] = field(default_factory=dict)


@dataclass
class _Process:
    since: float
    """When it was first looked at."""
    folders: list[Path]
    """Its groups, its own first: one that is ending has none any more."""


class MemoryKills:
    """Processes that the kernel ended for want of memory. `root` is where /proc and /sys are found; `clock` in
    seconds."""

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic):
        self._root, self._clock = root, clock
        self._unseen = _Process(float("-inf"), list(group_folders(root, "memory")))
        """One begins in our groups: where it was when nobody has looked at it."""
        self._processes: dict[int, _Process] = {}
        self._samples = deque([self._sample()])
        """The oldest first, which may be the only one that is not of lately."""

    def look(self, processes: Iterable[int]) -> None:
        """Remember the groups of these, which are all there are, and how the counts stand: call it when a process
        starts, and every few seconds."""
        now, before = self._clock(), self._processes
        self._processes = {}
        for process in processes:
            seen, folders = before.get(process), list(group_folders(self._root, "memory", process))
            if seen is not None and len(folders) < 2:  # the root: version 1 shows one there that is ending
                folders = seen.folders
            if folders:
                self._processes[process] = _Process(now if seen is None else seen.since, folders)
        self._samples.append(self._sample())
        while self._samples[1].at <= now - _LATELY_S:
            self._samples.popleft()

    def blame(self, process: int) -> str | None:
        """Why `process`, which SIGKILL has just ended, was killed, if it was for want of memory. Ask once."""
        found = self._processes.pop(process, self._unseen)
        folders, samples = found.folders, [sample for sample in self._samples if sample.at >= found.since]
        count = _count(folders[0]) if folders else None
        if count is not None:
            before = next((s.groups[folders[0]] for s in samples if folders[0] in s.groups), count)
            if count <= before:
                return None
            for sample in self._samples:  # as if this kill had been counted before: it explains no other death
                if folders[0] in sample.groups:
                    sample.groups[folders[0]] = max(sample.groups[folders[0]], before + 1)
            limited = (number(folder / name) for folder in folders for name in _LIMITS)
            if limits := [limit for limit in limited if limit is not None and limit < UNLIMITED]:
                return (
                    f"out of memory: the kernel ended it, its control group may use {readable(min(limits))}; give it "
                    "more, or the KV cache less"
                )
            return "out of memory: the kernel ended it"
        if _machine(self._root) > samples[0].machine:
            return "out of memory, it seems: at that time the kernel ended a process for want of it"
        return None

    def _sample(self) -> _Sample:
        known = [process.folders[0] for process in (self._unseen, *self._processes.values()) if process.folders]
        groups = {folder: _count(folder) or 0 for folder in known}
        return _Sample(self._clock(), _machine(self._root), groups)


def _count(folder: Path) -> int | None:
    """How many processes of a group were lost; None where it does not count them."""
    return next((count for name in _COUNTERS if (count := statistic(folder / name, "oom_kill")) is not None), None)


def _machine(root: Path) -> int:
    return statistic(root / "proc/vmstat", "oom_kill") or 0


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

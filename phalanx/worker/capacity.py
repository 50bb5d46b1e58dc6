"""What this machine has for ranks, measured before they start: free memory, and how fast it reads.

Decoding reads every weight once a step, so the speed that counts is that at which memory is read. It is measured in
processor time and multiplied by the processor time that this process may have (cores, and a container's quota): what
others compute here at this moment, or another measurement beside this one, hardly changes it. The speed of a GPU is
not measured: that needs torch. Light to import.
"""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from phalanx import env
from phalanx.config import ParallelConfig
from phalanx.worker.limits import Memory, core_time, host_memory, usable_cores

_READ_BYTES = 64 * 2**20
"""Of each thread: more than a core's part of any cache."""

_SLICE_S = 0.005
"""The best slice counts: others took the memory's bandwidth, or caches, in the worse ones."""

_MEASURE_S = 0.25


class Capacity(msgspec.Struct, frozen=True):
    """Of one device; a host's memory and cores are its ranks' in common."""

    name: str
    total: int
    """Bytes of memory."""
    available: int
    speed: float | None = None
    """Bytes per second that can be read from it; None when nobody measured it."""
    cores: float = 0.0
    """Of a host."""
    shared: bool = False
    """Whether all ranks of the node share it."""

    @property
    def memory(self) -> Memory:
        return Memory(self.total, self.available)

    @property
    def is_plausible(self) -> bool:
        """It may come from elsewhere: whether the numbers can be."""
        sized = 0 < self.available <= self.total < 2**60
        return sized and (self.speed is None or (math.isfinite(self.speed) and self.speed >= 1))

    def part(self, ranks: int) -> Capacity:
        """What each of `ranks` ranks on the node has of it."""
        if not self.shared or ranks < 2:
            return self
        speed = None if self.speed is None else self.speed / ranks
        return Capacity(self.name, self.total // ranks, self.available // ranks, speed, self.cores / ranks)


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: Memory


def is_wanted(parallel: ParallelConfig) -> bool:
    """Whether shares are automatic and not decided yet."""
    widths = parallel.widths
    shares, layers = not parallel.tensor_weights and max(widths) > 1, not parallel.stage_layers and len(widths) > 1
    return shares or layers


def measure(kind: str) -> list[Capacity]:
    """The devices of `kind` (cpu or cuda) that this process may use, a host's processor as one; none when they cannot
    be asked. Takes a fraction of a second, and, on a host, up to a quarter of the free memory for as long."""
    if kind != "cpu":
        found, visible = gpus(), env.visible_gpus()
        if visible is not None:
            found = [found[number] for number in visible if number < len(found)]
        return [Capacity(gpu.name, gpu.memory.total, gpu.memory.available) for gpu in found]
    memory = host_memory()
    return [Capacity("cpu", memory.total, memory.available, _host_speed(memory), core_time(), shared=True)]


def of_place(found: Sequence[Capacity], place: int) -> Capacity | None:
    """The device that the `place`-th rank of a node has, of those that the node has measured; None where there is none
    that can be believed."""
    device = found[0] if len(found) == 1 and found[0].shared else found[place] if place < len(found) else None
    return device if device is not None and device.is_plausible else None


def _host_speed(memory: Memory) -> float | None:
    cores = usable_cores()
    threads = min(cores, memory.available // 4 // _READ_BYTES)
    if threads < 1:
        return None
    return read_speed(threads) * core_time() / threads


def read_speed(threads: int, seconds: float = _MEASURE_S) -> float:
    """Bytes per second that so many threads read from memory together, each with a core of its own. Measured for about
    `seconds`, or up to four times as long where others have the cores."""
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    def read() -> float:
        block = np.ones(_READ_BYTES // 8)
        start, slices, best = time.monotonic(), 0, 0.0
        while True:
            begin, count, taken = time.thread_time(), 0, 0.0
            while taken < _SLICE_S:
                block.max()  # releases the interpreter, and needs each number once
                count, taken = count + 1, time.thread_time() - begin
            slices, best = slices + 1, max(best, count * block.nbytes / taken)
            passed = time.monotonic() - start
            if passed >= seconds and (slices * _SLICE_S >= seconds / 2 or passed >= 4 * seconds):
                return best

    with ThreadPoolExecutor(threads) as pool:
        return threads * max(pool.map(lambda _: read(), range(threads)))


def gpus() -> Sequence[Gpu]:
    """Those that the driver's own tool lists; none when it is not there or does not answer."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    found = []
    for line in done.stdout.splitlines():
        fields = [field.strip() for field in line.rsplit(",", 2)]
        if len(fields) == 3 and fields[1].isdigit() and fields[2].isdigit():
            found.append(Gpu(fields[0], Memory(int(fields[1]) * 2**20, int(fields[2]) * 2**20)))
    return found

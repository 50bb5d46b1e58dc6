"""A piece of memory that processes of one node share, with flags to wait on.

The memory is a memfd: it has no name, does not count against /dev/shm, and is gone with its last process. Waiting is a
short spin (none when there are more ranks than cores), then `sched_yield`, then a blocking wait on an eventfd that
the writer of the flag rings. Python has no fences; on x86 none is needed between data and flag, elsewhere a lock's
release and acquire stand in for one, and a blocking wait looks again every few milliseconds, so that a ring that
came too early costs little.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import select
import threading
import time
from collections.abc import Callable

from phalanx.distributed.transports.abort import Abort, GroupBroken

LINE = 8
"""Words of 8 bytes in a cache line: flags that different ranks write are this far apart."""

_SPINS = 300
_YIELD_S = 0.0005
_RECHECK_MS = 20

WEAK = platform.machine() not in ("x86_64", "AMD64", "i686")
"""Whether this processor may reorder stores, so that fences are needed."""

_fence_lock = threading.Lock()
_fence_lock.acquire()


def fence() -> None:
    """What was written before is visible before what is written after."""
    _fence_lock.release()
    _fence_lock.acquire()


class Segment:
    """`words` (int64 flags) in front, `data_bytes` of data behind them, and one doorbell a rank.

    `create` makes it in one process; the file descriptors in `fds` travel to the others, which `attach`.
    """

    def __init__(self, fd: int, bells: list[int], rank: int, words: int, data_bytes: int, abort: Abort, crowded: bool):
        self.fd, self.bells, self.rank = fd, bells, rank
        self._lines = words
        self.data_offset = -(-(words + LINE * len(bells)) * 8 // mmap.PAGESIZE) * mmap.PAGESIZE
        self.memory = mmap.mmap(fd, self.data_offset + data_bytes)
        self.words = memoryview(self.memory)[: self.data_offset].cast("q")
        self._abort = abort
        self._spins = 0 if crowded else _SPINS
        self._poll = select.poll()
        self._poll.register(bells[rank], select.POLLIN)
        self._poll.register(abort.fileno(), select.POLLIN)

    @classmethod
    def create(cls, ranks: int, rank: int, words: int, data_bytes: int, abort: Abort, crowded: bool) -> Segment:
        fd = os.memfd_create("phalanx", os.MFD_CLOEXEC)
        size = -(-(words + LINE * ranks) * 8 // mmap.PAGESIZE) * mmap.PAGESIZE + data_bytes
        os.ftruncate(fd, size)
        bells = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(ranks)]
        return cls(fd, bells, rank, words, data_bytes, abort, crowded)

    @property
    def fds(self) -> list[int]:
        return [self.fd, *self.bells]

    def publish(self, word: int, value: int, *readers: int) -> None:
        """Set a flag and wake those of `readers` that sleep."""
        words = self.words
        if WEAK:
            fence()
        words[word] = value
        if WEAK:
            fence()
        for reader in readers:
            if words[self._lines + LINE * reader]:
                os.eventfd_write(self.bells[reader], 1)

    def wait(self, word: int, target: int, blame: Callable[[], str], timeout: float | None) -> None:
        """Until `words[word] >= target`. Raises GroupBroken when aborted, or after `timeout` seconds."""
        words = self.words
        spins = self._spins
        while words[word] < target:
            if spins > 0:
                spins -= 1
            else:
                self._wait_without_spinning(word, target, blame, timeout)
        if WEAK:
            fence()

    def _wait_without_spinning(self, word: int, target: int, blame: Callable[[], str], timeout: float | None) -> None:
        start = time.monotonic()
        while self.words[word] < target:
            os.sched_yield()
            self._abort.check()
            if time.monotonic() > start + _YIELD_S:
                self._sleep(word, target, blame, None if timeout is None else start + timeout)

    def _sleep(self, word: int, target: int, blame: Callable[[], str], deadline: float | None) -> None:
        asleep = self._lines + LINE * self.rank
        self.words[asleep] = 1
        if WEAK:
            fence()
        try:
            while self.words[word] < target:
                self._abort.check()
                if deadline is not None and time.monotonic() > deadline:
                    raise GroupBroken(f"An exchange did not finish in time: {blame()}.")
                for fd, _ in self._poll.poll(_RECHECK_MS):
                    if fd == self.bells[self.rank]:
                        os.eventfd_read(fd)
        finally:
            self.words[asleep] = 0

    def close(self) -> None:
        if self.fd < 0:
            return
        for fd in self.fds:
            os.close(fd)
        self.fd = -1
        self.words.release()
        with contextlib.suppress(BufferError):  # tensors still look at it; the mapping ends with them
            self.memory.close()

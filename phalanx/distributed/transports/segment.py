"""A piece of memory that processes of one node share, with flags to wait on.

The memory is a memfd: it has no name, does not count against /dev/shm, and is gone with its last process. Waiting is a
short spin (none when there are more ranks than cores), then `sched_yield`, then a blocking wait on an eventfd that the
writer of the flag rings. A wait ends badly when it is aborted, takes too long, the writer has left, or the members
have come to wait for each other in a circle, which happens when they are in different exchanges.

Order of stores and loads. A flag is written after the data it announces and read before them: on x86 that is enough,
elsewhere a lock's release and acquire stand in for the fences that Python lacks. Going to sleep is the other classic:
the sleeper writes that it sleeps and then looks at the flag, the writer writes the flag and then looks for sleepers,
and neither may look before its own store is visible. The sleeper always fences. The writer does so elsewhere than on
x86; there, the interpreter's own stores between the two push the flag out, and a sleeper looks again every few
milliseconds, so that even a missed ring would cost that long and no more.

One thread at a time uses a segment, and closes it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import select
import threading
import time
from collections.abc import Callable, Sequence

from phalanx.distributed.pulse import Pulse
from phalanx.distributed.transports.abort import Abort, GroupBroken, PeerLost

LINE = 8
"""Words of 8 bytes in a cache line: flags that different members write are this far apart."""

_SPINS = 300
_YIELD_S = 0.0005
_RECHECK_MS = 20

_ASLEEP, _LEFT, _WORD, _TARGET, _WRITER = range(5)
"""Words of a member's own line behind the flags: whether it sleeps, whether it has left, and what it sleeps for."""

WEAK = platform.machine() not in ("x86_64", "AMD64", "i686")
"""Whether this processor may reorder stores, so that fences are needed."""


class Segment:
    """`words` (int64 flags) in front, `data_bytes` of data behind them, and one doorbell a member.

    `create` makes it in one process; the file descriptors in `fds` travel to the others, which make theirs from them.
    `names` are the members', for messages.
    """

    def __init__(
        self, fd: int, bells: list[int], member: int, names: Sequence[str], words: int, data_bytes: int, abort: Abort,
        crowded: bool,
    ):  # fmt: skip
        self.fd, self.bells, self.member, self.names = fd, bells, member, tuple(names)
        self._flags = words
        self._lines = [words + LINE * m for m in range(len(bells))]
        self.data_offset = _front(words, len(bells))
        self.memory = mmap.mmap(fd, self.data_offset + data_bytes)
        self.words = memoryview(self.memory)[: self.data_offset].cast("q")
        self._abort = abort
        self._spins = 0 if crowded else _SPINS
        self._fence = threading.Lock()
        self._fence.acquire()
        self._poll = select.poll()
        self._poll.register(bells[member], select.POLLIN)
        self._poll.register(abort.fileno(), select.POLLIN)

    @classmethod
    def create(
        cls, member: int, names: Sequence[str], words: int, data_bytes: int, abort: Abort, crowded: bool
    ) -> Segment:
        fds = [os.memfd_create("phalanx", os.MFD_CLOEXEC)]
        try:
            os.ftruncate(fds[0], _front(words, len(names)) + data_bytes)
            fds += [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in names]
            return cls(fds[0], fds[1:], member, names, words, data_bytes, abort, crowded)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    @property
    def fds(self) -> list[int]:
        return [self.fd, *self.bells]

    @property
    def sleeping(self) -> tuple[int, ...]:
        """Of each member, the word that is not 0 while it sleeps."""
        return tuple(line + _ASLEEP for line in self._lines)

    @property
    def spins(self) -> bool:
        """Whether each member has a core to wait on."""
        return self._spins > 0

    @property
    def pulse(self) -> Pulse:
        return self._abort.pulse

    def fence(self) -> None:
        """What was written before is visible before anything after is written or read."""
        self._fence.release()
        self._fence.acquire()

    def publish(self, word: int, value: int, readers: Sequence[int]) -> None:
        """Set a flag and wake those of `readers` that sleep."""
        words, lines = self.words, self._lines
        if WEAK:
            self.fence()
        words[word] = value
        if WEAK:
            self.fence()
        for reader in readers:
            if words[lines[reader]]:
                os.eventfd_write(self.bells[reader], 1)

    def leave(self) -> None:
        """Tell the others not to wait for this member. What it has published stays good. Idempotent."""
        self.words[self._lines[self.member] + _LEFT] = 1
        self.fence()
        for member, bell in enumerate(self.bells):
            if member != self.member and self.words[self._lines[member]]:
                os.eventfd_write(bell, 1)

    def wait(self, word: int, target: int, writer: int, what: Callable[[], str], timeout: float | None) -> None:
        """Until `words[word] >= target`, which member `writer` sees to; `what` is being done, for messages.

        Raises GroupBroken when aborted, or after `timeout` seconds; PeerLost when the writer has left.
        """
        words = self.words
        spins = self._spins
        while words[word] < target:
            if spins > 0:
                spins -= 1
            else:
                self._yield(word, target, writer, what, timeout)
        if WEAK:
            self.fence()

    def _yield(self, word: int, target: int, writer: int, what: Callable[[], str], timeout: float | None) -> None:
        words, start = self.words, time.monotonic()
        pulse = self._abort.pulse
        while words[word] < target:
            os.sched_yield()
            self._abort.check()
            self._check_left(word, target, writer, what)
            if time.monotonic() > start + _YIELD_S:
                line = self._lines[self.member]
                words[line + _WORD], words[line + _TARGET], words[line + _WRITER] = word, target, writer
                words[line + _ASLEEP] = 1
                self.fence()
                pulse.waits_for = self.names[writer]
                try:
                    self._sleep(word, target, writer, what, None if timeout is None else start + timeout)
                finally:
                    words[line + _ASLEEP] = 0
                    pulse.waits_for = ""

    def _sleep(self, word: int, target: int, writer: int, what: Callable[[], str], deadline: float | None) -> None:
        suspected: tuple[tuple[int, int, int], ...] = ()
        while self.words[word] < target:
            self._abort.check()
            self._check_left(word, target, writer, what)
            left: float = _RECHECK_MS
            if deadline is not None:
                left = min(left, (deadline - time.monotonic()) * 1000)
                if left <= 0:
                    raise GroupBroken(f"{self._waits(writer)} in {what()}, for too long.")
            ready = self._poll.poll(left)
            if not ready:
                suspected = self._check_circle(suspected, what)
            elif any(fd == self.bells[self.member] for fd, _ in ready):
                os.eventfd_read(self.bells[self.member])

    def _check_left(self, word: int, target: int, writer: int, what: Callable[[], str]) -> None:
        # The flag is looked at again: the writer may have raised it just before it left.
        if self.words[self._lines[writer] + _LEFT] and self.words[word] < target:
            raise PeerLost(f"{self._waits(writer)} in {what()}, but it has left.")

    def _check_circle(
        self, suspected: tuple[tuple[int, int, int], ...], what: Callable[[], str]
    ) -> tuple[tuple[int, int, int], ...]:
        """The members that wait for each other, this one first, each with its flag and target; empty when none do.

        Flags only grow, so members that all stand in the very same waits as one look earlier (`suspected`) have
        stood there together since, and none of them can ever go on. Raises GroupBroken then.
        """
        words, member = self.words, self.member
        circle: list[tuple[int, int, int]] = []
        while len(circle) < len(self.bells):
            line = self._lines[member]
            word, target, writer = words[line + _WORD], words[line + _TARGET], words[line + _WRITER]
            possible = 0 <= word < self._flags and 0 <= writer < len(self.bells)
            if not possible or not words[line + _ASLEEP] or words[word] >= target:
                return ()
            circle.append((member, word, target))
            member = writer
            if member == self.member:
                break
        else:
            return ()  # a circle without this member: those in it find out
        if suspected == tuple(circle):
            order = [self.names[m] for m, _, _ in circle]
            chain = ", ".join(f"{a} waits for {b}" for a, b in zip(order, order[1:] + order[:1], strict=True))
            raise GroupBroken(f"The ranks are in different exchanges: {chain}; {order[0]} is in {what()}.")
        return tuple(circle)

    def _waits(self, writer: int) -> str:
        return f"{self.names[self.member]} waits for {self.names[writer]}".capitalize()

    def close(self) -> None:
        if self.fd < 0:
            return
        for fd in self.fds:
            os.close(fd)
        self.fd = -1
        self.words.release()
        with contextlib.suppress(BufferError):  # tensors still look at it; the mapping ends with them
            self.memory.close()


def _front(words: int, members: int) -> int:
    """Bytes before the data: the flags and the members' own lines, in whole pages."""
    return -(-(words + LINE * members) * 8 // mmap.PAGESIZE) * mmap.PAGESIZE

"""A bad cable between one host of a test bed and all others: it delays, jitters, loses, falls silent, and records.

Works on frames, below TCP, so that it holds for every connection whatever its port. Needs /dev/net/tun, and nothing of
the kernel's network emulation.

    with bad_cable(host, delay=0.05) as cable:
        …
        cable.silent = True
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.hosts import Host, inside, ip

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_FRAME = 1 << 16


class Cable:
    """May be changed while it is in use."""

    def __init__(self, ends: tuple[int, int], *, delay: float, jitter: float, loss: float):
        self.delay, self.jitter, self.loss = delay, jitter, loss
        """Seconds each way, seconds more at random, share of the frames."""
        self.silent = False
        self.deaf = False
        """What the host sends arrives; what is sent to it does not."""
        self.frames = 0
        self.recorded = bytearray()
        """Every frame that came, both ways."""
        self._random = random.Random(7)
        self._ends = ends
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._carry, args=pair, daemon=True) for pair in (ends, tuple(reversed(ends)))
        ]
        for thread in self._threads:
            thread.start()

    def _carry(self, source: int, sink: int) -> None:
        waiting: deque[tuple[float, bytes]] = deque()
        poll = select.poll()
        poll.register(source, select.POLLIN)
        poll.register(self._bell, select.POLLIN)
        last = 0.0
        while True:
            patience = max(0.0, waiting[0][0] - time.monotonic()) * 1000 if waiting else None
            for fd, _ in poll.poll(patience):
                if fd == self._bell:
                    return
                frame = os.read(source, _FRAME)
                with self._lock:
                    self.frames += 1
                    self.recorded += frame
                if self.silent or (self.deaf and source == self._ends[1]) or self._random.random() < self.loss:
                    continue
                last = max(last, time.monotonic() + self.delay + self._random.uniform(0, self.jitter))  # in order
                waiting.append((last, frame))
            while waiting and waiting[0][0] <= time.monotonic():
                with contextlib.suppress(OSError):
                    os.write(sink, waiting.popleft()[1])

    def close(self) -> None:
        os.eventfd_write(self._bell, 1)
        for thread in self._threads:
            thread.join(5)
        os.close(self._bell)
        for end in self._ends:
            os.close(end)


def missing() -> str:
    """Why there can be no bad cable here; empty when there can."""
    return "" if Path("/dev/net/tun").exists() else "/dev/net/tun is not there"


@contextlib.contextmanager
def bad_cable(host: Host, *, delay: float = 0.0, jitter: float = 0.0, loss: float = 0.0) -> Iterator[Cable]:
    """Until the end of the block, what `host` sends and receives goes through the cable."""
    own = f"br-{host.name}"
    ip("-n", host.switch, "link", "add", own, "up", "type", "bridge")
    near, far = _tap(host.switch, f"near-{host.name}"), _tap(host.switch, f"far-{host.name}")
    ip("-n", host.switch, "link", "set", f"near-{host.name}", "master", own, "up")
    ip("-n", host.switch, "link", "set", f"far-{host.name}", "master", "br0", "up")
    ip("-n", host.switch, "link", "set", host.name, "master", own)
    cable = Cable((near, far), delay=delay, jitter=jitter, loss=loss)
    try:
        yield cable
    finally:
        cable.close()
        ip("-n", host.switch, "link", "set", host.name, "master", "br0")
        ip("-n", host.switch, "link", "del", own)


def _tap(namespace: str, name: str) -> int:
    """A network device whose other end is the descriptor; it goes when that is closed."""
    with inside(namespace):
        fd = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", name[:15].encode(), _IFF_TAP | _IFF_NO_PI))
    return fd

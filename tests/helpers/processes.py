"""Looking at processes from outside."""

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from unittest import mock

import psutil


def alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def images(pid: int) -> list[str]:
    """The descriptors of images of weights that a process holds, by number."""
    found: list[str] = []
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that looks is looked at too
            if "phalanx-weights" in os.readlink(f"/proc/{pid}/fd/{number}"):
                found.append(number)
    return found


def name_of(pid: int) -> str:
    """Empty when it is gone."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).name()
    return ""


@contextlib.contextmanager
def no_process_at_first() -> Iterator[list[OSError]]:
    """The first one that is asked for, the system does not give; what it said."""
    start, refused = subprocess.Popen.__init__, []

    def scarce(*given: object, **options: object) -> None:
        if not refused:
            refused.append(OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)))
            raise refused[0]
        start(*given, **options)  # type: ignore[call-overload]

    with mock.patch.object(subprocess.Popen, "__init__", scarce):
        yield refused


def gone_within(pid: int, seconds: float) -> bool:
    return wait_until(lambda: not alive(pid), seconds)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


class _Deadline:
    """Seconds in which the process did run: a pause that it was put through between two looks counts for little."""

    def __init__(self, seconds: float, nap: float):
        self._left, self._nap, self._last = seconds, nap, time.monotonic()

    def begin_nap(self) -> bool:
        """Whether there is time for another one. The look before it is counted in full."""
        self._count(time.monotonic() - self._last)
        return self._left > 0

    def end_nap(self) -> None:
        self._count(min(time.monotonic() - self._last, 3 * self._nap))

    def _count(self, seconds: float) -> None:
        self._left -= seconds
        self._last = time.monotonic()


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether `condition` comes to hold in that time. It is looked at once more when the time is over."""
    deadline = _Deadline(seconds, 0.02)
    while not condition():
        if not deadline.begin_nap():
            return condition()
        time.sleep(0.02)
        deadline.end_nap()
    return True


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Let the event loop run until `condition` holds. Raises TimeoutError."""
    deadline = _Deadline(seconds, 0.005)
    while not condition():
        if not deadline.begin_nap():
            raise TimeoutError("it did not come to that")
        await asyncio.sleep(0.005)
        deadline.end_nap()


def descendants() -> set[int]:
    """Processes below this one, with their own."""
    return {child.pid for child in psutil.Process().children(recursive=True)}

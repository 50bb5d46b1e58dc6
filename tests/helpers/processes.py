"""Looking at processes from outside."""

import asyncio
import time
from collections.abc import Callable

import psutil


def alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone_within(pid: int, seconds: float) -> bool:
    return wait_until(lambda: not alive(pid), seconds)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Let the event loop run until `condition` holds. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("it did not come to that")
        await asyncio.sleep(0.005)


def descendants() -> set[int]:
    """Processes below this one, with their own."""
    return {child.pid for child in psutil.Process().children(recursive=True)}

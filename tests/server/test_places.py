"""Places of several server processes, here several objects over one memory, with the real guard in front."""

from __future__ import annotations

import asyncio
import mmap

import pytest

from phalanx.engine.queue import SHARE
from phalanx.errors import QueueFull
from phalanx.server.middleware import Admission
from phalanx.server.places import Places, bytes_for

OWNERS = 3
MOST = 20


class Door:
    """The guard of one process; what it lets in stays until `release`."""

    def __init__(self, memory: mmap.mmap, row: int) -> None:
        self.released = asyncio.Event()
        self.inside: list[asyncio.Task[None]] = []
        self._guard = Admission(self._app, lambda: "ready", Places(memory, OWNERS, row), MOST)

    async def _app(self, scope, receive, send) -> None:
        await self.released.wait()

    async def knock(self, owner: int) -> None:
        """Raises QueueFull."""
        scope = {"type": "http", "path": "/v1/completions", "state": {"owner": owner}}
        task = asyncio.create_task(self._guard(scope, None, None))
        await asyncio.sleep(0)
        if task.done():
            task.result()
        self.inside.append(task)

    async def release(self) -> None:
        self.released.set()
        await asyncio.gather(*self.inside)


@pytest.fixture
def memory() -> mmap.mmap:
    return mmap.mmap(-1, bytes_for(2, OWNERS))


async def test_the_limit_holds_over_all_processes(memory: mmap.mmap) -> None:
    first, second = Door(memory, 0), Door(memory, 1)
    for number in range(MOST):
        await (first, second)[number % 2].knock(0)
    for door in (first, second):
        with pytest.raises(QueueFull, match=f"{MOST} requests are being handled"):
            await door.knock(0)
    await first.release()
    for _ in range(MOST // 2):
        await second.knock(0)
    await second.release()
    assert Places(memory, OWNERS).taken == 0


async def test_a_key_cannot_take_all_places_by_using_two_processes(memory: mmap.mmap) -> None:
    first, second = Door(memory, 0), Door(memory, 1)
    for number in range(SHARE * MOST // (SHARE + 1) + 1):
        await (first, second)[number % 2].knock(1)
    for door in (first, second):
        with pytest.raises(QueueFull, match="with this API key"):
            await door.knock(1)
    await first.knock(2)  # there is one left for others
    await first.release()
    await second.release()


async def test_places_of_a_process_that_has_ended_are_free_again(memory: mmap.mmap) -> None:
    ended, other = Door(memory, 0), Door(memory, 1)
    for _ in range(MOST):
        await ended.knock(0)
    with pytest.raises(QueueFull):
        await other.knock(0)
    Places(memory, OWNERS).clear(0)
    await other.knock(0)
    await other.release()
    for task in ended.inside:
        task.cancel()
    await asyncio.gather(*ended.inside, return_exceptions=True)  # they would free the row once more

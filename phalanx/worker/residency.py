"""The memory that a KV cache uses first is made resident before it is used.

A page costs its first writer a fault, in which the kernel clears it, and a virtual machine may have to fetch it from
its host: on one such machine that was a seventh of a prompt's time. So a thread asks for pages beforehand, in moments
without a step. It changes nothing that is written there.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from phalanx.worker.limits import host_memory

if TYPE_CHECKING:
    from phalanx.worker.kv_pool import KVPool

MOST = 512 * 2**20
"""Bytes on a host that are asked for; the rest becomes resident when it is used."""
LEAST = 64 * 2**20
"""A smaller cache is not worth it."""
_PART = 8
"""At most one in so many bytes that the host has left is asked for."""
_PIECE = 2 * 2**20
"""Bytes in one call, which a step that begins meanwhile may have to wait for: up to 5 ms."""
_LOOK_S = 0.2
_REST_S = 0.05
"""After a step, before the next one is hardly on its way."""

_MADV_POPULATE_WRITE = 23


class Residency:
    """Of one cache, from now until `end`. `ranks` share the host."""

    def __init__(self, pool: KVPool, ranks: int):
        self._most = min(MOST, host_memory().available // _PART) // ranks
        self._rests_since = 0.0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._populate, args=(pool,), name="kv-cache", daemon=True)
        self._thread.start()

    def step_begins(self) -> None:
        self._rests_since = math.inf

    def step_ends(self) -> None:
        self._rests_since = time.monotonic()

    def end(self) -> None:
        """The cache is not touched any more. Idempotent."""
        self._ending.set()
        self._thread.join()

    def _populate(self, pool: KVPool) -> None:
        tensors = pool.host_tensors()
        if sum(tensor.nbytes for tensor in tensors) < LEAST:
            return
        addresses = [tensor.data_ptr() for tensor in tensors]
        left = self._most
        for number, first, end in _pieces(pool):
            while not self._ending.is_set() and time.monotonic() - self._rests_since < _REST_S:
                self._ending.wait(_LOOK_S)
            left -= end - first
            if self._ending.is_set() or left < 0 or not _asked_for(addresses[number], first, end):
                return


def _pieces(pool: KVPool) -> Iterator[tuple[int, int, int]]:
    """(which tensor, from byte, to byte): of all tensors the blocks that are handed out first, then the next ones."""
    sizes, blocks = [tensor.nbytes for tensor in pool.host_tensors()], pool.blocks
    step = max(1, _PIECE * blocks // max(sizes, default=1))
    for block in range(0, blocks, step):
        for number, size in enumerate(sizes):
            yield number, size * block // blocks, size * min(block + step, blocks) // blocks


def _asked_for(address: int, first: int, end: int) -> bool:
    """False where the kernel is too old for it, or has not as much."""
    start = (address + first) // mmap.PAGESIZE * mmap.PAGESIZE
    size = ctypes.c_size_t(address + end - start)
    return bool(ctypes.CDLL(None).madvise(ctypes.c_void_p(start), size, _MADV_POPULATE_WRITE) == 0)

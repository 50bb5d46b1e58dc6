"""The memory that a KV cache uses first is made resident before it is used.

A page costs its first writer a fault, in which the kernel clears it, and a virtual machine may have to fetch it from
its host: on one such machine that was a seventh of a prompt's time. So a thread asks for pages beforehand, in moments
without a step. It holds a tensor only as long as a call takes, and changes nothing that is written there.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from phalanx.worker.limits import host_memory

if TYPE_CHECKING:
    from phalanx.worker.kv_pool import KVPool

MOST = 512 * 2**20
"""Bytes on a host that are asked for; the rest becomes resident when it is used."""
_PART = 8
"""At most one in so many bytes that the host has left is asked for."""
_PIECE = 2 * 2**20
"""Bytes in one call, which a step that begins meanwhile may have to wait for: up to 5 ms."""
_LOOK_S = 0.2
_REST_S = 0.05

_MADV_POPULATE_WRITE = 23


class Rest:
    """Between two steps."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def ends(self) -> None:
        self._since = math.inf

    def begins(self) -> None:
        self._since = time.monotonic()

    def is_long(self) -> bool:
        """So long that the next step is hardly on its way."""
        return time.monotonic() - self._since > _REST_S


def make_resident(pool: KVPool, ranks: int, idle: Callable[[], bool]) -> None:
    """Begin; `ranks` share the host, and `idle` says that no step runs."""
    most = min(MOST, host_memory().available // _PART) // ranks
    threading.Thread(target=_populate, args=(weakref.ref(pool), most, idle), name="kv-cache", daemon=True).start()


def _populate(pool: weakref.ref[KVPool], most: int, idle: Callable[[], bool]) -> None:
    for number, first, end in _pieces(pool):
        while pool() is not None and not idle():
            time.sleep(_LOOK_S)
        held = pool()
        most -= end - first
        if held is None or most < 0:
            return
        tensor = held.host_tensors()[number]  # keeps its memory where it is during the call
        del held
        if not _asked_for(tensor.data_ptr(), first, end):
            return


def _pieces(pool: weakref.ref[KVPool]) -> Iterator[tuple[int, int, int]]:
    """(which tensor, from byte, to byte): of all tensors the blocks that are handed out first, then the next ones."""
    held = pool()
    if held is None:
        return
    sizes, blocks = [tensor.nbytes for tensor in held.host_tensors()], held.blocks
    del held
    step = max(1, _PIECE * blocks // max(sizes, default=1))
    for block in range(0, blocks, step):
        for number, size in enumerate(sizes):
            yield number, size * block // blocks, size * min(block + step, blocks) // blocks


def _asked_for(address: int, first: int, end: int) -> bool:
    """False where the kernel is too old for it, or has not as much."""
    start = (address + first) // mmap.PAGESIZE * mmap.PAGESIZE
    size = ctypes.c_size_t(address + end - start)
    return bool(ctypes.CDLL(None).madvise(ctypes.c_void_p(start), size, _MADV_POPULATE_WRITE) == 0)

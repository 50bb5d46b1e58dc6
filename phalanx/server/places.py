"""`Places`: how many HTTP requests are being handled, by owner, in all server processes of the same engines.

Each process has a row in memory that they share and writes only there; what it reads of the others may be a moment old.
The row of a process that has ended is cleared by whoever starts the next one.
"""

from __future__ import annotations

import mmap


def bytes_for(processes: int, owners: int) -> int:
    return processes * (1 + owners) * 4


class Places:
    """`memory` has a row for each process: how many are taken in all, then by each owner, from 0 on."""

    def __init__(self, memory: mmap.mmap | bytearray, owners: int, row: int = 0):
        self._counts = memoryview(memory).cast("I")
        self._width = 1 + owners
        self._row = row * self._width

    @property
    def taken(self) -> int:
        return sum(self._counts[:: self._width])

    def taken_by(self, owner: int) -> int:
        return sum(self._counts[1 + owner :: self._width])

    def take(self, owner: int) -> None:
        self._counts[self._row] += 1
        self._counts[self._row + 1 + owner] += 1

    def leave(self, owner: int) -> None:
        self._counts[self._row] -= 1
        self._counts[self._row + 1 + owner] -= 1

    def clear(self, row: int) -> None:
        for index in range(row * self._width, (row + 1) * self._width):
            self._counts[index] = 0

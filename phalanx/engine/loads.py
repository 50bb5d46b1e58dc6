"""`Loads`: what each engine has to do, and who has least, for thousands of engines.

`set` costs nothing to speak of, and `least` as much as there were changes, each a step in a heap whose outdated entries
are dropped when they come up. Pure; knows no engines, only their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush


class Loads(Sequence[float | None]):
    """By number; None for an engine that cannot take a request. All begin so."""

    def __init__(self, count: int) -> None:
        self._loads: list[float | None] = [None] * count
        self._changed: dict[int, None] = {}
        """Since the last `least`, in this order."""
        self._heap: list[tuple[float, int, int]] = []
        """Load, stamp, number."""
        self._stamps = [0] * count
        """The stamp of each engine's entry that counts."""
        self._stamp = 0
        self.able = 0
        """Engines that can take a request."""

    @classmethod
    def of(cls, loads: Sequence[float | None]) -> Loads:
        found = cls(len(loads))
        for number, load in enumerate(loads):
            found.set(number, load)
        return found

    def __len__(self) -> int:
        return len(self._loads)

    def __getitem__(self, number: int) -> float | None:  # type: ignore[override]
        return self._loads[number]

    def set(self, number: int, load: float | None) -> None:
        before = self._loads[number]
        if before == load:
            return
        self.able += (load is not None) - (before is not None)
        self._loads[number] = load
        self._changed[number] = None

    def least(self) -> int:
        """The number of the engine with the lowest load; of equal ones that which has had it longest. Raises
        LookupError when none can take a request."""
        if not self.able:
            raise LookupError("no engine can take a request")
        heap, loads, stamps = self._heap, self._loads, self._stamps
        for number in self._changed:
            self._stamp += 1
            stamps[number] = self._stamp
            load = loads[number]
            if load is not None:
                heappush(heap, (load, self._stamp, number))
        self._changed.clear()
        while stamps[heap[0][2]] != heap[0][1]:
            heappop(heap)
        if len(heap) > 4 * len(loads) + 64:
            heap[:] = [entry for entry in heap if stamps[entry[2]] == entry[1]]
            heapify(heap)
        return heap[0][2]

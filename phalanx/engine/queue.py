"""Who waits, and in which order: by priority, then those that have run before, then by arrival.

The queue is bounded for new requests. One that was accepted before (preempted, or resumed after a failure) is never
refused: its client is already receiving tokens.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator

from phalanx.engine.request import Request
from phalanx.errors import QueueFull

_RETRY_AFTER_S = (1.0, 60.0)


class WaitingQueue:
    """Requests in the order in which they will be admitted. Times are seconds on the engine's clock."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: list[Request] = []
        self._departures: deque[float] = deque(maxlen=64)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        """In order, over a copy: entries may be removed on the way."""
        return iter(tuple(self._entries))

    def push(self, request: Request) -> None:
        insort(self._entries, request, key=Request.queue_key)

    def remove(self, request: Request, now: float) -> None:
        """`request` is admitted, or gone. Raises ValueError when it does not wait here."""
        index = bisect_left(self._entries, request.queue_key(), key=Request.queue_key)
        if index == len(self._entries) or self._entries[index] is not request:
            raise ValueError("the request is not in the queue")
        del self._entries[index]
        self._departures.append(now)

    def check_room(self, now: float, *, elsewhere: int = 0, free_slots: int = 0) -> None:
        """Raise QueueFull when no new request fits. `elsewhere` counts requests on their way into the queue; as many
        as there are `free_slots` are about to leave it and do not count."""
        if len(self._entries) + elsewhere < self._limit + free_slots:
            return
        raise QueueFull(
            f"{self._limit} requests are waiting, which is the limit.",
            fix="Try again later, or start the server with a larger --max-num-queued-reqs.",
            retry_after=self.retry_after(now),
        )

    def retry_after(self, now: float) -> float:
        """Seconds until about a tenth of the queue has been admitted, at the rate of the latest admissions."""
        low, high = _RETRY_AFTER_S
        if not self._departures:
            return low
        interval = (now - self._departures[0]) / len(self._departures)
        return min(max(interval * max(1, len(self._entries) // 10), low), high)

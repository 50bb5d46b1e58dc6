"""Who waits, and in which order: by priority, then those that have run before, then as the scheduling policy says.

The queue is bounded for new requests. One that was accepted before (preempted, or resumed after a failure) is never
refused: its client is already receiving tokens. No owner can fill it alone: an owner's new requests are refused when
those that wait are `SHARE` times as many as there are places left, so that there are always some for others (dynamic
thresholds, Choudhury and Hahne 1998). Owner 0, everybody where there is at most one API key, may have all places.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterator

from phalanx.engine.request import Request
from phalanx.engine.scheduling import FairShare, SchedulingPolicy
from phalanx.errors import QueueFull

SHARE = 8
_RETRY_AFTER_S = (1.0, 60.0)


class _Class:
    """Those of one priority."""

    def __init__(self) -> None:
        self.resumed: list[Request] = []
        """In order of arrival."""
        self.lines: dict[int, list[Request]] = {}
        """None is empty; each in order of (place, arrival)."""


class WaitingQueue:
    """Requests in the order in which they will be admitted. Times are seconds on the engine's clock."""

    def __init__(self, limit: int, policy: SchedulingPolicy | None = None) -> None:
        self.policy = policy if policy is not None else FairShare()
        self._limit = limit
        self._classes: dict[int, _Class] = {}
        """By priority; none is empty."""
        self._in_line: Counter[int] = Counter()
        """How many stand in each line, of all priorities."""
        self._of_owner: Counter[int] = Counter()
        self._count = 0
        self._departures: deque[float] = deque(maxlen=64)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        """In order, as far as it is known: whoever removes the request at hand and has it charged may change what
        comes next. Others must not be removed meanwhile."""
        for priority in sorted(self._classes):
            waiting = self._classes[priority]
            yield from _all_of(waiting.resumed)
            yield from self._in_turn(waiting.lines)

    def _in_turn(self, lines: dict[int, list[Request]]) -> Iterator[Request]:
        """`lines` as the policy ranks them; those that are passed over stay behind."""
        left = {line: (entries, 0) for line, entries in lines.items()}
        while left:
            line = min(left, key=lambda line: (self.policy.rank(line), left[line][0][left[line][1]].arrival))
            entries, position = left[line]
            request = entries[position]
            yield request
            if position < len(entries) and entries[position] is request:
                position += 1
            if position < len(entries):
                left[line] = (entries, position)
            else:
                del left[line]

    def push(self, request: Request) -> None:
        waiting = self._classes.setdefault(request.given.priority, _Class())
        if request.resumed:
            insort(waiting.resumed, request, key=self._key)
        else:
            line = self.policy.line(request)
            if not self._in_line[line]:
                self.policy.joins(line, [other for other, count in self._in_line.items() if count])
            self._in_line[line] += 1
            insort(waiting.lines.setdefault(line, []), request, key=self._key)
        self._of_owner[request.given.owner] += 1
        self._count += 1

    def remove(self, request: Request, now: float) -> None:
        """`request` is admitted, or gone. Raises ValueError when it does not wait here."""
        waiting = self._classes.get(request.given.priority) or _Class()
        line = self.policy.line(request)
        entries = waiting.resumed if request.resumed else waiting.lines.get(line, [])
        index = bisect_left(entries, self._key(request), key=self._key)
        if index == len(entries) or entries[index] is not request:
            raise ValueError("the request is not in the queue")
        del entries[index]
        if not request.resumed:
            self._in_line[line] -= 1
            if not entries:
                del waiting.lines[line]
        if not waiting.resumed and not waiting.lines:
            del self._classes[request.given.priority]
        self._of_owner[request.given.owner] -= 1
        self._count -= 1
        self._departures.append(now)

    def _key(self, request: Request) -> tuple[float, int]:
        return 0.0 if request.resumed else self.policy.place(request), request.arrival

    def check_room(self, now: float, *, owner: int = 0, elsewhere: int = 0, free_slots: int = 0) -> None:
        """Raise QueueFull when no new request of `owner` fits. `elsewhere` counts requests on their way into the queue;
        as many as there are `free_slots` are about to leave it and do not count."""
        left = self._limit + free_slots - self._count - elsewhere
        own = self._of_owner[owner] if owner else 0
        if left > 0 and own < SHARE * left:
            return
        full = f"{self._limit} requests are waiting, which is the limit."
        raise QueueFull(
            full if left <= 0 else f"{own} requests with this API key are waiting, and few places are left for others.",
            fix="Try again later, or start the server with a larger --max-num-queued-reqs.",
            retry_after=self.retry_after(now),
        )

    def retry_after(self, now: float) -> float:
        """Seconds until about a tenth of the queue has been admitted, at the rate of the latest admissions."""
        low, high = _RETRY_AFTER_S
        if not self._departures:
            return low
        interval = (now - self._departures[0]) / len(self._departures)
        return min(max(interval * max(1, self._count // 10), low), high)


def _all_of(entries: list[Request]) -> Iterator[Request]:
    """Each, also when the one at hand is removed."""
    position = 0
    while position < len(entries):
        request = entries[position]
        yield request
        if position < len(entries) and entries[position] is request:
            position += 1

"""Plans on their way to the ranks and results on their way back, for one epoch: through rings in shared memory to and
from ranks of the hub's node, over their streams where they are elsewhere.

Does not know what travels. One thread sends and takes results; `put` is called by whoever hears the streams.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from queue import SimpleQueue

from phalanx.distributed.transports.abort import Abort, GroupBroken
from phalanx.distributed.transports.ring import Ring
from phalanx.executor.members import Member
from phalanx.executor.messages import LIMIT, PLAN


class Traffic:
    def __init__(self, members: Sequence[Member], reporter: Member, abort: Abort):
        """`reporter`'s results are the step's. Every wait ends with `abort`, those for remote results with `put`."""
        self._abort, self._reporter = abort, reporter
        self._here = [m for m in members if m.here]
        self._elsewhere = [m for m in members if not m.here]
        cores = len(os.sched_getaffinity(0))
        self._plans: Ring | None = None
        self._results: Ring | None = None
        if self._here:
            self._plans = Ring.create(len(self._here), abort, limit=LIMIT, crowded=len(self._here) > cores)
        if reporter.here:
            crowded = len(self._here) >= cores
            self._results = Ring.create(1, abort, limit=LIMIT, crowded=crowded, writes=False)
        self._remote_results: SimpleQueue[bytes | None] = SimpleQueue()

    def place(self, member: Member) -> int:
        """Its place in the plan ring; 0 when plans come over its stream."""
        return self._here.index(member) + 1 if member.here else 0

    def descriptors(self, member: Member) -> tuple[list[int], ...]:
        """What it needs to take part: of the plan ring, and of the result ring if it reports here."""
        fds: tuple[list[int], ...] = (self._plans.fds,) if member.here and self._plans is not None else ()
        return (*fds, self._results.fds) if member is self._reporter and self._results is not None else fds

    def send(self, plan: bytes, timeout: float) -> None:
        """To everybody. Raises GroupBroken."""
        if self._plans is not None:
            self._plans.write(plan, timeout)
        for member in self._elsewhere:
            if member.stream is not None:
                with member.lock:
                    member.stream.send(PLAN, plan, timeout)

    def put(self, result: bytes | None) -> None:
        """A result came over a stream; None ends the wait for one."""
        self._remote_results.put(result)

    @property
    def unread(self) -> bool:
        """Whether a result is there. Any thread may ask that keeps others from closing this."""
        return self._results.unread if self._results is not None else not self._remote_results.empty()

    def take(self) -> bytes:
        """The next result. Raises GroupBroken when the epoch has ended."""
        if self._results is not None:
            return self._results.read()
        data = self._remote_results.get()
        if data is None:
            self._abort.check()
            raise GroupBroken("The epoch ended.")
        return data

    def close(self) -> None:
        for ring in (self._plans, self._results):
            if ring is not None:
                ring.close()

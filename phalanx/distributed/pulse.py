"""A rank's signs of progress, for whoever watches whether it hangs.

Everything that gets something done counts: a layer computed, an exchange with other ranks, a weight loaded. Beside the
count stands who the rank waits for, if it does: one that waits for another is not the one that hangs. Counting costs
two attribute accesses; nothing is measured, sent or locked here. One thread counts, any may look.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.distributed.transports.abort import Abort


class Pulse:
    """`count` changes as long as there is progress; its value means nothing."""

    __slots__ = ("abort", "count", "waits_for")

    def __init__(self) -> None:
        self.count = 0
        self.waits_for = ""
        """Who is to send what this rank cannot go on without, in words; empty while it computes."""
        self.abort: Abort | None = None
        """Of the epoch, if there is one: a step of an epoch that has ended ends at the next beat."""

    def beat(self) -> None:
        """One more thing is done. Raises GroupBroken when the epoch has ended."""
        self.count += 1
        if self.abort is not None:
            self.abort.check()

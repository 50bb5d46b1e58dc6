"""Why an epoch has broken: of all that ranks, launchers and the watch have to say, the words that say most.

Does not decide that it is over, nor what happens next: that is the hub's business.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from phalanx.errors import PhalanxError, UserError
from phalanx.executor.base import WorkerDied
from phalanx.executor.deadlines import Verdict
from phalanx.executor.death import kind_of
from phalanx.executor.launcher import Launcher
from phalanx.executor.members import Member
from phalanx.executor.messages import raised

_CAUSE_S = 0.5
"""Seconds to wait for better words about a loss: from the launcher, or from the rank that went first."""

_GLANCE_S = 0.01
"""Seconds where nothing can be heard from the rank's node: what its launcher knows by then, it says."""

_POLL_S = 0.05


def failure(
    members: Sequence[Member],
    launcher: Launcher,
    changed: threading.Condition,
    verdict: Verdict | None,
    otherwise: str,
    phase: str = "",
) -> PhalanxError:
    """What a user can mend, a rank that hangs or is gone, or one that failed; with nothing known, `otherwise`. `phase`
    is what ranks were to do while the epoch began. `changed` guards the members, and is not held."""
    before = f" before it could {phase}" if phase else ""
    if verdict is not None:
        node = members[verdict.rank].node if verdict.rank < len(members) else ""
        return WorkerDied(verdict.rank, f"{verdict.cause}{before}", node=node, kind="hung", silent=verdict.silent)
    deadline = time.monotonic() + _CAUSE_S
    with changed:
        while True:
            failures = [(m, m.failure) for m in members if m.failure is not None]
            for member, failure in failures:
                error = raised(failure, f"Rank {member.rank} on {member.node}: ")
                if isinstance(error, UserError):
                    return error
            lost = [m for m in members if m.lost]
            first = [(m, f) for m, f in failures if not f.secondary]
            if lost or first or time.monotonic() > deadline:
                break
            changed.wait(_POLL_S)
    if first:
        return _died(first[0][0], first[0][1].message.rstrip("."))
    if lost:
        # Of several, one whose end is known to have come by itself says most.
        causes = []
        for member in lost:
            left = max(0.0, deadline - time.monotonic())
            causes.append((member, launcher.cause(member.rank, min(left, _GLANCE_S) if member.unreachable else left)))
        member, cause = next(((m, c) for m, c in causes if c is not None), (lost[0], None))
        return _died(member, f"{cause or member.why}{before}", kind_of(cause or member.why), member.silent)
    if failures:
        words = failures[0][1].message.rstrip(".")
        return _died(failures[0][0], words, kind_of(words))
    return WorkerDied(0, otherwise.rstrip("."))


def _died(member: Member, cause: str, kind: str = "failed", silent: float | None = None) -> WorkerDied:
    return WorkerDied(member.rank, cause, node=member.node, kind=kind, silent=silent)

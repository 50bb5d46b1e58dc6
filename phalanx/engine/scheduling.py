"""In which order waiting requests are admitted: `SchedulingPolicy`, and two of them.

The queue keeps to priorities, and to who has run before, whatever the policy. Among the others each request stands in a
line; a policy says in which one and where, and which line goes next. `FairShare`, the default, has a line for each
owner (API key) and lets the owner go next who has got the least work: one owner's many requests cannot starve
another's. It is the Virtual Token Counter of Sheng et al. (OSDI 2024): tokens are charged when they are computed, not
by what a request might come to. `FirstCome` has one line for all.

Pure; reads no clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Protocol

from phalanx import plug_ins
from phalanx.engine.request import Request

PROMPT_TOKEN, OUTPUT_TOKEN = 1, 2
"""What computing one is charged."""


class SchedulingPolicy(Protocol):
    def line(self, request: Request) -> int:
        """Where it stands, for good."""
        ...

    def place(self, request: Request) -> float:
        """Lower goes first in its line, equal ones in order of arrival. Must not change while it waits."""
        ...

    def rank(self, line: int) -> float:
        """The line with the lowest goes next; of equal ones, whose first request came first."""
        ...

    def joins(self, line: int, others: Collection[int]) -> None:
        """Somebody stands in `line`, in which nobody stood; in `others` somebody does."""
        ...

    def admitted(self, request: Request, tokens: int) -> None:
        """It runs, for the first time, and `tokens` of its prompt must be computed."""
        ...

    def made(self, request: Request) -> None:
        """One output token."""
        ...


class FirstCome:
    """In order of arrival."""

    def line(self, request: Request) -> int:
        return 0

    def place(self, request: Request) -> float:
        return 0.0

    def rank(self, line: int) -> float:
        return 0.0

    def joins(self, line: int, others: Collection[int]) -> None:
        """All the same."""

    def admitted(self, request: Request, tokens: int) -> None:
        """All the same."""

    def made(self, request: Request) -> None:
        """All the same."""


class FairShare(FirstCome):
    """Guarantees: in any time in which two owners both have somebody waiting, what they are charged differs by at most
    twice the larger of a prompt's charge and that of all output tokens that as many requests as run together can make.
    Who has asked for nothing for a while has saved up nothing. Of one owner's requests the first goes first."""

    def __init__(self) -> None:
        self._charged: defaultdict[int, int] = defaultdict(int)
        self._last = 0
        """Whose request was admitted last."""

    def line(self, request: Request) -> int:
        return request.given.owner

    def rank(self, line: int) -> float:
        return self._charged[line]

    def joins(self, line: int, others: Collection[int]) -> None:
        level = min((self._charged[other] for other in others), default=self._charged[self._last])
        self._charged[line] = max(self._charged[line], level)

    def admitted(self, request: Request, tokens: int) -> None:
        self._last = request.given.owner
        self._charged[self._last] += PROMPT_TOKEN * tokens

    def made(self, request: Request) -> None:
        self._charged[request.given.owner] += OUTPUT_TOKEN


_OWN = {"fair": FairShare, "fcfs": FirstCome, "priority": FirstCome}
_METHODS = ("line", "place", "rank", "joins", "admitted", "made")


def make_policy(name: str) -> SchedulingPolicy:
    """What `--scheduling-policy` means. Raises ConfigError."""
    policy: SchedulingPolicy = plug_ins.make(plug_ins.SCHEDULING, "--scheduling-policy", name, _OWN, _METHODS)
    return policy

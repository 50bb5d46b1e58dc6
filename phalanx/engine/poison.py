"""Which request ends its workers: bookkeeping of losses, the same for an engine and for a router above engines.

    at work at two losses in a row          a suspect: tried again alone, one suspect at a time
    lost again while it was alone           refused, alone
    `CLEARED_BY` tokens made, or its end    cleared

Losses are in a row when the request made no token in between. With one in between they weigh half as much: a killer
may well make the first token after a loss, which comes from computing everything anew, and end the workers in the next
step, but so may somebody who ends workers from outside whenever an answer goes on. A loss says nothing about a request
that was not at work then; one that found nobody at work (while workers start) says nothing at all.

Covers the rule. Knows nothing of what a request is but its id, does no I/O, reads no clock. One thread.
"""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.errors import PoisonRequest

CLEARED_BY = 2
"""Tokens: the second comes from an ordinary step."""

_WEIGHTS = (2, 1)
"""Of a loss after so many tokens since the one before; the first one weighs as if there had been none."""
_SUSPECTED, _REFUSED = 4, 6
"""At which weights."""


class Quarantine:
    """Tell it what happens (`lost`, `made`, `ended`); ask it whom to run (`alone`) and whom to refuse (`lost`)."""

    def __init__(self) -> None:
        self._weights: dict[str, int] = {}
        """Of losses, for those that were at work at the latest one, and for suspects."""
        self._made: dict[str, int] = {}
        """Tokens since then, of the same."""
        self._suspects: dict[str, None] = {}
        """In the order in which they are tried."""

    def __bool__(self) -> bool:
        """Whether anything is held against anybody."""
        return bool(self._weights)

    @property
    def alone(self) -> str | None:
        """The suspect that runs now while all others wait; None when all may run."""
        return next(iter(self._suspects), None)

    @property
    def suspects(self) -> tuple[str, ...]:
        return tuple(self._suspects)

    def lost(self, at_work: Iterable[str]) -> list[str]:
        """The workers were lost while these requests were at work. Returns those that must be refused now."""
        ids = dict.fromkeys(at_work)
        if not ids:
            return []
        for request_id in [known for known in self._weights if known not in ids and known not in self._suspects]:
            self.ended(request_id)
        alone, refused = self.alone, []
        for request_id in ids:
            self._weights[request_id] = self._weights.get(request_id, 0) + _WEIGHTS[self._made.get(request_id, 0)]
            self._made[request_id] = 0
            if request_id == alone and self._weights[request_id] >= _REFUSED:
                refused.append(request_id)
            elif self._weights[request_id] >= _SUSPECTED:
                self._suspects.setdefault(request_id)
        for request_id in refused:
            self.ended(request_id)
        return refused

    def made(self, request_id: str, tokens: int = 1) -> None:
        """`request_id` has `tokens` more that nothing can take back."""
        if request_id in self._made:
            self._made[request_id] += tokens
            if self._made[request_id] >= CLEARED_BY:
                self.ended(request_id)

    def ended(self, request_id: str) -> None:
        """It is finished, aborted or refused: nothing is held against it."""
        self._weights.pop(request_id, None)
        self._made.pop(request_id, None)
        self._suspects.pop(request_id, None)


def refusal() -> PoisonRequest:
    """What a request that `Quarantine.lost` returned is answered."""
    return PoisonRequest(
        "Whatever computed this request was lost each time, at last while it ran alone; it is not tried again.",
        fix="Change the request; the log says what was lost.",
    )

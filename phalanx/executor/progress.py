"""How far all ranks together are with what they load at the start: heard on one thread, told on the one that waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from phalanx.executor.base import StartProgress

_NAMED = 2
"""So that a line of it fits a terminal."""


def in_words(what: str, shares: Mapping[int, float]) -> str:
    """`rank 0 80%, rank 1 46%`; of many those that are furthest behind. Empty when all are as far."""
    if len(set(shares.values())) < 2:
        return ""
    behind = sorted(shares, key=lambda number: shares[number])[:_NAMED]
    words = [f"{what} {number} {shares[number]:.0%}" for number in sorted(behind)]
    return ", ".join([*words, "…"] if len(shares) > _NAMED else words)


class SharedProgress:
    """Of so many ranks. Without somebody to `tell` nothing is noted."""

    def __init__(self, ranks: int = 0, tell: StartProgress | None = None):
        self._ranks, self._tell = ranks, tell
        self._shares: dict[str, dict[int, float]] = {}
        """By phase, in the order in which they began, and rank."""
        self._news: deque[tuple[str, float, str]] = deque()

    def note(self, rank: int, phase: str, share: float) -> None:
        """A phase is told of when all ranks have ended those before."""
        if self._tell is None:
            return
        shares = self._shares.setdefault(phase, {})
        shares[rank] = max(share, shares.get(rank, 0.0))
        together = {each: sum(told.values()) / self._ranks for each, told in self._shares.items()}
        phases = list(together)
        if all(together[earlier] >= 1.0 for earlier in phases[: phases.index(phase)]):
            known = {each: shares.get(each, 0.0) for each in range(self._ranks)}
            self._news.append((phase, together[phase], in_words("rank", known)))

    @property
    def has_news(self) -> bool:
        return bool(self._news)

    def tell(self) -> bool:
        """Whether there was anything to tell."""
        told = False
        while self._tell is not None and self._news:
            self._tell(*self._news.popleft())
            told = True
        return told

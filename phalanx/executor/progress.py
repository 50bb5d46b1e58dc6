"""How far all ranks together are with what they load at the start: heard on one thread, told on the one that waits."""

from __future__ import annotations

from collections import deque

from phalanx.executor.base import LoadProgress


class SharedProgress:
    """Of so many ranks. Without somebody to `tell` nothing is noted."""

    def __init__(self, ranks: int = 0, tell: LoadProgress | None = None):
        self._ranks, self._tell = ranks, tell
        self._shares: dict[str, dict[int, float]] = {}
        """By phase, in the order in which they began, and rank."""
        self._news: deque[tuple[str, float]] = deque()

    def note(self, rank: int, phase: str, share: float) -> None:
        """A phase is told of when all ranks have ended those before."""
        if self._tell is None:
            return
        shares = self._shares.setdefault(phase, {})
        shares[rank] = max(share, shares.get(rank, 0.0))
        together = {each: sum(known.values()) / self._ranks for each, known in self._shares.items()}
        phases = list(together)
        if all(together[earlier] >= 1.0 for earlier in phases[: phases.index(phase)]):
            self._news.append((phase, together[phase]))

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

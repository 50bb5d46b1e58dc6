"""A clock that moves only when told to."""

from __future__ import annotations


class FakeClock:
    """Seconds; call it to read it."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds

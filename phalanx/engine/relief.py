"""`Relief`: when an engine is so much slower than another that requests should leave it, and how many.

An engine's pace is what its streams wait for a token: seconds of streams over tokens, of the last few seconds, so one
that stands still gets slower all the time. A token takes longer the more streams there are, by a fixed shape, which
leaves one number for each engine, its slowness. From it follows how long a token would take with one stream less here
and one more there. Relief begins when that is `BEGIN` times as long here as there for `HOLD_S` seconds, and goes on
until it is `END` times: what is only noise moves nobody.

An engine that computes prompts makes no tokens for a while. It is not judged before it should be done with them, at
twice what the fastest engine takes, and a prompt's tokens count, for less than those of answers.

The same number says how much longer than others an engine takes over its work, for those who send it more.

Pure: reads no clock, knows no requests. Who goes, and how, is the router's business.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

BEGIN, END = 2.0, 1.3
HOLD_S = 3.0
WINDOW_S = 3.0
"""What is older counts little."""
EVIDENCE_S = 0.5
"""Seconds of waiting that an engine is judged by, at least."""
STREAMS = 8.0
"""So many streams more make a token take twice as long as a single stream's; computers differ, but not for long."""
FORGIVEN_S = 10.0
"""An idle engine counts as fast as the others after so long: it may have been slow for others' sake."""
NOISE = 1.5
"""Engines that differ by less count as alike."""
PROMPT_TOKEN = 0.125
"""Computing a prompt's token, in tokens of answers; it is rather less."""
ONE_STEP = 2048
"""Prompt tokens that one step computes, and that nothing is heard of meanwhile."""
AT_ONCE = 0.25
"""Of an engine's requests that leave at a time."""


@dataclass(frozen=True)
class Sight:
    """One engine, since the last look."""

    usable: bool
    """Whether it can have requests."""
    streams: int
    """Requests that it has."""
    tokens: int
    """Made."""
    prompts: int = 0
    """Tokens of prompts that are computed."""
    pending: int = 0
    """Tokens of prompts that are not."""


@dataclass(frozen=True)
class Move:
    """`count` requests go from one engine to another."""

    source: int
    target: int
    count: int


class _Pace:
    def __init__(self) -> None:
        self.waited = self.tokens = 0.0
        """Seconds that streams waited, as if each had been alone; tokens."""
        self.silent = self.held = 0.0
        """Seconds without a token; what streams have waited and is not judged yet."""
        self.slowness: float | None = None
        """Seconds a token of a single stream; None while nobody knows."""

    def see(self, sight: Sight, seconds: float, best: float | None) -> None:
        kept = math.exp(-seconds / WINDOW_S)
        self.waited, self.tokens = self.waited * kept, self.tokens * kept
        self.tokens += sight.tokens + PROMPT_TOKEN * sight.prompts
        self.held += sight.streams * seconds / _shape(sight.streams)
        self.silent = 0.0 if sight.tokens or not sight.streams else self.silent + seconds
        if self.silent and sight.pending:
            due = PROMPT_TOKEN * min(sight.pending, ONE_STEP)
            if best is None or self.silent < BEGIN * best * due:
                return
        self.waited, self.held = self.waited + self.held, 0.0
        if sight.streams and self.waited >= EVIDENCE_S:
            self.slowness = self.waited / max(self.tokens, 0.5)

    def forgive(self, best: float, seconds: float) -> None:
        if self.slowness is not None:
            self.slowness += (best - self.slowness) * (1 - math.exp(-seconds / FORGIVEN_S))


class Relief:
    def __init__(self, engines: int):
        self._paces = [_Pace() for _ in range(engines)]
        self._held = 0.0
        """Seconds for which somebody has needed relief."""

    def look(self, sights: Sequence[Sight], seconds: float) -> Move | None:
        """What is to be done now; `seconds` have passed since the last look."""
        before = self._best()
        for pace, sight in zip(self._paces, sights, strict=True):
            pace.see(sight, seconds, before)
        best = self._best()
        if best is None:
            return None
        for pace, sight in zip(self._paces, sights, strict=True):
            if not sight.streams:
                pace.forgive(best, seconds)
        pair = self._extremes(sights)
        if pair is None:
            self._held = 0.0
            return None
        source, target = pair
        counts = sights[source].streams, sights[target].streams
        if self._gain(source, counts[0], target, counts[1]) < (END if self._held >= HOLD_S else BEGIN):
            self._held = 0.0
            return None
        self._held += seconds
        if self._held < HOLD_S:
            return None
        return Move(source, target, self._number(source, counts[0], target, counts[1]))

    def slowness(self) -> list[float]:
        """Of each engine in relation to the fastest, 1 for all that are about as fast or not known."""
        best = self._best()
        found = [1.0 if best is None or pace.slowness is None else pace.slowness / best for pace in self._paces]
        return [1.0 if ratio < NOISE else ratio for ratio in found]

    def forget(self, engine: int) -> None:
        """Another process is in its place."""
        self._paces[engine] = _Pace()

    def _best(self) -> float | None:
        return min((pace.slowness for pace in self._paces if pace.slowness is not None), default=None)

    def _extremes(self, sights: Sequence[Sight]) -> tuple[int, int] | None:
        """Where a token takes longest, and where one more stream would have it soonest."""
        able = [number for number, sight in enumerate(sights) if sight.usable]
        busy = [number for number, sight in enumerate(sights) if sight.streams and self._paces[number].slowness]
        if not able or not busy:
            return None
        source = max(busy, key=lambda number: self._token_s(number, sights[number].streams))
        others = [number for number in able if number != source]
        if not others:
            return None
        return source, min(others, key=lambda number: self._token_s(number, sights[number].streams + 1))

    def _token_s(self, engine: int, streams: int) -> float:
        slowness = self._paces[engine].slowness
        return (slowness if slowness is not None else self._best() or 1.0) * _shape(streams)

    def _gain(self, source: int, here: int, target: int, there: int) -> float:
        return self._token_s(source, here) / self._token_s(target, there + 1)

    def _number(self, source: int, here: int, target: int, there: int) -> int:
        count, most = 1, max(1, int(here * AT_ONCE))
        while count < most and self._gain(source, here - count, target, there + count) >= END:
            count += 1
        return count


def _shape(streams: int) -> float:
    """How much longer a token takes than with one stream."""
    return (STREAMS + streams) / (STREAMS + 1)

"""How long a rank may show no progress before it counts as hung, and who it is that hangs: arithmetic, with the time as
an argument. Asking ranks how they are, and what happens to a hung one, is the hub's business.

Slow is not dead. What a rank may take depends on what it does: loading and the first steps of a kind take their time,
and where steps are slow, bounds grow with what was measured. All bounds are multiples of one floor, `--hang-timeout`.
A rank whose process does not even say how it is (stopped, frozen, or its interpreter locked up) needs less patience
than one that answers and computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

FIRST_STEPS = 12.0
"""Floors without progress in the first steps of an epoch, and in the first with much more tokens than any before."""

LOADING = 30.0
"""Floors without progress while a rank reads weights: a large one may come over a slow network."""

SILENT_LOADING = 3.0
"""Floors in which a loading rank's process does not answer; in steps it is one floor."""

STEADY = 20.0
"""Times the longest pause between two signs of progress that was seen lately in steps of the size."""

SETTLE_S = 3.0
"""Seconds for a survivor to let go of the epoch before, while it shows no progress in loading."""

SETTLE = 3.0
"""Times the longest pause, when that is more than `SETTLE_S`."""

JOIN_S, JOIN = 60.0, 12.0
"""Seconds, or floors, for a started process to join: it may have to import PyTorch on a busy machine."""

_ASK, _ASK_MOST, _ASK_LEAST = 0.05, 0.5, 0.05
"""Floors between two questions, and the most and least seconds. Steps that are shorter are never asked about, and a
pause of that length is within the floor."""

_FADE = 0.9
"""What is left of the longest pause with each further step of its size."""


def asks_every(floor: float) -> float:
    """Seconds between questions to ranks of which something is expected."""
    return min(_ASK_MOST, max(_ASK_LEAST, _ASK * floor))


def join_bound(floor: float) -> float:
    """Seconds for a started process to join."""
    return max(JOIN_S, JOIN * floor)


@dataclass
class Bounds:
    """Seconds of patience, from the floor and from what was measured of steps, by their size: tokens, in powers of 2.

    A step of more than twice the tokens of any before in its epoch is a first step. One thread says that steps are
    done, another may ask at the same time.
    """

    floor: float
    largest: int = 0
    """Size of the largest step done in this epoch; 0 before the first."""
    pauses: dict[int, float] = field(default_factory=dict)
    """By size, the longest pause between two signs of progress, in seconds. Outlives epochs."""

    def __str__(self) -> str:
        return (
            f"A rank counts as hung after {self.floor:g} s without progress; while it loads, after "
            f"{LOADING * self.floor:g} s, and in first steps, after {FIRST_STEPS * self.floor:g} s, if it answers at "
            "least; longer where steps are slow."
        )

    def begin(self) -> None:
        """A new epoch: its first step may be slow again."""
        self.largest = 0

    def done(self, tokens: int) -> None:
        """A step is done."""
        size = tokens.bit_length()
        self.largest = max(self.largest, size)
        if size in self.pauses:
            self.pauses[size] *= _FADE
            if self.pauses[size] * STEADY < self.floor:
                del self.pauses[size]

    def paused(self, tokens: int, seconds: float) -> None:
        """So long there was no sign of progress in such a step; then there was."""
        size = tokens.bit_length()
        self.pauses[size] = max(seconds, self.pauses.get(size, 0.0))

    def first(self, tokens: int) -> bool:
        return not self.largest or tokens.bit_length() > self.largest + 1

    def step(self, tokens: int) -> float:
        """Without progress, for a rank that answers."""
        return max(FIRST_STEPS * self.floor, self.steady(tokens)) if self.first(tokens) else self.steady(tokens)

    def steady(self, tokens: int | None = None) -> float:
        """Without progress in a step of a known size, or of any."""
        known = [p for size, p in list(self.pauses.items()) if tokens is None or size <= tokens.bit_length() + 1]
        return max(self.floor, STEADY * max(known, default=0.0))

    @property
    def settle(self) -> float:
        """For a survivor to let go of an epoch."""
        return max(SETTLE_S, SETTLE * max(self.pauses.values(), default=0.0))


class Awaited(NamedTuple):
    """What the ranks are to do now."""

    what: object
    """Changes whenever something else is awaited."""
    tokens: int | None
    """Of a step; None while an epoch begins."""
    loading: bool
    ranks: tuple[int, ...]
    """Who has not done it yet, as far as one can tell."""


class Verdict(NamedTuple):
    """Ranks that hang."""

    rank: int
    """To name."""
    lost: tuple[int, ...]
    """To replace; empty when all of them still answer and it is not known which of them keeps the others waiting."""
    cause: str
    silent: float
    """Seconds since the last sign of life, or of progress."""


@dataclass
class _Signs:
    """What one rank has shown."""

    heard: float
    """When the last byte came."""
    told: float
    """When it last said how it is."""
    moved: float
    """When that was first so."""
    asked: float | None = None
    """When, as long as it has not answered."""
    count: int | None = None
    waits_for: str = ""
    """Who for; empty while it computes, or nothing is known."""

    def later(self, seconds: float) -> None:
        self.heard += seconds
        self.told += seconds
        self.moved += seconds
        if self.asked is not None:
            self.asked += seconds


class Vigil:
    """Watches the ranks of one hub. Call `look` every `asks_every(floor)` seconds while something is awaited."""

    def __init__(self, bounds: Bounds):
        self.bounds = bounds
        self._signs: dict[int, _Signs] = {}
        self._awaited: Awaited | None = None
        self._looked = 0.0
        self._new = True

    def ask(self, now: float) -> list[int]:
        """Who is to be asked how it is, after a look: those of whom something is awaited since the last look, and who
        have answered the last time."""
        if self._awaited is None or self._new:
            return []
        due = [rank for rank in self._awaited.ranks if self._signs[rank].asked is None]
        for rank in due:
            self._signs[rank].asked = now
        return due

    def heard(self, rank: int, now: float) -> None:
        """Something came from it then, if only a piece of a long message."""
        signs = self._signs.get(rank)
        if signs is not None:
            signs.heard = max(now, signs.heard)
            if signs.asked is not None:
                signs.asked = max(now, signs.asked)

    def answered(self, rank: int, count: int, waits_for: str, now: float) -> bool:
        """It says how far it is: a number that changes with progress, and who it waits for (empty: it computes).
        Whether that is news."""
        signs, awaited = self._signs.get(rank), self._awaited
        if signs is None or awaited is None:
            return False
        news = (count, waits_for) != (signs.count, signs.waits_for)
        if news:
            if signs.asked is not None and awaited.tokens is not None:
                self._note(awaited.tokens, now - signs.asked)
            if signs.count is not None and not signs.waits_for and awaited.tokens is not None:
                self._note(awaited.tokens, now - signs.moved - asks_every(self.bounds.floor))
            signs.count, signs.waits_for, signs.moved = count, waits_for, now
        signs.heard = signs.told = now
        signs.asked = None
        return news

    def _note(self, tokens: int, pause: float) -> None:
        if pause * STEADY > self.bounds.floor:
            self.bounds.paused(tokens, pause)

    def look(self, awaited: Awaited, now: float) -> Verdict | None:
        """Whether somebody hangs. When something new is awaited, everybody's time begins anew."""
        interval = asks_every(self.bounds.floor)
        self._new = self._awaited is None or self._awaited.what != awaited.what
        if self._new:
            self._signs = {rank: _Signs(now, now, now) for rank in awaited.ranks}
        else:
            # Time in which this process did not look (it was stopped, or starved) is not the ranks' fault.
            late = now - self._looked - interval
            if late > interval:
                for signs in self._signs.values():
                    signs.later(late)
        self._awaited, self._looked = awaited, now
        mine = {rank: signs for rank, signs in self._signs.items() if rank in awaited.ranks}
        return self._silent(mine, awaited, now) or self._stuck(mine, awaited, now)

    def rest(self) -> None:
        """Nothing is awaited."""
        self._awaited = None
        self._signs = {}

    def bound(self, awaited: Awaited | None) -> float:
        """Seconds without progress after which a rank counts as hung."""
        if awaited is None:
            return self.bounds.steady()
        if awaited.tokens is not None:
            return self.bounds.step(awaited.tokens)
        return (LOADING if awaited.loading else FIRST_STEPS) * self.bounds.floor

    def _silent(self, ranks: Mapping[int, _Signs], awaited: Awaited, now: float) -> Verdict | None:
        if awaited.tokens is None:
            bound = SILENT_LOADING * self.bounds.floor
        else:
            bound = self.bounds.steady(awaited.tokens)
        lost = tuple(r for r, s in ranks.items() if s.asked is not None and now - s.asked > bound)
        if not lost:
            return None
        silent = max(now - ranks[rank].heard for rank in lost)
        return Verdict(lost[0], lost, f"it showed no progress and did not answer for {_seconds(silent)}", silent)

    def _stuck(self, ranks: Mapping[int, _Signs], awaited: Awaited, now: float) -> Verdict | None:
        bound = self.bound(awaited)
        still = {rank: s.told - s.moved for rank, s in ranks.items() if s.told - s.moved > bound}
        busy = [rank for rank in still if not ranks[rank].waits_for]
        if busy:
            lost = (busy[0],) if len(busy) == 1 else ()
            silent = max(still[rank] for rank in busy)
            others = f" (nor did rank {_list(busy[1:])})" if len(busy) > 1 else ""
            return Verdict(busy[0], lost, f"it showed no progress for {_seconds(silent)}{others}", silent)
        if not still or len(still) < len(ranks):
            return None
        silent = min(still.values())
        waits = ", ".join(f"rank {rank} for {ranks[rank].waits_for}" for rank in still)
        return Verdict(
            next(iter(still)), (), f"the ranks wait for each other since {_seconds(silent)}: {waits}", silent
        )


def _list(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"

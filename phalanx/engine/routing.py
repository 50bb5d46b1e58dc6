"""Which engine gets a request: the one with the least outstanding work, or one that knows its beginning.

`PrefixAffinity` remembers hashes of the beginnings of prompts and where they went, in one bounded table. An engine that
knows a beginning has it in its prefix cache, probably, so the request is cheaper there by that many tokens. It gets the
request unless it has more to do than `FACTOR` times the work of the least busy engine and those tokens: affinity saves
work, and must not cost more by piling it up. The longest known beginning counts; of several engines that know it, the
least busy one is taken.

Beginnings are hashed at 1, 2, 3, 4, 6, 8, 12, 16, … blocks, each a step of at most a half, so that a prompt has few
entries, whatever its length, and what is found is at least two thirds of what is known. A request's `cache_salt` is
part of the hash. Hashes may collide: a request is then no worse off than with any other engine.

Covers the choice. Does not know which engines live; does not look into their caches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Protocol

from phalanx.engine.client import EngineRequest

FACTOR = 1.25
"""What is known counts as long as its engine has at most so many times the work of the least busy one."""
BLOCK = 16
"""Tokens."""
LONGEST = 512
"""Blocks of a prompt that are looked at."""
ENTRIES = 65_536
"""Of the table, some 10 MB."""


class Routing(Protocol):
    def choose(self, request: EngineRequest, loads: Sequence[float | None]) -> int:
        """The number of the engine that gets `request`. `loads` are the engines' outstanding tokens, None for those
        that cannot take it; at least one can."""
        ...

    def forget(self, engine: int) -> None:
        """That engine has lost its cache."""
        ...


class LeastWork:
    """No affinity."""

    def choose(self, request: EngineRequest, loads: Sequence[float | None]) -> int:
        return min((load, number) for number, load in enumerate(loads) if load is not None)[1]

    def forget(self, engine: int) -> None:
        """There is nothing to forget."""


class PrefixAffinity:
    def __init__(self, *, factor: float = FACTOR, entries: int = ENTRIES):
        self._factor = factor
        self._entries = entries
        self._last = -1
        """Which engine was the least busy one the last time."""
        self._known: OrderedDict[int, int] = OrderedDict()
        """Hash of a beginning to the engines that have computed it, one bit each; the least recently used first."""

    def __len__(self) -> int:
        return len(self._known)

    def choose(self, request: EngineRequest, loads: Sequence[float | None]) -> int:
        hashes = _hashes(request.prompt_token_ids, request.cache_salt)
        chosen = self._knowing(hashes, loads)
        if chosen is None:
            chosen = self._least(loads)
        self._remember(hashes, chosen)
        return chosen

    def _least(self, loads: Sequence[float | None]) -> int:
        """Of equal ones each in turn, so that every cache is used."""
        count, after = len(loads), self._last + 1
        able = ((load, (number - after) % count, number) for number, load in enumerate(loads) if load is not None)
        self._last = min(able)[2]
        return self._last

    def forget(self, engine: int) -> None:
        others = ~(1 << engine)
        left = ((key, engines & others) for key, engines in self._known.items())
        self._known = OrderedDict((key, engines) for key, engines in left if engines)

    def _knowing(self, hashes: Sequence[int], loads: Sequence[float | None]) -> int | None:
        """The engine that knows most of it and may have it."""
        known, limit, tried = self._known, None, 0
        for number in range(len(hashes) - 1, -1, -1):
            engines = known.get(hashes[number], 0) & ~tried
            if not engines:
                continue
            if limit is None:
                limit = self._factor * min(load for load in loads if load is not None)
            best = _least_of(engines, loads)
            if best is not None:
                load = loads[best]
                if load is not None and load <= limit + BLOCK * _BLOCKS[number]:
                    return best
            tried |= engines
        return None

    def _remember(self, hashes: Sequence[int], engine: int) -> None:
        known, bit = self._known, 1 << engine
        for key in hashes:
            known[key] = known.get(key, 0) | bit
            known.move_to_end(key)
        while len(known) > self._entries:
            known.popitem(last=False)


def _least_of(engines: int, loads: Sequence[float | None]) -> int | None:
    best, least = None, 0.0
    while engines:
        low = engines & -engines
        engines ^= low
        number = low.bit_length() - 1
        load = loads[number] if number < len(loads) else None
        if load is not None and (best is None or load < least):
            best, least = number, load
    return best


def _lengths() -> Iterator[int]:
    yield 1
    step = 1
    while step <= LONGEST:
        yield from (2 * step, 3 * step)
        step *= 2


_BLOCKS = tuple(length for length in _lengths() if length <= LONGEST)
"""1, 2, 3, 4, 6, 8, 12, …"""
_PIECES = tuple(pairwise((0, *(BLOCK * length for length in _BLOCKS))))


def _hashes(tokens: Sequence[int], salt: str) -> list[int]:
    """Of the beginnings of `tokens` with the lengths `_BLOCKS`, as far as there are full ones."""
    found, last, count = [], hash(salt), len(tokens)
    for start, end in _PIECES:
        if end > count:
            break
        last = hash((last, *tokens[start:end]))
        found.append(last)
    return found

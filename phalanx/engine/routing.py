"""Which engine gets a request: the one with the least outstanding work, or one that knows its beginning.

`PrefixAffinity` remembers hashes of the beginnings of prompts and where they went, in one bounded table. An engine that
knows a beginning has it in its prefix cache, probably, so the request is cheaper there by that many tokens. It gets the
request unless it has more to do than `FACTOR` times the work of the least busy engine and those tokens: affinity saves
work, and must not cost more by piling it up. The longest known beginning counts; of several engines that know it, the
least busy one is taken (of very many, the least busy of `LOOKED_AT`, unless the least busy of all is one of them).

Beginnings are hashed at 1, 2, 3, 4, 6, 8, 12, 16, … blocks, each a step of at most a half, so that a prompt has few
entries, whatever its length, and what is found is at least two thirds of what is known. A request's `cache_salt` is
part of the hash. Hashes may collide: a request is then no worse off than with any other engine.

What is known of an engine is forgotten at once when it loses its cache, by giving it another bit in the table; the old
ones are cleared away when they are as many as the engines.

Covers the choice. Does not know which engines live; does not look into their caches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Protocol

from phalanx import plug_ins
from phalanx.engine.client import EngineRequest
from phalanx.engine.loads import Loads

FACTOR = 1.25
"""What is known counts as long as its engine has at most so many times the work of the least busy one."""
BLOCK = 16
"""Tokens."""
LONGEST = 512
"""Blocks of a prompt that are looked at."""
ENTRIES, FOR_EACH = 65_536, 256
"""Of the table, some 15 MB; more where there are more engines than that is enough for, so many each."""
LOOKED_AT = 32
"""Engines that know a beginning, at most."""


class Routing(Protocol):
    def choose(self, request: EngineRequest, loads: Loads) -> int:
        """The number of the engine that gets `request`. `loads` are the engines' outstanding tokens, None for those
        that cannot take it; at least one can. It may be asked again for the same request."""
        ...

    def forget(self, engine: int) -> None:
        """That engine has lost its cache."""
        ...


class LeastWork:
    """No affinity."""

    def choose(self, request: EngineRequest, loads: Loads) -> int:
        return loads.least()

    def forget(self, engine: int) -> None:
        """There is nothing to forget."""


class PrefixAffinity:
    def __init__(self, *, factor: float = FACTOR, entries: int | None = None):
        """`entries` bounds the table; None: as many engines as there are need."""
        self._factor = factor
        self._entries = entries
        self._known: OrderedDict[int, int] = OrderedDict()
        """Hash of a beginning to the engines that have computed it, one bit each; the least recently used first."""
        self._bits: dict[int, int] = {}
        """Number of an engine to its bit."""
        self._engines: list[int] = []
        """Bit to number; that of an engine which has lost its cache since is -1."""
        self._live = 0
        """All bits that count."""
        self._turn = 0

    def __len__(self) -> int:
        return len(self._known)

    def choose(self, request: EngineRequest, loads: Loads) -> int:
        hashes = _hashes(request.prompt_token_ids, request.cache_salt)
        chosen = self._knowing(hashes, loads)
        if chosen is None:
            chosen = loads.least()
        self._remember(hashes, chosen, self._entries or max(ENTRIES, FOR_EACH * len(loads)))
        return chosen

    def forget(self, engine: int) -> None:
        bit = self._bits.pop(engine, None)
        if bit is None:
            return
        self._engines[bit] = -1
        self._live &= ~(1 << bit)
        if len(self._engines) > 2 * len(self._bits) + 16:
            self._clear_away()

    def _clear_away(self) -> None:
        """Number the bits anew and drop what nobody knows."""
        old = self._engines
        self._engines = [engine for engine in old if engine >= 0]
        self._bits = {engine: bit for bit, engine in enumerate(self._engines)}
        renewed: OrderedDict[int, int] = OrderedDict()
        for key, bits in self._known.items():
            engines = sum(1 << self._bits[old[bit]] for bit in _ones(bits & self._live))
            if engines:
                renewed[key] = engines
        self._known, self._live = renewed, (1 << len(self._engines)) - 1

    def _knowing(self, hashes: Sequence[int], loads: Loads) -> int | None:
        """The engine that knows most of it and may have it."""
        known, untried, limit = self._known, self._live, None
        for number in range(len(hashes) - 1, -1, -1):
            bits = known.get(hashes[number], 0) & untried
            if not bits:
                continue
            if limit is None:
                least = loads.least()
                limit = self._factor * (loads[least] or 0.0)
            best = self._least_of(bits, loads, least)
            if best is not None:
                load = loads[best]
                if load is not None and load <= limit + BLOCK * _BLOCKS[number]:
                    return best
            untried &= ~bits
        return None

    def _least_of(self, bits: int, loads: Loads, least_of_all: int) -> int | None:
        """Of the engines with these bits."""
        if bits >> self._bits.get(least_of_all, len(self._engines)) & 1:
            return least_of_all
        best, least, count = None, 0.0, len(loads)
        if bits.bit_count() > LOOKED_AT:
            self._turn = (self._turn + LOOKED_AT) % len(self._engines)
            bits = bits >> self._turn << self._turn or bits
        for _, bit in zip(range(LOOKED_AT), _ones(bits), strict=False):
            number = self._engines[bit]
            load = loads[number] if number < count else None
            if load is not None and (best is None or load < least):
                best, least = number, load
        return best

    def _remember(self, hashes: Sequence[int], engine: int, most: int) -> None:
        bit = self._bits.get(engine)
        if bit is None:
            bit = self._bits[engine] = len(self._engines)
            self._engines.append(engine)
            self._live |= 1 << bit
        known, mask = self._known, 1 << bit
        for key in hashes:
            known[key] = known.get(key, 0) | mask
            known.move_to_end(key)
        while len(known) > most:
            known.popitem(last=False)


def _ones(bits: int) -> Iterator[int]:
    """The places of the ones, lowest first."""
    while bits:
        low = bits & -bits
        bits ^= low
        yield low.bit_length() - 1


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


_OWN = {"prefix": PrefixAffinity, "least-work": LeastWork}


def make_routing(name: str) -> Routing:
    """What `--routing-policy` means. Raises ConfigError."""
    routing: Routing = plug_ins.make(plug_ins.ROUTING, "--routing-policy", name, _OWN, ("choose", "forget"))
    return routing

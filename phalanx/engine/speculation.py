"""Which tokens are proposed for a request: what followed its last few tokens where they occurred before.

A `Proposer` belongs to one running request and is told how far its proposals were accepted. Three rules:

    look-up   the n-gram at the end, `prompt_lookup_max` to `prompt_lookup_min` tokens long, is looked up in the prompt
              and the answer; of the places where the longest occurred, the latest. As long as what was proposed from a
              place comes true, the next tokens are taken from there, without another look-up.
    pace      each step that could pay for a token adds a bounded number of tokens to the index; until it holds all,
              nothing is proposed. In other steps nothing is done.
    credit    what a refused token costs, and an accepted one saves, is counted in a request's share of a step. A
              request spends its credit and is given back what it has saved, so a run of refusals ends by itself. What
              can be lost is bounded: `FIRST_CREDIT` once, and `LOSS` of each step.

Pure: tokens in, tokens out. What is proposed changes how fast an answer comes, never the answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from phalanx.speculative_config import SpeculativeConfig

FIXED_COST = 16.0
"""What a step costs beside its rows, in rows: reading the weights. Measured on CPUs: 9 to 25 for 4-bit blocks (9 beside
8 requests, 25 beside 32), 40 and more for bfloat16; it is more on GPUs, too. Where it is more, proposing ends earlier
than it would have to."""
MARGIN = 0.7
"""What an accepted token counts for; it saves 1. Costs may be as much larger than assumed before anything is lost."""
FIRST_CREDIT = 0.2
"""Before anything was accepted."""
LOSS = 0.01
"""Credit that each step gives to a request that has too little for a token."""
_ROUNDS = 4
"""For how many full proposals credit can be saved."""
INDEXED_AT_ONCE = 4096
"""Tokens added to an index in one step."""
_CANDIDATES = 8
"""Earlier places of an n-gram that are compared."""


class NgramIndex:
    """Where each n-gram of a growing sequence occurs. It costs about 150 bytes a token."""

    def __init__(self, shortest: int, longest: int):
        self._shortest = shortest
        self._longest = longest
        self._latest: dict[tuple[int, ...], int] = {}
        """The end (the index after it) of each n-gram of the shortest length."""
        self._earlier = array("i")
        """For each end of an n-gram, from `shortest` on, the one before of the same n-gram, or -1."""

    @property
    def end(self) -> int:
        """N-grams that end here or before are in the index."""
        return len(self._earlier) + self._shortest - 1

    def extend(self, tokens: Sequence[int], most: int) -> bool:
        """Add n-grams that end before the end of `tokens`, at most `most` of them. True when none is left."""
        shortest, latest, earlier = self._shortest, self._latest, self._earlier
        last = len(tokens) - 1
        for end in range(self.end + 1, min(last, self.end + most) + 1):
            ngram = tuple(tokens[end - shortest : end])
            earlier.append(latest.get(ngram, -1))
            latest[ngram] = end
        return self.end >= last

    def find(self, tokens: Sequence[int]) -> int | None:
        """Where the longest n-gram at the end of `tokens` (all of it indexed) ended before, the latest such place."""
        size, shortest = len(tokens), self._shortest
        place = self._latest.get(tuple(tokens[size - shortest :]), -1) if size >= shortest else -1
        best, best_length = None, 0
        for _ in range(_CANDIDATES):
            if place < 0:
                break
            length = shortest
            while length < min(self._longest, place) and tokens[place - length - 1] == tokens[size - length - 1]:
                length += 1
            if length > best_length:
                best, best_length = place, length
            if length == self._longest:
                break
            place = self._earlier[place - shortest]
        return best


class Proposer:
    """What to propose for one request. Its tokens are passed in and only ever grow."""

    def __init__(self, config: SpeculativeConfig):
        self._most = config.num_speculative_tokens
        self._index = NgramIndex(config.prompt_lookup_min, config.prompt_lookup_max)
        self._credit = FIRST_CREDIT
        self._source: int | None = None
        """Where the latest proposal was taken from, as long as it came true."""
        self._known = 0
        """Tokens there were then."""

    def propose(self, tokens: Sequence[int], room: int, running: int) -> list[int]:
        """What may follow `tokens`, at most `room` tokens; call once before each step that samples one for it.
        `running` requests share the step."""
        affordable = int(self._credit / _cost(1, running))
        if affordable < 1:
            self._credit += LOSS
            self._source = None
            return []
        indexed = self._index.extend(tokens, INDEXED_AT_ONCE)
        most = min(self._most, room, affordable)
        source = self._next_source(tokens) if indexed and most > 0 else None
        self._source, self._known = source, len(tokens)
        return [] if source is None else _copied(tokens, source, most)

    def _next_source(self, tokens: Sequence[int]) -> int | None:
        """Behind what came true, else where the end of `tokens` occurred before."""
        if self._source is not None:
            added = len(tokens) - self._known
            source = self._source + added
            if list(tokens[self._source : source]) == list(tokens[self._known :]):
                return source
        return self._index.find(tokens)

    def settle(self, proposed: int, accepted: int, running: int) -> None:
        """Of `proposed` tokens this many were accepted, in a step that `running` requests shared."""
        left = self._credit + MARGIN * accepted - _cost(proposed, running)
        self._credit = min(left, _ROUNDS * _cost(self._most, running))


def _cost(proposed: int, running: int) -> float:
    """Of so many rows more, in a request's share of a step."""
    return proposed * running / (FIXED_COST + running)


def _copied(tokens: Sequence[int], source: int, count: int) -> list[int]:
    """`count` tokens from `source` on; where `tokens` end, what was copied goes on, as a repetition does."""
    copied = list(tokens[source : source + count])
    period = len(tokens) - source
    while len(copied) < count:
        copied.append(copied[len(copied) - period])
    return copied

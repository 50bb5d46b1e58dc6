"""Where the rows of a step sample when tokens are proposed, and which of the sampled tokens stand.

A row samples at its last token and after each token proposed for it. A draw depends on the tokens before it and on its
position alone, so each sampled token is what the request would have got there, provided that what it came after is
what the request got: up to the first place where the sampled and the proposed token differ. native/decoding.cpp does
the same for rows that ask for nothing but tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.step import NO_TOKEN

Ints = NDArray[np.int64]


@dataclass(slots=True)
class Places:
    """The S places where R rows sample, row after row."""

    row: Ints
    """[S]: whose place it is."""
    ahead: Ints
    """[S]: how many proposed tokens are before it."""
    first: Ints
    """[R]: where each row's places begin."""

    @classmethod
    def of(cls, proposed: Ints) -> Places:
        """`proposed` [R]: how many tokens are proposed for each row."""
        counts = proposed + 1
        first = np.cumsum(counts) - counts
        row = np.repeat(np.arange(len(counts)), counts)
        return cls(row, np.arange(len(row)) - first[row], first)


def standing(sampled: NDArray[np.int32], proposed: NDArray[np.int32]) -> int:
    """How many of the tokens `sampled` [k + 1] at a row's places stand, with `proposed` [k] in between. None where the
    first place gave no token (`NO_TOKEN`); one that fails later only ends the chain."""
    agree = sampled[: len(proposed)] == proposed
    matched = len(proposed) if agree.all() else int(agree.argmin())
    return matched if sampled[matched] == NO_TOKEN else matched + 1

"""One uniform number per draw, from (seed, choice, position, purpose) alone.

A counter-based generator has no state, so that the make-up of a batch, preemption, recovery and another machine leave
every draw as it was. The mixing function is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014; constants: Stafford's variant 13), applied once per word in exact 64-bit
integer arithmetic. Not for secrets.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

DRAW = 0
"""`purpose`: choosing the token at a position."""

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * _MIX1
    words = (words ^ (words >> np.uint64(27))) * _MIX2
    return words ^ (words >> np.uint64(31))


def hash_words(
    seed: NDArray[Any], choice: NDArray[Any], position: NDArray[Any], purpose: int = DRAW
) -> NDArray[np.uint64]:
    """64 pseudo-random bits per entry of the equally long arrays. Integers are taken modulo 2**64."""
    state = _mix(np.atleast_1d(seed).astype(np.uint64) + _GAMMA)
    for word in (choice, position, np.full(1, purpose)):
        state = _mix((state ^ np.atleast_1d(word).astype(np.uint64)) + _GAMMA)
    return state


def uniform(
    seed: NDArray[Any], choice: NDArray[Any], position: NDArray[Any], purpose: int = DRAW
) -> NDArray[np.float64]:
    """Float64 numbers in [0, 1), multiples of 2**-53."""
    return (hash_words(seed, choice, position, purpose) >> np.uint64(11)).astype(np.float64) * 2.0**-53

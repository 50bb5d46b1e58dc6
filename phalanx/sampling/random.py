"""Random numbers of a draw, one per token of the vocabulary, from (seed, choice, position, purpose, token id) alone.

A counter-based generator has no state, so that the make-up of a batch, preemption, recovery, another machine and a
vocabulary cut among ranks leave every number as it was. It has two stages, both in exact integer arithmetic:

`row_keys` hashes what is the same for a whole row to 64 bits. The mixing function is the finaliser of SplitMix64
(Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; constants: Stafford's variant
13), applied once per word.

`token_words` turns a key and a token id into 32 bits: mix(mix(token xor low half) + high half). `mix` is the 32-bit
finaliser "lowbias32" found by Chris Wellons' search for integer hashes (github.com/skeeto/hash-prospector, 2018), cheap
enough to be applied to every token of a vocabulary; for one key it is a bijection, so that a row's words all differ.
`token_words_on` does the same with PyTorch, for other devices.

Not for secrets.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

DRAW = 0
"""`purpose`: choosing the token at a position."""

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_LOW1, _LOW2 = 0x7FEB352D, 0x846CA68B


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * _MIX1
    words = (words ^ (words >> np.uint64(27))) * _MIX2
    return words ^ (words >> np.uint64(31))


def row_keys(
    seed: NDArray[Any], choice: NDArray[Any], position: NDArray[Any], purpose: int = DRAW
) -> NDArray[np.uint64]:
    """64 pseudo-random bits per entry of the equally long arrays. Integers are taken modulo 2**64."""
    state = _mix(np.atleast_1d(seed).astype(np.uint64) + _GAMMA)
    for word in (choice, position, np.full(1, purpose)):
        state = _mix((state ^ np.atleast_1d(word).astype(np.uint64)) + _GAMMA)
    return state


def _mix_low(words: NDArray[np.uint32]) -> None:
    """In place."""
    shifted = words >> np.uint32(16)
    words ^= shifted
    words *= np.uint32(_LOW1)
    np.right_shift(words, np.uint32(15), out=shifted)
    words ^= shifted
    words *= np.uint32(_LOW2)
    np.right_shift(words, np.uint32(16), out=shifted)
    words ^= shifted


def token_words(keys: NDArray[np.uint64], tokens: NDArray[np.integer]) -> NDArray[np.uint32]:
    """32 pseudo-random bits per token id. The arrays' shapes are broadcast together."""
    words = tokens.astype(np.uint32) ^ keys.astype(np.uint32)
    _mix_low(words)
    words += (keys >> np.uint64(32)).astype(np.uint32)
    _mix_low(words)
    return words


def _mix_low_on(words: torch.Tensor) -> torch.Tensor:
    """Of int32, whose products wrap as those of unsigned numbers do; its shifts bring in the sign, which is cut off."""
    words = (words ^ ((words >> 16) & 0xFFFF)) * _LOW1
    words = (words ^ ((words >> 15) & 0x1FFFF)) * (_LOW2 - 2**32)
    return words ^ ((words >> 16) & 0xFFFF)


def token_words_on(keys: NDArray[np.uint64], tokens: torch.Tensor) -> torch.Tensor:
    """`token_words` of every key [R] and token id, int32 [N], on the device of `tokens`: int32 [R, N] of those bits."""
    halves = np.stack((keys.astype(np.uint32), (keys >> np.uint64(32)).astype(np.uint32)), 1).view(np.int32)
    low, high = torch.from_numpy(halves).to(tokens.device)[:, :, None].unbind(1)
    return _mix_low_on(_mix_low_on(tokens ^ low) + high)


def exponentials(keys: NDArray[np.uint64], tokens: NDArray[np.integer]) -> NDArray[np.float64]:
    """Exponentially distributed numbers of mean 1: -log1p(-u), u = (word + 0.5) / 2**32. Above 2**-34 and below 23."""
    numbers: NDArray[np.float64] = -np.log1p((token_words(keys, tokens) + 0.5) * -(2.0**-32))
    return numbers

"""The one order of candidates that sampling and logprobs share: falling logit, ties by token id.

`torch.topk` leaves the order of equal values open, and logits computed in bfloat16 have many equal values. So each
logit is packed with its token id into one 64-bit integer; these are all different and sort as wanted, on any device.
On a CPU a kernel selects and sorts, or NumPy, row by row in the cache and several times faster than PyTorch.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.kernels import sampling as kernels

_LOW = 0x7FFFFFFF


def first_candidates(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Token ids int64 [R, k] of the first `k` candidates in order. `logits` float32 [R, V] without NaN, k up to V."""
    if kernels.serves(logits):
        return kernels.first_candidates(logits, k)
    if logits.device.type == "cpu":
        return torch.from_numpy(_by_numpy(logits.numpy(), k))
    return _by_torch(logits, k)


def _by_torch(logits: torch.Tensor, k: int) -> torch.Tensor:
    bits = (logits + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0, so that the two zeros are equal
    bits = bits ^ ((bits >> 31) & _LOW)  # two's complement order = order of the floats
    ids = torch.arange(logits.shape[-1], device=logits.device)
    keys = (bits.to(torch.int64) << 32) | (_LOW - ids)
    best = keys.topk(k, dim=-1, sorted=True).values
    return _LOW - (best & _LOW)


def _by_numpy(logits: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """The same; keys are inverted, so that rising order is wanted and the k smallest come first."""
    rows, vocab = logits.shape
    ids = np.arange(vocab, dtype=np.int64)
    best = np.empty((rows, k), np.int64)
    for row in range(rows):
        bits = (logits[row] + np.float32(0)).view(np.int32)
        bits ^= (bits >> 31) & np.int32(_LOW)
        keys = np.bitwise_not(bits).astype(np.int64)
        keys <<= 32
        keys |= ids
        if k < vocab:
            keys.partition(k - 1)
        best[row] = np.sort(keys[:k])
    return best & _LOW

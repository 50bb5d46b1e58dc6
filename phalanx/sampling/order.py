"""The one order of candidates that sampling and logprobs share: falling logit, ties by token id.

`torch.topk` leaves the order of equal values open, and logits computed in bfloat16 have many equal values. So each
logit is packed with its token id into one 64-bit integer; these are all different and sort as wanted, on any device.
"""

from __future__ import annotations

import torch


def sort_keys(logits: torch.Tensor) -> torch.Tensor:
    """int64 [R, V] whose falling order is that of falling logit, then rising token id. `logits` float32, no NaN."""
    bits = (logits + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0, so that the two zeros are equal
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # two's complement order = order of the floats
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return (bits.to(torch.int64) << 32) | (0x7FFFFFFF - ids)


def top(keys: torch.Tensor, k: int) -> torch.Tensor:
    """Token ids int64 [R, k] of the first `k` candidates in order. `keys` come from `sort_keys`."""
    best = keys.topk(k, dim=-1, sorted=True).values
    return 0x7FFFFFFF - (best & 0x7FFFFFFF)

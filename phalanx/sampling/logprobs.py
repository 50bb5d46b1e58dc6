"""Log-probabilities of chosen tokens, their ranks, and the most likely alternatives.

They are the log-softmax of the model's own logits: before temperature, penalties, biases, masks and truncation (as
vLLM's `raw_logprobs`, its default). A token's rank counts in the order of `phalanx.sampling.order`: 1 is the most
likely, equal logits rank by token id, so the greedy choice always has rank 1.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.sampling.order import sort_keys, top
from phalanx.step import TokenLogprobs


def token_logprobs(
    logits: torch.Tensor, tokens: NDArray[np.integer], num_top: NDArray[np.integer]
) -> list[TokenLogprobs]:
    """`logits` float32 [R, V] without NaN, `tokens` [R] the token at each row, `num_top` [R] alternatives wanted.
    Each row's numbers depend on that row alone."""
    vocab = logits.shape[-1]
    chosen = torch.from_numpy(tokens.astype(np.int64)).to(logits.device)[:, None]
    logprobs = logits.log_softmax(-1)
    own = logits.gather(-1, chosen)
    ids = torch.arange(vocab, device=logits.device)
    rank = (logits > own).sum(-1) + ((logits == own) & (ids < chosen)).sum(-1) + 1
    most = min(int(num_top.max(initial=0)), vocab)
    best = top(sort_keys(logits), most) if most > 0 else chosen[:, :0]
    best_logprobs = logprobs.gather(-1, best).cpu().numpy().astype("<f4")
    best_ids = best.cpu().numpy().astype("<i4")
    own_logprobs = logprobs.gather(-1, chosen)[:, 0].tolist()
    return [
        TokenLogprobs(own_logprobs[i], r, best_ids[i, :n].tobytes(), best_logprobs[i, :n].tobytes())
        for i, (r, n) in enumerate(zip(rank.tolist(), num_top.clip(0, most).tolist(), strict=True))
    ]

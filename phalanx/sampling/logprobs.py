"""Log-probabilities of chosen tokens, their ranks, and the most likely alternatives.

They are the log-softmax of the model's own logits: before temperature, penalties, biases, masks and truncation (as
vLLM's `raw_logprobs`, its default). A token's rank counts in the order of `phalanx.sampling.order`: 1 is the most
likely, equal logits rank by token id, so the greedy choice always has rank 1.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.kernels import sampling as kernels
from phalanx.sampling.order import first_candidates
from phalanx.step import TokenLogprobs

SPARE = 16
"""Candidates looked at beyond those asked for: the chosen token is mostly one of them, and its rank known."""


def token_logprobs(
    logits: torch.Tensor, tokens: NDArray[np.integer], num_top: NDArray[np.integer]
) -> list[TokenLogprobs]:
    """`logits` float32 [R, V] without NaN, `tokens` [R] the token at each row, `num_top` [R] alternatives wanted.
    Each row's numbers depend on that row alone."""
    vocab = logits.shape[-1]
    most = min(int(num_top.max(initial=0)), vocab)
    if kernels.serves(logits):
        found = kernels.logprobs(logits, tokens, most)
        return _entries(found.own, found.ranks, found.top_ids, found.top, num_top)
    chosen = torch.from_numpy(tokens.astype(np.int64)).to(logits.device)[:, None]
    logprobs = logits.log_softmax(-1)
    best, ranks = _best(logits, most, chosen)
    own = logprobs.gather(-1, chosen)[:, 0].cpu().numpy()
    return _entries(own, ranks, best.cpu().numpy(), logprobs.gather(-1, best).cpu().numpy(), num_top)


def _entries(
    own: NDArray[np.float32],
    ranks: NDArray[np.int64],
    top_ids: NDArray[np.integer],
    top: NDArray[np.float32],
    num_top: NDArray[np.integer],
) -> list[TokenLogprobs]:
    ids, logprobs = top_ids.astype("<i4", copy=False), top.astype("<f4", copy=False)
    return [
        TokenLogprobs(logprob, rank, ids[i, :n].tobytes(), logprobs[i, :n].tobytes())
        for i, (logprob, rank, n) in enumerate(
            zip(own.tolist(), ranks.tolist(), num_top.clip(0, ids.shape[1]).tolist(), strict=True)
        )
    ]


def _best(logits: torch.Tensor, most: int, chosen: torch.Tensor) -> tuple[torch.Tensor, NDArray[np.int64]]:
    """The first `most` token ids [R, most] of each row, and the rank of `chosen` [R, 1]."""
    vocab = logits.shape[-1]
    ids = first_candidates(logits, min(most + SPARE, vocab))
    place = (ids == chosen).cpu().numpy()
    ranks = place.argmax(1)
    far = np.flatnonzero(~place.any(1))
    if len(far):
        at = torch.from_numpy(far).to(logits.device)
        few, token = logits[at], chosen[at]
        own = few.gather(-1, token)
        before = (few > own) | ((few == own) & (torch.arange(vocab, device=few.device) < token))
        ranks[far] = before.sum(-1).cpu().numpy()
    return ids[:, :most], ranks + 1

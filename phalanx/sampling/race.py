"""Who wins a draw: an exponential race, the same as the Gumbel-max trick.

Every token t that may be drawn has the sum logit_t / temperature - log(E_t), with E_t exponentially distributed and its
own (`phalanx.sampling.random`). The largest sum wins, of equal ones the lowest id; token t then wins with its softmax
probability (Gumbel, "Statistical theory of extreme values", 1954; Maddison, Tarlow and Minka, "A* sampling", NeurIPS
2014). Noise in the logits changes the winner only where the two best sums are as near as the noise is large, and the
winner of a cut vocabulary is the best of the parts' winners.

What decides is computed in double precision on the host. A whole vocabulary is
first searched in single precision, for the few tokens that can win at all. Does not know of truncation.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.sampling.random import exponentials, token_words, token_words_on

_SLACK = 1.0001
"""The search is off by less than 1e-5 of what it compares: a token more than 26 · temperature below the best cannot win
(E is above 2**-34 and below 23), and for those that can, single precision is that exact."""

_CERTAIN = 2.0**32
"""The search compares multiples of 2**-32."""


def single(temperature: NDArray[np.float64]) -> NDArray[np.float32]:
    """In single precision, and finite: minus infinity divided by it has to stay what it is."""
    return temperature.clip(max=np.finfo(np.float32).max).astype(np.float32)


def winners(
    logits: NDArray[np.float32],
    ids: NDArray[np.integer],
    counts: NDArray[np.int64],
    temperature: NDArray[np.float64],
    keys: NDArray[np.uint64],
) -> NDArray[np.int64]:
    """Token [R] that wins among the first `counts[r]` (1 at least) of the candidates `ids` [R, K] with these logits.
    A logit of minus infinity does not win against a number."""
    most = int(counts.max(initial=0))
    logits, ids = logits[:, :most], ids[:, :most].astype(np.int64)
    best = logits.max(1, initial=-np.inf).astype(np.float64)
    best[np.isneginf(best)] = 0
    # Relative to the largest, so that huge logits do not round the random part away.
    sums = (logits - best[:, None]) / temperature[:, None] - np.log(exponentials(keys[:, None], ids))
    sums[np.arange(most) >= counts[:, None]] = -np.inf
    never = np.iinfo(np.int64).max
    first = np.where(sums == sums.max(1, keepdims=True, initial=-np.inf), ids, never)
    lowest: NDArray[np.int64] = first.min(1, initial=never)
    return lowest


def race(
    logits: torch.Tensor, temperature: NDArray[np.float64], keys: NDArray[np.uint64], first: int = 0
) -> NDArray[np.int64]:
    """Token [R] that wins among all of `logits` float32 [R, V]; column 0 is token `first`. -1 for a row whose largest
    logit is not a finite number."""
    search = _contenders if logits.device.type == "cpu" else contenders_on
    best = logits.amax(-1).cpu().numpy()
    rows, tokens, values = search(logits, best, temperature, keys, first)
    sums = (values - best[rows].astype(np.float64)) / temperature[rows] - np.log(exponentials(keys[rows], tokens))
    order = np.lexsort((tokens, -sums, rows))
    found, at = np.unique(rows[order], return_index=True)
    won = np.full(len(logits), -1, np.int64)
    won[found] = tokens[order[at]]
    return won


_Contenders = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]
"""Rows, tokens and logits of those that can win."""


def _bound(word: float, distance: float) -> float:
    """What the sum of a token with this word and distance, (best logit - logit) / temperature, says of the winner's
    (word + 0.5) · exp(distance): it is not larger, because E is not below u."""
    return -math.log1p((word + 0.5) / -_CERTAIN) * math.exp(distance) * _CERTAIN * _SLACK


def _contenders(
    logits: torch.Tensor,
    best: NDArray[np.float32],
    temperature: NDArray[np.float64],
    keys: NDArray[np.uint64],
    first: int,
) -> _Contenders:
    """With NumPy, row by row in the cache."""
    values = logits.numpy()
    tokens = np.arange(first, first + values.shape[1], dtype=np.uint32)
    rows, columns = [], []
    scales = single(temperature)
    for row in np.flatnonzero(np.isfinite(best)).tolist():
        own, scale = values[row], scales[row]
        words = token_words(keys[row], tokens)
        with np.errstate(over="ignore"):
            times = best[row] - own
            times /= scale
            np.exp(times, out=times)
            times *= words.astype(np.float32) + np.float32(0.5)
        lead = int(times.argmin())
        bound = _bound(float(words[lead]), (float(best[row]) - float(own[lead])) / float(scale))
        near = np.flatnonzero(times <= bound)
        columns.append(near)
        rows.append(np.full(len(near), row))
    if not rows:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32)
    at, column = np.concatenate(rows), np.concatenate(columns)
    return at, column + first, values[at, column]


def contenders_on(
    logits: torch.Tensor,
    best: NDArray[np.float32],
    temperature: NDArray[np.float64],
    keys: NDArray[np.uint64],
    first: int,
) -> _Contenders:
    """With PyTorch, on any device."""
    device = logits.device
    tokens = torch.arange(first, first + logits.shape[1], dtype=torch.int32, device=device)
    words = token_words_on(keys, tokens).to(torch.int64) & 0xFFFFFFFF
    scale = torch.from_numpy(single(temperature)).to(device)[:, None]
    largest = torch.from_numpy(best).to(device)[:, None]
    distance = (largest - logits).div_(scale)
    times = distance.exp().mul_(words.to(torch.float32).add_(0.5))
    lead = times.argmin(-1, keepdim=True)
    # In double precision, as `_bound` is; a row that is not finite has no contenders.
    word, gap = (part.gather(-1, lead).to(torch.float64) for part in (words, distance))
    bound = torch.log1p((word + 0.5) / -_CERTAIN) * gap.exp() * (-_CERTAIN * _SLACK)
    near = (times <= bound) & largest.isfinite()
    rows, columns = near.nonzero().unbind(1)
    found = logits[rows, columns].cpu().numpy()
    return rows.cpu().numpy(), columns.cpu().numpy() + first, found

"""Presence, frequency and repetition penalties.

As in vLLM and the OpenAI API: presence and frequency count the tokens produced so far, repetition those of the prompt
too (Keskar et al., "CTRL", 2019: a positive logit is divided by it, a negative one multiplied). Counts are sparse, so a
request costs memory for the distinct tokens it has, not for the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


class TokenCounts:
    """The distinct tokens of one request and how often each was produced. Kept up to date token by token."""

    def __init__(self, prompt: NDArray[np.int32], output: NDArray[np.int32]):
        """`prompt` is empty when only produced tokens matter."""
        ids = np.unique(np.concatenate([prompt, output]))
        self.size = len(ids)
        self._ids = np.zeros(self.size + 64, np.int32)
        self._counts = np.zeros(self.size + 64, np.int32)
        self._ids[: self.size] = ids
        self._index = {token: i for i, token in enumerate(ids.tolist())}
        produced, counts = np.unique(output, return_counts=True)
        self._counts[np.searchsorted(ids, produced)] = counts

    def add(self, token: int) -> None:
        """One more produced token."""
        at = self._index.get(token)
        if at is None:
            at = self._index[token] = self.size
            if at == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[at] = token
            self.size += 1
        self._counts[at] += 1

    def with_more(self, tokens: Sequence[int]) -> CountsAhead:
        """As they would be with these tokens produced too."""
        size, new = self.size, [token for token in dict.fromkeys(tokens) if token not in self._index]
        ids = np.concatenate([self.ids, np.array(new, np.int32)])
        counts = np.concatenate([self.counts, np.zeros(len(new), np.int32)])
        added = {token: size + i for i, token in enumerate(new)}
        for token in tokens:
            counts[added[token] if token in added else self._index[token]] += 1
        return CountsAhead(ids, counts)

    @property
    def ids(self) -> NDArray[np.int32]:
        """int32 [size], each token once."""
        return self._ids[: self.size]

    @property
    def counts(self) -> NDArray[np.int32]:
        """int32 [size], parallel to `ids`; 0 for tokens of the prompt that were not produced."""
        return self._counts[: self.size]


@dataclass(frozen=True, slots=True)
class CountsAhead:
    """`TokenCounts` at a moment that may never come. The arrays are parallel."""

    ids: NDArray[np.int32]
    counts: NDArray[np.int32]

    @property
    def size(self) -> int:
        return len(self.ids)


def apply_penalties(
    logits: torch.Tensor,
    rows: Sequence[int],
    counts: Sequence[TokenCounts | CountsAhead],
    presence: NDArray[np.float64],
    frequency: NDArray[np.float64],
    repetition: NDArray[np.float64],
) -> None:
    """Change `logits` float32 [R, V] in place. The other arguments have one entry per penalised row."""
    sizes = [c.size for c in counts]
    if not sum(sizes):
        return

    def on_device(array: NDArray[np.generic], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(array).to(logits.device, dtype)

    row = on_device(np.repeat(np.asarray(rows, np.int64), sizes), torch.int64)
    ids = on_device(np.concatenate([c.ids for c in counts]), torch.int64)
    produced = on_device(np.concatenate([c.counts for c in counts]), torch.float32)
    rep = on_device(np.repeat(repetition, sizes), torch.float32)
    values = logits[row, ids]
    values = torch.where(values > 0, values / rep, values * rep)
    values -= on_device(np.repeat(frequency, sizes), torch.float32) * produced
    values -= on_device(np.repeat(presence, sizes), torch.float32) * (produced > 0)
    logits[row, ids] = values

"""Which candidates a row may draw: what min-p, top-k and top-p leave of the candidates in order.

Works on the best candidates only, however they were found; says so when it takes more of them to know. Who of those
left wins is `phalanx.sampling.race`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class Truncation:
    """Parameters of the rows that draw, each [R]; 0, 1 and 0 switch top-k, top-p and min-p off."""

    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]

    def __getitem__(self, rows: NDArray[np.int64]) -> Truncation:
        return Truncation(self.top_k[rows], self.top_p[rows], self.min_p[rows])

    def narrows(self, vocab: int) -> NDArray[np.bool_]:
        """[R]: something of a vocabulary of that size may be left out."""
        return ((self.top_k > 0) & (self.top_k < vocab)) | (self.top_p < 1) | (self.min_p > 0)


def kept_counts(
    values: NDArray[np.float64], log_sum: NDArray[np.float64], limits: Truncation, *, whole: bool
) -> NDArray[np.int64]:
    """How many candidates, from the best down, each row may draw [R], at least 1; -1 where it takes more to know.

    `values` [R, K] are the largest scaled logits in falling order, the first of them finite, `log_sum` [R] the log of
    the sum of exp over all of them, `whole` says that K is the vocabulary.
    """
    rows, count = values.shape
    mass = np.cumsum(np.exp(values - log_sum[:, None]), axis=1)
    finite = (values > -np.inf).sum(1)
    complete = (finite < count) | whole  # nothing below what we see can be drawn
    # How many candidates min-p and top-k keep, as far as it is known.
    floor = np.log(limits.min_p, where=limits.min_p > 0, out=np.full(rows, -np.inf))
    kept = np.minimum((values >= values[:, :1] + floor[:, None]).sum(1), finite)
    kept = np.where(limits.top_k > 0, np.minimum(kept, limits.top_k), kept)
    known = complete | (kept < count) | ((limits.top_k > 0) & (limits.top_k <= count))
    unlimited = (limits.top_k == 0) & (limits.min_p == 0) & ~complete
    last = mass[np.arange(rows), kept - 1]
    total = np.where(unlimited, 1.0, last)
    # Top-p keeps a candidate when the mass before it is below p of the total.
    before = np.concatenate([np.zeros((rows, 1)), mass[:, :-1]], axis=1)
    nucleus = np.minimum((before < (limits.top_p * total)[:, None]).sum(1), kept)
    narrowed = limits.top_p < 1
    decided = known | (unlimited & narrowed & (last >= limits.top_p * total))
    return np.where(decided, np.where(narrowed, nucleus, kept), -1)

"""What forbids or favours tokens before a draw: grammar masks, allowed tokens, bad words, minimum length, biases.

The order is vLLM's: grammar mask, allowed ids, bad words, `min_tokens`, `logit_bias`; penalties follow
(`phalanx.sampling.penalties`), then temperature and truncation (`phalanx.sampling.sampler`). A forbidden token has
logit minus infinity, and nothing later brings it back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.sampling.parameters import Constraints

FORBIDDEN = float("-inf")


def apply_masks(logits: torch.Tensor, rows: NDArray[np.int64], masks: NDArray[np.int32], first: int = 0) -> None:
    """Forbid in `logits` [R, V], in place, each token of `rows[i]` whose bit in `masks[i]` (int32 words) is not set.
    Column 0 is token `first`."""
    if not len(rows):
        return
    skipped = first // 32
    words = np.ascontiguousarray(masks[:, skipped : -(-(first + logits.shape[-1]) // 32)])
    bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    start = first - 32 * skipped
    forbidden = torch.from_numpy(bits[:, start : start + logits.shape[-1]] == 0).to(logits.device)
    at = torch.from_numpy(rows).to(logits.device)
    logits[at] = logits[at].masked_fill(forbidden, FORBIDDEN)


def apply_constraints(
    logits: torch.Tensor,
    rows: Sequence[int],
    constraints: Sequence[Constraints],
    outputs: Sequence[NDArray[np.int32]],
    below_minimum: Sequence[bool],
) -> None:
    """Change `logits` float32 [R, V] in place. The other arguments have one entry per constrained row: its index, what
    constrains it, the tokens it has produced, and whether these are fewer than its `min_tokens`. Columns are those
    that the constraints are for."""
    forbid_rows: list[int] = []
    forbid_ids: list[int] = []
    for row, limits, produced, too_short in zip(rows, constraints, outputs, below_minimum, strict=True):
        if limits.allowed is not None:
            ids = torch.from_numpy(limits.allowed).to(logits.device)
            kept = logits[row, ids]
            logits[row] = FORBIDDEN
            logits[row, ids] = kept
        forbidden = [token - limits.first for token in _ends_of_bad_words(limits.bad_words, produced)]
        if too_short:
            forbidden.extend(limits.stop_ids.tolist())
        forbid_rows.extend([row] * len(forbidden))
        forbid_ids.extend(forbidden)
    device = logits.device
    if forbid_ids:
        logits[torch.tensor(forbid_rows, device=device), torch.tensor(forbid_ids, device=device)] = FORBIDDEN
    biased = [(row, limits) for row, limits in zip(rows, constraints, strict=True) if len(limits.bias_ids)]
    if biased:
        at = np.repeat([row for row, _ in biased], [len(limits.bias_ids) for _, limits in biased])
        ids = torch.from_numpy(np.concatenate([limits.bias_ids for _, limits in biased])).to(device)
        values = torch.from_numpy(np.concatenate([limits.bias_values for _, limits in biased])).to(device)
        logits[torch.from_numpy(at).to(device), ids] += values  # ids differ within a row, so none is lost


def _ends_of_bad_words(bad_words: tuple[tuple[int, ...], ...], produced: NDArray[np.int32]) -> list[int]:
    """The last token of each bad word whose other tokens are what was just produced."""
    if not bad_words:
        return []
    longest = max(len(word) for word in bad_words) - 1
    tail = tuple(produced[max(len(produced) - longest, 0) :].tolist())
    return [word[-1] for word in bad_words if len(word) == 1 or tail[-(len(word) - 1) :] == word[:-1]]

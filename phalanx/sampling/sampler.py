"""How a token is chosen.

Order of operations, as in vLLM: logprobs are taken from the model's own logits; then grammar mask, allowed ids, bad
words, `min_tokens`, `logit_bias`, penalties; greedy rows take the largest logit (ties: lowest id); the others divide by
temperature, keep what min-p, top-k and top-p leave, in this order, and draw once.

A draw is an exponential race (`phalanx.sampling.race`) among the tokens left. Rows that leave out nothing race over the
whole vocabulary. Min-p, top-k and top-p all keep a beginning of the order of falling logit, ties by token id, so there
the candidates are looked at from the best down: first a few, and only rows that these do not decide look at more, in
the end at all.

Guarantees: a row's token depends on its own logits, parameters and position only, never on the rest of the batch; a row
without a usable candidate fails alone. Does not know what a request is; history comes with the call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.sampling.constraints import apply_constraints, apply_masks
from phalanx.sampling.logprobs import token_logprobs
from phalanx.sampling.order import first_candidates
from phalanx.sampling.parameters import GREEDY_BELOW, SamplingTable
from phalanx.sampling.penalties import apply_penalties
from phalanx.sampling.race import race, single, winners
from phalanx.sampling.random import row_keys
from phalanx.sampling.truncation import Truncation, kept_counts
from phalanx.step import NO_TOKEN, TokenLogprobs

NO_SCORES = "The model's scores for this request are not finite numbers, so no token can be chosen."
NO_CANDIDATE = "The constraints of this request leave no token to choose."

CANDIDATES = (128, 2048)
"""How many candidates are looked at first, and then, before all are."""

CHUNK_ELEMENTS = 2**22
"""Logits handled at once, so that temporary copies stay small: 16 MiB each in float32."""


@dataclass(slots=True)
class SamplingBatch:
    """The R rows of a step that sample."""

    slots: NDArray[np.int64]
    lengths: NDArray[np.int64]
    """Tokens the request has, prompt included: the position of the token to be drawn."""
    outputs: NDArray[np.int64]
    """Tokens produced so far."""
    produced: Callable[[int], NDArray[np.int32]]
    """The tokens that row i has produced so far. Called for constrained rows only."""
    mask_rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    masks: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    """One row of words per entry of `mask_rows`."""


@dataclass(slots=True)
class Sampled:
    """Parallel to the batch; `tokens` has `NO_TOKEN` where a row failed."""

    tokens: NDArray[np.int32]
    logprobs: dict[int, TokenLogprobs]
    """By row, for rows that asked."""
    failures: dict[int, str]
    """By row: why."""


def sample(logits: torch.Tensor, table: SamplingTable, batch: SamplingBatch) -> Sampled:
    """Choose one token a row. `logits` is float32 [R, V] and is changed in place."""
    rows, vocab = logits.shape
    tokens = np.full(rows, NO_TOKEN, np.int32)
    failures: dict[int, str] = {}
    asked = np.flatnonzero(table.logprobs[batch.slots] >= 0)
    raw = logits[torch.from_numpy(asked).to(logits.device)] if len(asked) else None
    raw_best = logits.amax(-1).cpu().numpy()
    constrain(logits, table, batch)
    greedy = table.temperature[batch.slots] < GREEDY_BELOW
    # torch.max, unlike topk, promises the first of equal values; NaN comes out as the largest.
    best, first = (t.cpu().numpy() for t in logits.max(-1))
    usable = np.isfinite(best) & np.isfinite(raw_best)
    for row in np.flatnonzero(~usable).tolist():
        failures[row] = NO_CANDIDATE if np.isfinite(raw_best[row]) else NO_SCORES
    tokens[greedy & usable] = first[greedy & usable]
    drawn = np.flatnonzero(~greedy & usable)
    step = max(1, CHUNK_ELEMENTS // vocab)
    for at in range(0, len(drawn), step):
        part = drawn[at : at + step]
        few = logits if len(part) == rows else logits[torch.from_numpy(part).to(logits.device)]
        tokens[part] = draw(few, table, batch, part)
    logprobs: dict[int, TokenLogprobs] = {}
    if raw is not None:
        kept = np.flatnonzero(usable[asked])
        chosen = asked[kept]
        for at in range(0, len(kept), step):
            part = chosen[at : at + step]
            few = raw[torch.from_numpy(kept[at : at + step]).to(logits.device)]
            entries = token_logprobs(few, tokens[part], table.logprobs[batch.slots[part]])
            logprobs.update(zip(part.tolist(), entries, strict=True))
    return Sampled(tokens, logprobs, failures)


def constrain(logits: torch.Tensor, table: SamplingTable, batch: SamplingBatch) -> None:
    """Change `logits` in place by all that forbids or favours tokens. They are those of the table's `span`."""
    apply_masks(logits, batch.mask_rows, batch.masks, table.span[0])
    limited = list(table.constraints(batch.slots, batch.outputs))
    if not limited:
        return
    rows = [row for row, _ in limited]
    too_short = batch.outputs[rows] < table.min_tokens[batch.slots[rows]]
    apply_constraints(
        logits, rows, [limits for _, limits in limited], [batch.produced(row) for row in rows], too_short.tolist()
    )
    penalised = [(row, limits.counts) for row, limits in limited if limits.counts is not None]
    slots = batch.slots[[row for row, _ in penalised]] if penalised else batch.slots[:0]
    apply_penalties(
        logits,
        [row for row, _ in penalised],
        [counts for _, counts in penalised],
        table.presence[slots],
        table.frequency[slots],
        table.repetition[slots],
    )


def truncation(table: SamplingTable, batch: SamplingBatch, rows: NDArray[np.int64]) -> Truncation:
    """What the given rows of the batch leave out."""
    slots = batch.slots[rows]
    return Truncation(table.top_k[slots], table.top_p[slots], table.min_p[slots])


def draw_keys(table: SamplingTable, batch: SamplingBatch, rows: NDArray[np.int64]) -> NDArray[np.uint64]:
    """What the given rows of the batch draw with."""
    slots = batch.slots[rows]
    return row_keys(table.seed[slots], table.choice[slots], batch.lengths[rows])


def draw(
    logits: torch.Tensor, table: SamplingTable, batch: SamplingBatch, rows: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Token ids [R] for `logits` [R, V] of the given rows of the batch, each with a finite largest logit."""
    narrows = truncation(table, batch, rows).narrows(logits.shape[-1])
    tokens = np.full(len(rows), NO_TOKEN, np.int64)
    for part, choose in ((np.flatnonzero(~narrows), _draw_from_all), (np.flatnonzero(narrows), _draw_from_best)):
        if len(part):
            few = logits if len(part) == len(rows) else logits[torch.from_numpy(part).to(logits.device)]
            tokens[part] = choose(few, table, batch, rows[part])
    return tokens


def _draw_from_all(
    logits: torch.Tensor, table: SamplingTable, batch: SamplingBatch, rows: NDArray[np.int64]
) -> NDArray[np.int64]:
    return race(logits, table.temperature[batch.slots[rows]], draw_keys(table, batch, rows))


def _draw_from_best(
    logits: torch.Tensor, table: SamplingTable, batch: SamplingBatch, rows: NDArray[np.int64]
) -> NDArray[np.int64]:
    """`draw` for rows that leave tokens out."""
    vocab = logits.shape[-1]
    limits = truncation(table, batch, rows)
    keys = draw_keys(table, batch, rows)
    temperature = table.temperature[batch.slots[rows]]
    scale = torch.from_numpy(single(temperature)).to(logits.device)
    # Relative to the largest, so that a tiny temperature gives minus infinity and not infinity minus infinity.
    scaled = (logits - logits.amax(-1, keepdim=True)).div_(scale[:, None])
    # log_softmax works row by row (a plain sum may be cut up differently for one row than for many); the best
    # candidate's is minus the log of the sum.
    log_sum = (-scaled.log_softmax(-1).amax(-1)).cpu().numpy().astype(np.float64)
    tokens = np.full(len(rows), NO_TOKEN, np.int64)
    waiting = np.arange(len(rows))
    for count in (*(c for c in CANDIDATES if c < vocab), vocab):
        few, few_scaled = logits, scaled
        if len(waiting) < len(rows):
            at = torch.from_numpy(waiting).to(logits.device)
            few, few_scaled = logits[at], scaled[at]
        ids = first_candidates(few, count)
        values = few_scaled.gather(-1, ids).cpu().numpy().astype(np.float64)
        kept = kept_counts(values, log_sum[waiting], limits[waiting], whole=count == vocab)
        known = np.flatnonzero(kept > 0)
        found = waiting[known]
        own = few.gather(-1, ids).cpu().numpy()[known]
        tokens[found] = winners(own, ids.cpu().numpy()[known], kept[known], temperature[found], keys[found])
        waiting = waiting[kept < 0]
        if not len(waiting):
            break
    return tokens

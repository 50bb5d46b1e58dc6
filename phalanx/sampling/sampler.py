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

from phalanx.kernels import sampling as kernels
from phalanx.sampling.constraints import apply_constraints, apply_masks
from phalanx.sampling.logprobs import token_logprobs
from phalanx.sampling.order import first_candidates
from phalanx.sampling.parameters import GREEDY_BELOW, Constraints, SamplingTable
from phalanx.sampling.penalties import CountsAhead, TokenCounts, apply_penalties
from phalanx.sampling.race import race, single, winners
from phalanx.sampling.random import DRAW, row_keys
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
    """The R rows of a step that sample. A request has several where tokens are proposed for it: in each the proposed
    tokens before its position count as its own."""

    slots: NDArray[np.int64]
    lengths: NDArray[np.int64]
    """Tokens the request has, prompt included: the position of the token to be drawn."""
    outputs: NDArray[np.int64]
    """Tokens produced so far."""
    produced: Callable[[int], NDArray[np.int32]]
    """The tokens that row i has produced so far. Called for constrained rows only."""
    ahead: NDArray[np.int64] | None = None
    """How many of them are proposed; None when none are."""
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
    if table.plain[batch.slots].all() and not len(batch.mask_rows) and kernels.serves(logits):
        largest, best = kernels.choose(logits, None)
        if np.isfinite(best).all():
            return Sampled(largest.astype(np.int32), {}, {})
    asked = np.flatnonzero(table.logprobs[batch.slots] >= 0)
    limited = list(table.constraints(batch.slots, batch.outputs))
    raw = raw_best = None
    if limited or len(batch.mask_rows):
        raw = logits[torch.from_numpy(asked).to(logits.device)] if len(asked) else None
        raw_best = logits.amax(-1).cpu().numpy()
        constrain(logits, table, batch, limited)
    chosen, best = choose(logits, table, batch)
    usable = np.isfinite(best)
    if raw_best is not None:
        usable &= np.isfinite(raw_best)
    if usable.all():
        failures, tokens = {}, chosen.astype(np.int32)
    else:
        reasons = best if raw_best is None else raw_best
        failures = {
            row: NO_CANDIDATE if np.isfinite(reasons[row]) else NO_SCORES for row in np.flatnonzero(~usable).tolist()
        }
        tokens = np.where(usable, chosen, NO_TOKEN).astype(np.int32)
    logprobs: dict[int, TokenLogprobs] = {}
    if len(asked):
        kept = np.flatnonzero(usable[asked])
        step = max(1, CHUNK_ELEMENTS // logits.shape[1])
        for at in range(0, len(kept), step):
            part = asked[kept[at : at + step]]
            few = _rows(logits, part) if raw is None else _rows(raw, kept[at : at + step])
            entries = token_logprobs(few, tokens[part], table.logprobs[batch.slots[part]])
            logprobs.update(zip(part.tolist(), entries, strict=True))
    return Sampled(tokens, logprobs, failures)


def _rows(logits: torch.Tensor, rows: NDArray[np.int64]) -> torch.Tensor:
    """Some rows of `logits`, or all of them, as they are: `rows` rises."""
    return logits if len(rows) == len(logits) else logits[torch.from_numpy(rows).to(logits.device)]


def choose(
    logits: torch.Tensor, table: SamplingTable, batch: SamplingBatch
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """A token of each row, and its largest logit, NaN where it has one. Where that is not a finite number, the token
    has no meaning."""
    temperature = table.temperature[batch.slots]
    greedy = temperature < GREEDY_BELOW
    if kernels.serves(logits):
        return kernels.choose(logits, None if greedy.all() else _draws(table, batch, np.where(greedy, 0, temperature)))
    # torch.max, unlike topk, promises the first of equal values; NaN comes out as the largest.
    best, tokens = (t.cpu().numpy() for t in logits.max(-1))
    drawn = np.flatnonzero(~greedy & np.isfinite(best))
    step = max(1, CHUNK_ELEMENTS // logits.shape[1])
    for at in range(0, len(drawn), step):
        part = drawn[at : at + step]
        tokens[part] = draw(_rows(logits, part), table, batch, part)
    return tokens, best


def _draws(table: SamplingTable, batch: SamplingBatch, temperature: NDArray[np.float64]) -> kernels.Draws:
    slots = batch.slots
    return kernels.Draws(
        temperature, table.top_k[slots], table.top_p[slots], table.min_p[slots],
        _keys(table.seed[slots], table.choice[slots], batch.lengths),
    )  # fmt: skip


def constrain(
    logits: torch.Tensor, table: SamplingTable, batch: SamplingBatch, limited: list[tuple[int, Constraints]]
) -> None:
    """Change `logits` in place by all that forbids or favours tokens. They are those of the table's `span`; `limited`
    are the table's constraints of the batch."""
    apply_masks(logits, batch.mask_rows, batch.masks, table.span[0])
    if not limited:
        return
    rows = [row for row, _ in limited]
    too_short = batch.outputs[rows] < table.min_tokens[batch.slots[rows]]
    apply_constraints(
        logits, rows, [limits for _, limits in limited], [batch.produced(row) for row in rows], too_short.tolist()
    )
    penalised = [
        (row, _counts(row, limits.counts, table, batch)) for row, limits in limited if limits.counts is not None
    ]
    slots = batch.slots[[row for row, _ in penalised]] if penalised else batch.slots[:0]
    apply_penalties(
        logits,
        [row for row, _ in penalised],
        [counts for _, counts in penalised],
        table.presence[slots],
        table.frequency[slots],
        table.repetition[slots],
    )


def _counts(row: int, counts: TokenCounts, table: SamplingTable, batch: SamplingBatch) -> TokenCounts | CountsAhead:
    """Of the tokens that the row has produced, `counts` being those of its request."""
    ahead = 0 if batch.ahead is None else int(batch.ahead[row])
    return counts.with_more(table.columns(batch.produced(row)[-ahead:]).tolist()) if ahead else counts


def truncation(table: SamplingTable, batch: SamplingBatch, rows: NDArray[np.int64]) -> Truncation:
    """What the given rows of the batch leave out."""
    slots = batch.slots[rows]
    return Truncation(table.top_k[slots], table.top_p[slots], table.min_p[slots])


def draw_keys(table: SamplingTable, batch: SamplingBatch, rows: NDArray[np.int64]) -> NDArray[np.uint64]:
    """What the given rows of the batch draw with."""
    slots = batch.slots[rows]
    return _keys(table.seed[slots], table.choice[slots], batch.lengths[rows])


def _keys(seed: NDArray[np.uint64], choice: NDArray[np.int64], position: NDArray[np.int64]) -> NDArray[np.uint64]:
    keys = kernels.row_keys(seed, choice, position, DRAW)
    return row_keys(seed, choice, position) if keys is None else keys


def draws_of(table: SamplingTable, batch: SamplingBatch, rows: NDArray[np.int64]) -> kernels.Draws:
    """How the given rows of the batch draw."""
    limits = truncation(table, batch, rows)
    return kernels.Draws(
        table.temperature[batch.slots[rows]], limits.top_k, limits.top_p, limits.min_p, draw_keys(table, batch, rows)
    )


def race_all(
    logits: torch.Tensor, temperature: NDArray[np.float64], keys: NDArray[np.uint64], first: int
) -> NDArray[np.int64]:
    """`race`, by the fastest way."""
    if not kernels.serves(logits):
        return race(logits, temperature, keys, first)
    rows = len(logits)
    whole = kernels.Draws(temperature, np.zeros(rows, np.int64), np.ones(rows), np.zeros(rows), keys)
    return kernels.choose(logits, whole, first)[0]


def draw(
    logits: torch.Tensor, table: SamplingTable, batch: SamplingBatch, rows: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Token ids [R] for `logits` [R, V] of the given rows of the batch, each with a finite largest logit."""
    if kernels.serves(logits):
        return kernels.choose(logits, draws_of(table, batch, rows))[0]
    narrows = truncation(table, batch, rows).narrows(logits.shape[-1])
    tokens = np.full(len(rows), NO_TOKEN, np.int64)
    for part, choose_from in ((np.flatnonzero(~narrows), _draw_from_all), (np.flatnonzero(narrows), _draw_from_best)):
        if len(part):
            tokens[part] = choose_from(_rows(logits, part), table, batch, rows[part])
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

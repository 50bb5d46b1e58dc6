"""Sampling when each rank of a tensor group has the logits of its own tokens only.

Full logits are not gathered. For every row a rank tells the others its largest logit. Of a row that draws from all
tokens it adds the winner among its own (`phalanx.sampling.race`); the best of these is the row's token. Of a row that
leaves tokens out it adds the log of its sum of exp and its best candidates; from these all ranks choose alike, by the
arithmetic of `phalanx.sampling.sampler`. Only rows of this last kind that need more candidates to know (a nucleus that
is wider) are gathered whole, and counted. native/decoding.cpp tells and hears the same of rows of the first two kinds.

What takes time is native where there is the library; ranks with it and without it tell each other the same.

Guarantees: what a rank decides depends on gathered numbers and on the plan alone, so that all ranks decide alike, make
the same exchanges and report the same failures. Tokens are those that one rank with all logits chooses, but for a
nucleus that ends within float32's noise of a candidate (sums of exp are taken in parts here).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.distributed.collectives import Group
from phalanx.distributed.partition import Partition
from phalanx.kernels import sampling as kernels
from phalanx.sampling.logprobs import SPARE
from phalanx.sampling.order import first_candidates
from phalanx.sampling.parameters import GREEDY_BELOW, SamplingTable
from phalanx.sampling.race import single, winners
from phalanx.sampling.sampler import (
    CANDIDATES,
    CHUNK_ELEMENTS,
    NO_CANDIDATE,
    NO_SCORES,
    Sampled,
    SamplingBatch,
    constrain,
    draw,
    draw_keys,
    draws_of,
    race_all,
    truncation,
)
from phalanx.sampling.truncation import Truncation, kept_counts
from phalanx.step import NO_TOKEN, TokenLogprobs

Floats = NDArray[np.float32]


class SplitSampler:
    """One rank's part of choosing tokens. Its `logits` have the columns `vocabulary.ranges[group.rank]`."""

    def __init__(self, group: Group, vocabulary: Partition):
        self.group = group
        self.vocabulary = vocabulary
        self.gathered_rows = 0
        """Rows so far whose full logits were needed."""
        self._first, self._stop = vocabulary.ranges[group.rank]
        self._most = max(vocabulary.lengths)
        self._step = max(1, CHUNK_ELEMENTS // vocabulary.size)
        """Rows handled at once, on all ranks alike."""

    def sample(self, logits: torch.Tensor, table: SamplingTable, batch: SamplingBatch) -> Sampled:
        """As `sampler.sample`: one token a row of `logits` float32 [R, own tokens], which is changed in place."""
        if table.plain[batch.slots].all() and not len(batch.mask_rows) and kernels.serves(logits):
            return self._largest(logits)
        rows = len(logits)
        asked = np.flatnonzero(table.logprobs[batch.slots] >= 0)
        raw = logits[self._index(asked, logits)] if len(asked) else logits
        limited, raw_best = list(table.constraints(batch.slots, batch.outputs)), None
        if limited or len(batch.mask_rows):
            raw_best = logits.amax(-1)
            constrain(logits, table, batch, limited)
        best, first = self._first_best(logits)
        greedy = table.temperature[batch.slots] < GREEDY_BELOW
        narrows = truncation(table, batch, np.arange(rows)).narrows(self.vocabulary.size)
        free, drawn = np.flatnonzero(~greedy & ~narrows), np.flatnonzero(~greedy & narrows)
        count = self._candidates(table.top_k[batch.slots[drawn]])
        message = [_words(best if raw_best is None else raw_best), _words(best), first]
        raced = [
            self._race_message(logits, table, batch, free[at : at + self._step])
            for at in range(0, len(free), self._step)
        ]
        message += [ids for ids, _ in raced] + [values for _, values in raced]
        for at in range(0, len(drawn), self._step):
            message += self._draw_message(logits, best, table, batch, drawn[at : at + self._step], count)
        heard = _Heard(self._exchange(message))
        raw_bests, bests, firsts = heard.floats(rows), heard.floats(rows), heard.ints(rows)
        usable = np.isfinite(bests.max(0)) & np.isfinite(raw_bests.max(0))
        tokens = np.full(rows, NO_TOKEN, np.int32)
        # The first rank of those with the largest logit has the lowest token ids.
        chosen = firsts[bests.argmax(0), np.arange(rows)]
        tokens[greedy & usable] = chosen[greedy & usable]
        if len(free):
            tokens[free] = np.where(usable[free], self._race(heard, table, batch, free), NO_TOKEN)
        for at in range(0, len(drawn), self._step):
            part = drawn[at : at + self._step]
            tokens[part] = self._draw(heard, bests[:, part], usable[part], table, batch, part, count)
        self._draw_from_all(logits, table, batch, np.flatnonzero(usable & (tokens == NO_TOKEN)), tokens)
        reasons = {
            row: NO_CANDIDATE if np.isfinite(raw_bests[:, row].max()) else NO_SCORES
            for row in np.flatnonzero(~usable).tolist()
        }
        logprobs: dict[int, TokenLogprobs] = {}
        kept = np.flatnonzero(usable[asked])
        for at in range(0, len(kept), self._step):
            few = kept[at : at + self._step]
            chosen_rows = asked[few]
            entries = self.token_logprobs(
                raw[self._index(few, raw)], tokens[chosen_rows], table.logprobs[batch.slots[chosen_rows]]
            )
            logprobs |= {row: entry for row, entry in zip(chosen_rows.tolist(), entries, strict=True) if entry}
        return Sampled(tokens, logprobs, reasons)

    def token_logprobs(
        self, logits: torch.Tensor, tokens: NDArray[np.integer], num_top: NDArray[np.integer]
    ) -> list[TokenLogprobs | None]:
        """As `logprobs.token_logprobs`, of `logits` float32 [R, own tokens]; None for a row whose logits are not
        finite numbers. Exchanges a second time only when a token is far from the best ones, for its rank."""
        rows = len(logits)
        wanted = min(int(num_top.max(initial=0)), self.vocabulary.size)
        count = min(wanted + SPARE, self._most)
        best = logits.amax(-1)
        columns = torch.from_numpy(tokens.astype(np.int64)).to(logits.device) - self._first
        outside = (columns < 0) | (columns >= logits.shape[-1])
        own = logits.gather(-1, columns.clamp(0, logits.shape[-1] - 1)[:, None])[:, 0]
        own = own.masked_fill(outside, float("-inf"))
        ids, values = self._best(logits, count)
        heard = _Heard(self._exchange([_words(best), _words(_log_sums(logits, best)), _words(own), ids, values]))
        bests, sums, owns = heard.floats(rows), heard.floats(rows), heard.floats(rows)
        with np.errstate(invalid="ignore"):  # rows that are not finite are left out below
            log_sum = np.logaddexp.reduce(bests.astype(np.float64) + sums, axis=0)
        chosen = owns.max(0)
        top_ids, top = self._merged(heard.ints(rows * count), heard.floats(rows * count), rows)
        places = top_ids == tokens[:, None]
        ranks = places.argmax(1) + 1
        finite = np.isfinite(bests.max(0))
        far = np.flatnonzero(finite & ~places.any(1))
        if len(far):
            ranks[far] = self._ranks(logits, far, tokens[far], chosen[far])
        own_logprobs = np.minimum(chosen - log_sum, 0)
        top_logprobs = np.minimum(top[:, :wanted] - log_sum[:, None], 0).astype("<f4")
        top_ids = top_ids[:, :wanted].astype("<i4")
        return [
            TokenLogprobs(
                float(own_logprobs[i]), int(ranks[i]), top_ids[i, :n].tobytes(), top_logprobs[i, :n].tobytes()
            )
            if finite[i]
            else None
            for i, n in enumerate(num_top.clip(0, wanted).tolist())
        ]

    def _largest(self, logits: torch.Tensor) -> Sampled:
        """`sample` where every row takes the largest of the model's own logits: the same exchange, and little else."""
        rows = len(logits)
        best, first = self._first_best(logits)
        heard = _Heard(self._exchange([_words(best), _words(best), first]))
        heard.floats(rows)  # of the logits before constraints, which are the same
        bests, firsts = heard.floats(rows), heard.ints(rows)
        usable = np.isfinite(bests.max(0))
        chosen = np.where(usable, firsts[bests.argmax(0), np.arange(rows)], np.int32(NO_TOKEN))
        return Sampled(chosen, {}, dict.fromkeys(np.flatnonzero(~usable).tolist(), NO_SCORES))

    def _first_best(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest logit of each row, NaN where there is one, and the first token that has it; of no meaning where
        that is not a finite number."""
        if kernels.serves(logits):
            tokens, largest = kernels.choose(logits, None, self._first)
            return torch.from_numpy(largest), torch.from_numpy(tokens.astype(np.int32))
        # torch.max, unlike topk, promises the first of equal values; NaN comes out as the largest.
        best, columns = logits.max(-1)
        return best, columns.to(torch.int32) + self._first

    # -- drawing

    def _race_message(
        self, logits: torch.Tensor, table: SamplingTable, batch: SamplingBatch, rows: NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and logits of this rank's winners, for rows that draw from all tokens."""
        few = logits if len(rows) == len(logits) else logits[self._index(rows, logits)]
        won = race_all(few, table.temperature[batch.slots[rows]], draw_keys(table, batch, rows), self._first)
        ids = self._index(won, logits)
        columns = (ids - self._first).clamp(0, logits.shape[-1] - 1)
        values = few.gather(-1, columns[:, None])[:, 0].masked_fill(ids < 0, float("-inf"))
        return ids.to(torch.int32), _words(values)

    @staticmethod
    def _race(heard: _Heard, table: SamplingTable, batch: SamplingBatch, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of these rows, the best of the ranks' winners; of no meaning where no rank has one."""
        ids, values = heard.ints(len(rows)).T, heard.floats(len(rows)).T
        counts = np.full(len(rows), ids.shape[1])
        return winners(values, ids, counts, table.temperature[batch.slots[rows]], draw_keys(table, batch, rows))

    def _candidates(self, top_k: NDArray[np.int64]) -> int:
        """How many candidates each rank sends of every row that leaves tokens out."""
        count = min(CANDIDATES[0], self._most)
        return min(count, int(top_k.max())) if len(top_k) and top_k.all() else count

    def _draw_message(
        self, logits: torch.Tensor, best: torch.Tensor, table: SamplingTable, batch: SamplingBatch,
        rows: NDArray[np.int64], count: int,
    ) -> list[torch.Tensor]:  # fmt: skip
        """The log of the sum, ids and logits of the best candidates of these rows."""
        at = self._index(rows, logits)
        few = logits if len(rows) == len(logits) else logits[at]
        temperature = table.temperature[batch.slots[rows]]
        if kernels.serves(few):
            words = kernels.tell_candidates(few, best[at].numpy(), temperature, count, self._first)
            return [torch.from_numpy(words)]
        sums = _log_sums(few, best[at], torch.from_numpy(single(temperature)).to(logits.device))
        return [_words(sums), *self._best(few, count)]

    def _draw(
        self, heard: _Heard, bests: Floats, usable: NDArray[np.bool_], table: SamplingTable, batch: SamplingBatch,
        rows: NDArray[np.int64], count: int,
    ) -> NDArray[np.int32]:  # fmt: skip
        """Tokens of these rows from what all ranks said of them; `NO_TOKEN` where it does not suffice."""
        good, shape = np.flatnonzero(usable), (-1, len(rows), count)
        bests, sums = bests[:, good], heard.floats(len(rows))[:, good]
        ids = heard.ints(len(rows) * count).reshape(shape).take(good, 1)
        values = heard.floats(len(rows) * count).reshape(shape).take(good, 1)
        tokens = np.full(len(rows), NO_TOKEN, np.int32)
        if not len(good):
            return tokens
        draws = draws_of(table, batch, rows[good])
        parts = (bests.astype(np.float64) - bests.max(0)) / single(draws.temperature) + sums
        log_sum = np.logaddexp.reduce(parts, axis=0)
        whole = count == self._most
        chosen = kernels.choose_told(ids, values, log_sum, draws, self.vocabulary.size if whole else count, whole=whole)
        if chosen is None:
            chosen = self._choose_told(ids, values, log_sum, draws)
        tokens[good] = np.where(chosen < 0, NO_TOKEN, chosen)
        return tokens

    def _choose_told(
        self, ids: NDArray[np.int32], values: Floats, log_sum: NDArray[np.float64], draws: kernels.Draws
    ) -> NDArray[np.int64]:
        """As `kernels.choose_told`."""
        ranks, rows, count = ids.shape
        ids, values = self._merged(ids.reshape(ranks, -1), values.reshape(ranks, -1), rows)
        scaled = ((values - values[:, :1]) / single(draws.temperature)[:, None]).astype(np.float64)
        limits = Truncation(draws.top_k, draws.top_p, draws.min_p)
        kept = kept_counts(scaled, log_sum, limits, whole=count == self._most)
        known = np.flatnonzero(kept > 0)
        tokens = np.full(rows, -1, np.int64)
        tokens[known] = winners(values[known], ids[known], kept[known], draws.temperature[known], draws.keys[known])
        return tokens

    def _draw_from_all(
        self, logits: torch.Tensor, table: SamplingTable, batch: SamplingBatch, rows: NDArray[np.int64],
        tokens: NDArray[np.int32],
    ) -> None:  # fmt: skip
        """Fill in `tokens` of the rows that need more candidates than were told."""
        self.gathered_rows += len(rows)
        for at in range(0, len(rows), self._step):
            part = rows[at : at + self._step]
            full = self.group.all_gather(logits[self._index(part, logits)], 1, self.vocabulary.lengths)
            tokens[part] = draw(full, table, batch, part)

    def _ranks(
        self, logits: torch.Tensor, rows: NDArray[np.int64], tokens: NDArray[np.integer], chosen: Floats
    ) -> NDArray[np.int64]:
        """How many tokens of the whole vocabulary come before `tokens`, whose logits are `chosen`, and one."""
        few = logits[self._index(rows, logits)]
        own = torch.from_numpy(chosen).to(logits.device)[:, None]
        token = torch.from_numpy(tokens.astype(np.int64)).to(logits.device)[:, None]
        ids = torch.arange(self._first, self._stop, device=logits.device)
        before = ((few > own) | ((few == own) & (ids < token))).sum(-1)
        counts: NDArray[np.int64] = self.group.all_reduce(before).cpu().numpy()
        return counts + 1

    # -- exchanging

    def _best(self, logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and logits of the first `count` candidates of each row, flat, as words; filled up with nothing where
        this rank has fewer tokens."""
        have = min(count, logits.shape[-1])
        columns = first_candidates(logits, have)
        values = logits.gather(-1, columns)
        ids = (columns + self._first).to(torch.int32)
        if have < count:
            missing = (len(logits), count - have)
            ids = torch.cat((ids, ids.new_full(missing, NO_TOKEN)), 1)
            values = torch.cat((values, values.new_full(missing, float("nan"))), 1)  # sorted behind everything
        return ids.reshape(-1), _words(values.reshape(-1))

    def _merged(self, ids: NDArray[np.int32], values: Floats, rows: int) -> tuple[NDArray[np.int32], Floats]:
        """The first candidates of each row, [rows, n], in the order of `sampling.order`, from [ranks, rows · count].

        Each rank's are in order, and of equal logits those of the lower rank have lower ids: a stable sort keeps that.
        Beyond the first `count` there may be gaps, unless every rank sent all it has.
        """
        ranks, count = len(ids), ids.shape[1] // rows
        all_ids = ids.reshape(ranks, rows, count).swapaxes(0, 1).reshape(rows, -1)
        all_values = values.reshape(ranks, rows, count).swapaxes(0, 1).reshape(rows, -1)
        sure = self.vocabulary.size if count == self._most else count
        order = np.argsort(-all_values, axis=1, kind="stable")[:, :sure]
        return np.take_along_axis(all_ids, order, 1), np.take_along_axis(all_values, order, 1)

    def _exchange(self, message: Sequence[torch.Tensor]) -> NDArray[np.int32]:
        """int32 [ranks, words]: what every rank says."""
        words = torch.cat(list(message))
        size = self.group.size
        return self.group.all_gather(words, 0, [len(words)] * size).cpu().numpy().reshape(size, -1)

    @staticmethod
    def _index(rows: NDArray[np.int64], like: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(rows).to(like.device)


class _Heard:
    """Reads what all ranks said, field after field, each [ranks, numbers]."""

    def __init__(self, words: NDArray[np.int32]):
        self._words, self._at = words, 0

    def ints(self, numbers: int) -> NDArray[np.int32]:
        self._at += numbers
        return self._words[:, self._at - numbers : self._at]

    def floats(self, numbers: int) -> Floats:
        return self.ints(numbers).view(np.float32)


def _words(values: torch.Tensor) -> torch.Tensor:
    """float32 as int32 of the same bits, so that one exchange carries both."""
    return values.view(torch.int32)


def _log_sums(logits: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor | None = None) -> torch.Tensor:
    """Per row the log of the sum of exp((logits - best) / temperature); minus infinity where nothing is allowed.

    Through log_softmax, which works row by row: a plain sum may be cut up differently for one row than for many.
    """
    nothing = best == float("-inf")
    relative = logits - best.masked_fill(nothing, 0.0)[:, None]
    if temperature is not None:
        relative.div_(temperature[:, None])
    return (-relative.log_softmax(-1).amax(-1)).masked_fill_(nothing, float("-inf"))

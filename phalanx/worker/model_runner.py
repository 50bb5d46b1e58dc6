"""How a plan becomes tensors, and a forward pass a result.

`run` reads as the step does: change the table, gather inputs, forward, sample. The output head is computed only for
rows whose tokens are all computed, and for prompt positions whose log-probabilities were asked for. A row that fails is
reported and left out; the others do not notice. Any other exception is the step's, and the worker's, failure.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.attention.base import StepLayout
from phalanx.models.decoder import Decoder
from phalanx.models.decoding import Decoding
from phalanx.sampling.logprobs import token_logprobs
from phalanx.sampling.sampler import NO_CANDIDATE, NO_SCORES, Sampled, SamplingBatch, sample
from phalanx.sampling.split_vocabulary import SplitSampler
from phalanx.step import NO_TOKEN, PromptLogprobs, RowFailure, StepPlan, StepResult, TokenLogprobs, pack
from phalanx.worker.kv_pool import KVPool
from phalanx.worker.request_table import RequestTable, StepInputs, StepRows
from phalanx.worker.stage_link import StageLink
from phalanx.worker.verification import Places, standing

_NO_TOKEN = pack([NO_TOKEN])

_HEAD_ELEMENTS = 2**23
"""Most logits computed at once for prompt log-probabilities: 32 MiB."""


class ModelRunner:
    def __init__(
        self, decoder: Decoder, pool: KVPool, table: RequestTable, device: torch.device, link: StageLink | None = None
    ):
        """`link` joins the stages of a pipeline; a rank that holds all layers needs none."""
        self.decoder = decoder
        self.split = SplitSampler(decoder.groups.tp, decoder.vocabulary) if decoder.groups.tp.size > 1 else None
        """Samples when this rank has the logits of some tokens only."""
        self.link = link
        self.pool = pool
        self.table = table
        self.device = device
        self.worked_s = 0.0
        """Of the last step, without waiting for the stage before."""
        self._waited_s = 0.0
        self._decoding: Decoding | None = None
        self._recorded = False

    def run(self, plan: StepPlan) -> StepResult | None:
        """One step; None in all pipeline stages but the last, which learns what to go on with from the next plan.

        Raises ValueError for a plan that contradicts itself.
        """
        began = time.perf_counter()
        if (decoding := self._decoding_of(plan)) is not None:
            return self._decoded(decoding, plan, began)
        return self._run(plan, began)

    @torch.inference_mode()
    def _run(self, plan: StepPlan, began: float) -> StepResult | None:
        rows = self.table.apply(plan)
        masks = _unpack_masks(plan, self.table.vocab_size)
        failures = {failure.slot: failure for failure in rows.failures}
        sampled, prompt_logprobs = _nothing(), []
        drawn = np.flatnonzero(rows.samples)
        if len(rows.slots):
            hidden, ends = self._forward(self.table.gather(rows))
            self.table.commit(rows)
            if not self.decoder.is_last:
                self.worked_s = time.perf_counter() - began - self._waited_s
                return None
            prompt_logprobs = self._prompt_logprobs(hidden, ends, rows, failures)
            if len(drawn):
                sampled = self._sample(hidden, ends, rows, drawn, masks)
        slots = rows.slots[drawn]
        if rows.proposed is not None:
            sampled, slots = self._verified(sampled, rows, drawn)
        for row, message in sampled.failures.items():
            slot = int(slots[row])
            failures[slot] = RowFailure(slot, message, asked_for=message == NO_CANDIDATE)
        tokens = sampled.tokens
        good = np.ones(len(slots), np.bool_)
        if failures:
            good[:] = [slot not in failures for slot in slots.tolist()]
            tokens = np.where(good, tokens, np.int32(NO_TOKEN))
        self.table.keep_sampled(slots, tokens)
        if rows.proposed is not None:
            self.table.keep_sampled(rows.slots[rows.proposed > 0], np.int32(NO_TOKEN))
        compute_s = time.perf_counter() - began
        self.worked_s = compute_s - self._waited_s
        return StepResult(
            epoch=plan.epoch,
            step_id=plan.step_id,
            slots=slots[good].astype("<u2").tobytes(),
            tokens=tokens[good].astype("<i4").tobytes(),
            logprobs=_by_slot(sampled.logprobs, slots, good),
            prompt_logprobs=[entry for entry in prompt_logprobs if entry.slot not in failures],
            failures=list(failures.values()),
            compute_s=compute_s,
        )

    def _decoding_of(self, plan: StepPlan) -> Decoding | None:
        """What has begun the step, where it computes one token of each row and those proposed, and none asks for more
        than tokens; None, with nothing changed, for other steps."""
        if plan.admissions or plan.released or plan.mask_rows or plan.masks:
            return None
        if not self._recorded:
            self._decoding, self._recorded = self.decoder.decoding(self.pool.caches), True
        if self._decoding is None or not self._decoding.begin(self.table.view, self.table.sampling.view, plan.rows):
            return None
        return self._decoding

    def _decoded(self, decoding: Decoding, plan: StepPlan, began: float) -> StepResult | None:
        if self.link is not None and not self.decoder.is_first:
            decoding.hidden.copy_(self._received(self.link, len(decoding.hidden)))
        slots, tokens = decoding.play()
        if self.link is not None and not self.decoder.is_last:
            self.link.send(decoding.hidden)
            self.worked_s = time.perf_counter() - began - self._waited_s
            return None
        tokens, failures = tokens or self._sampled(decoding.logits, slots), []
        if _NO_TOKEN in tokens:
            which, drawn = np.frombuffer(slots, "<u2"), np.frombuffer(tokens, "<i4")
            failures = [RowFailure(slot, NO_SCORES) for slot in which[drawn == NO_TOKEN].tolist()]
            slots, tokens = (numbers[drawn != NO_TOKEN].tobytes() for numbers in (which, drawn))
        compute_s = time.perf_counter() - began
        self.worked_s = compute_s - self._waited_s
        return StepResult(plan.epoch, plan.step_id, slots, tokens, failures=failures, compute_s=compute_s)

    @torch.inference_mode()
    def _sampled(self, logits: torch.Tensor, packed: bytes) -> bytes:
        """For rows that ask for nothing but tokens, whose `logits` these are."""
        slots = np.frombuffer(packed, "<u2").astype(np.int64)
        tokens = self._choose(logits, self._batch(slots, None)).tokens
        self.table.keep_sampled(slots, tokens)
        return tokens.astype("<i4").tobytes()

    def _received(self, link: StageLink, tokens: int) -> torch.Tensor:
        began = time.perf_counter()
        hidden = link.receive(tokens)
        self._waited_s = time.perf_counter() - began
        return hidden

    def _forward(self, inputs: StepInputs) -> tuple[torch.Tensor, NDArray[np.int64]]:
        """Hidden states [T, hidden], and where each row's tokens end in them."""
        layout = StepLayout(
            query_start=inputs.query_start.tolist(),
            context_lens=inputs.context_lens.tolist(),
            block_tables=self._tensor(inputs.block_tables),
            slot_mapping=self._tensor(inputs.slot_mapping),
            block_size=self.table.block_size,
            prompt_lens=inputs.prompt_lens.tolist(),
        )
        tokens, positions = self._tensor(inputs.token_ids), self._tensor(inputs.positions)
        before = None
        if self.link is not None and not self.decoder.is_first:
            before = self._received(self.link, len(tokens))
        hidden = self.decoder(tokens, positions, self.pool.caches, layout, before)
        if self.link is not None and not self.decoder.is_last:
            self.link.send(hidden)
        return hidden, inputs.query_start[1:]

    def _sample(
        self,
        hidden: torch.Tensor,
        ends: NDArray[np.int64],
        rows: StepRows,
        drawn: NDArray[np.int64],
        masks: tuple[NDArray[np.int64], NDArray[np.int32]],
    ) -> Sampled:
        """Draw for the rows `drawn` (indices into `rows`): one token each, and one more after each proposed token."""
        at, slots, ahead = ends[drawn] - 1, rows.slots[drawn], None
        first = np.arange(len(drawn))
        if rows.proposed is not None:
            proposed = rows.proposed[drawn]
            places = Places.of(proposed)
            ahead, first = places.ahead, places.first
            at, slots = (at - proposed)[places.row] + ahead, slots[places.row]
        if len(at) < len(hidden):
            hidden = hidden[self._tensor(at)]
        batch = self._batch(slots, ahead)
        mask_rows, words = masks
        if len(mask_rows):
            # The plan counts its own rows; some may have failed, and masked rows may not sample in this step.
            next_place = dict(zip(rows.index[drawn].tolist(), first.tolist(), strict=True))
            kept, masked = [], []
            for i, index in enumerate(mask_rows.tolist()):
                if index in next_place:
                    kept.append(i)
                    masked.append(next_place[index])
                    next_place[index] += 1
            batch.mask_rows = np.array(masked, np.int64)
            batch.masks = words[kept]
        logits = self.decoder.logits(hidden) if self.split is None else self.decoder.own_logits(hidden)
        return self._choose(logits, batch)

    def _choose(self, logits: torch.Tensor, batch: SamplingBatch) -> Sampled:
        """`logits` are of the tokens that this rank has."""
        choose = sample if self.split is None else self.split.sample
        return choose(logits, self.table.sampling, batch)

    def _batch(self, slots: NDArray[np.int64], ahead: NDArray[np.int64] | None) -> SamplingBatch:
        """`ahead` is how many proposed tokens are before each place."""
        table, lengths = self.table, self.table.length[slots]
        if ahead is None:
            return SamplingBatch(
                slots, lengths, lengths - table.num_prompt[slots], lambda row: table.produced(int(slots[row]))
            )
        lengths = lengths + ahead
        return SamplingBatch(
            slots, lengths, lengths - table.num_prompt[slots],
            lambda row: table.produced(int(slots[row]), int(ahead[row])), ahead,
        )  # fmt: skip

    def _verified(
        self, sampled: Sampled, rows: StepRows, drawn: NDArray[np.int64]
    ) -> tuple[Sampled, NDArray[np.int64]]:
        """What stands of `sampled`, and the slot of each token; a row without any has its first place, which failed."""
        proposed = rows.proposed[drawn] if rows.proposed is not None else np.zeros(len(drawn), np.int64)
        places = Places.of(proposed)
        counts = np.ones(len(drawn), np.int64)
        for row in np.flatnonzero(proposed).tolist():
            begin, count = int(places.first[row]), int(proposed[row])
            wanted = self.table.proposed(int(rows.slots[drawn[row]]), count)
            counts[row] = max(1, standing(sampled.tokens[begin : begin + count + 1], wanted))
        kept = np.flatnonzero(places.ahead < counts[places.row])
        slots = rows.slots[drawn][places.row[kept]]
        new = {place: i for i, place in enumerate(kept.tolist())}
        return Sampled(
            sampled.tokens[kept],
            {new[place]: entry for place, entry in sampled.logprobs.items() if place in new},
            {new[place]: why for place, why in sampled.failures.items() if place in new},
        ), slots

    def _prompt_logprobs(
        self, hidden: torch.Tensor, ends: NDArray[np.int64], rows: StepRows, failures: dict[int, RowFailure]
    ) -> list[PromptLogprobs]:
        """For rows that asked: of every prompt token whose predecessor was computed in this step."""
        results = []
        piece = max(1, _HEAD_ELEMENTS // self.table.vocab_size)
        for row in np.flatnonzero(self.table.sampling.prompt_logprobs[rows.slots] >= 0).tolist():
            slot, start = int(rows.slots[row]), int(rows.start[row])
            stop = min(start + int(rows.counts[row]), int(self.table.num_prompt[slot]) - 1)
            offset = int(ends[row] - rows.counts[row]) - start
            num_top = int(self.table.sampling.prompt_logprobs[slot])
            entries: list[TokenLogprobs] = []
            for at in range(start, stop, piece):
                to = min(at + piece, stop)
                tokens = self.table.tokens[slot, at + 1 : to + 1]
                found = self._logprobs_of(hidden[at + offset : to + offset], tokens, np.full(to - at, num_top))
                if found is None:
                    failures[slot] = RowFailure(slot, NO_SCORES)
                    break
                entries += found
            if entries:
                results.append(PromptLogprobs(slot, start + 1, entries))
        return results

    def _logprobs_of(
        self, hidden: torch.Tensor, tokens: NDArray[np.int32], num_top: NDArray[np.int64]
    ) -> list[TokenLogprobs] | None:
        """Of the token that follows each of `hidden`; None when a score is not a finite number."""
        if self.split is not None:
            entries = self.split.token_logprobs(self.decoder.own_logits(hidden), tokens, num_top)
            finite = [entry for entry in entries if entry is not None]
            return finite if len(finite) == len(entries) else None
        logits = self.decoder.logits(hidden)
        return token_logprobs(logits, tokens, num_top) if bool(torch.isfinite(logits.amax(-1)).all()) else None

    def _tensor(self, array: NDArray[np.generic]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.to(self.device)


def _by_slot(
    entries: dict[int, TokenLogprobs], slots: NDArray[np.int64], good: NDArray[np.bool_]
) -> dict[int, list[TokenLogprobs]]:
    """`entries` are by index into `slots`, ascending."""
    by_slot: dict[int, list[TokenLogprobs]] = {}
    for row in sorted(entries):
        if good[row]:
            by_slot.setdefault(int(slots[row]), []).append(entries[row])
    return by_slot


def _nothing() -> Sampled:
    return Sampled(np.zeros(0, np.int32), {}, {})


def _unpack_masks(plan: StepPlan, vocab_size: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """(row of the plan, words) of every grammar mask. Raises ValueError when they do not fit together."""
    rows = np.frombuffer(plan.mask_rows, "<u2").astype(np.int64)
    words = np.frombuffer(plan.masks, "<i4")
    width = -(-vocab_size // 32)
    if len(words) != len(rows) * width:
        raise ValueError("the plan's grammar masks do not have one row of words for every masked row.")
    return rows, words.reshape(len(rows), width)

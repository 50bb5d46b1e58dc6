"""What a worker knows of every running request: one permanent row, a *slot*, each.

A row holds the tokens so far, how many of them are computed, the block table and the sampling state. A plan changes the
rows first (`apply`); then the inputs of the step are gathered from them as fresh arrays (`gather`), never aliased, so
nothing a step does can reach back. Admission overwrites or bounds everything a slot had before: no value of an earlier
request, and none of memory that was never written, can be read.

A row that contradicts itself (an unknown slot, too few blocks, a token outside the vocabulary) fails alone; a plan
whose arrays do not fit together is a ValueError. Knows no tensors and does no computing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.kernels import request_rows as kernels
from phalanx.sampling.parameters import SamplingTable
from phalanx.step import NO_TOKEN, ON_DEVICE, Admission, RowFailure, Rows, StepPlan

Ints = NDArray[np.int64]


@dataclass(slots=True)
class StepRows:
    """The R rows that run in this step, in the order of the plan, without those that failed."""

    index: Ints
    """Where each is in the plan's rows."""
    slots: Ints
    start: Ints
    """Tokens computed before this step."""
    counts: Ints
    """Tokens computed in this step, at least 1, and those proposed."""
    samples: NDArray[np.bool_]
    """Every known token is computed after this step."""
    failures: list[RowFailure] = field(default_factory=list)
    proposed: Ints | None = None
    """How many tokens are proposed for each row; None when none are."""

    def kept(self, keep: NDArray[np.bool_], failures: list[RowFailure]) -> StepRows:
        """Those in `keep`, with more `failures`."""
        return StepRows(
            self.index[keep], self.slots[keep], self.start[keep], self.counts[keep], self.samples[keep],
            self.failures + failures,
        )  # fmt: skip


@dataclass(slots=True)
class StepInputs:
    """T tokens, packed row after row."""

    token_ids: Ints
    positions: Ints
    query_start: Ints
    """R + 1 entries: where each row's tokens begin."""
    context_lens: Ints
    prompt_lens: Ints
    block_tables: NDArray[np.int32]
    """[R, most blocks of any row], padded with 0."""
    slot_mapping: Ints
    """Where each token's key and value go: block * block_size + offset."""


class RequestTable:
    """Fixed in slots; the width of its arrays grows with the longest request. Not thread-safe."""

    def __init__(
        self, *, slots: int, max_model_len: int, block_size: int, blocks: int, vocab_size: int,
        own_tokens: tuple[int, int] | None = None,
    ):  # fmt: skip
        """`own_tokens` are those whose logits this rank has; all when None."""
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.blocks = blocks
        self.vocab_size = vocab_size
        self.active = np.zeros(slots, np.bool_)
        self.tokens = np.zeros((slots, min(max_model_len, 256)), np.int32)
        self.length = np.zeros(slots, np.int64)
        self.num_prompt = np.zeros(slots, np.int64)
        self.computed = np.zeros(slots, np.int64)
        self.block_table = np.zeros((slots, 16), np.int32)
        self.num_blocks = np.zeros(slots, np.int64)
        self.sampled = np.full(slots, NO_TOKEN, np.int32)
        """The token sampled last and not yet appended."""
        self.sampling = SamplingTable(slots, vocab_size, own_tokens)
        self._view: kernels.TableView | None = None
        """Of the arrays as they are; None after one may have been replaced by a wider one."""

    # -- what a plan changes

    def apply(self, plan: StepPlan) -> StepRows:
        """Release, admit, append, propose. Raises ValueError when the plan's arrays do not fit together."""
        failures: list[RowFailure] = []
        if plan.released:
            for slot in _unpacked(plan.released, "<u2").tolist():
                self.release(slot)
        for admission in plan.admissions:
            try:
                self.admit(admission)
            except Exception as error:  # whatever one request carries must not end the others
                self.release(admission.slot)
                failures.append(RowFailure(admission.slot, f"The worker refused the request: {error}"))
        rows = plan.rows
        found = self._advance_natively(plan)
        if found is None:
            self._view = None
            found = self._advance(plan, self._accept(rows))
            if rows.proposed_rows:
                found = self._propose(found, rows)
        known = {failure.slot for failure in failures}
        found.failures = failures + [failure for failure in found.failures if failure.slot not in known]
        return found

    def _advance_natively(self, plan: StepPlan) -> StepRows | None:
        """As `_accept`, `_advance` and `_propose`; None, with nothing changed, where they have to do it."""
        if not kernels.serves():
            return None
        if plan.admissions:
            self._view = None
        rows = plan.rows
        done = kernels.advance(self.view, rows)
        if done is None:
            return None
        slots, start, counts, proposed, samples = done
        return StepRows(
            np.arange(len(slots)), slots, start, counts, samples, proposed=proposed if rows.proposed_rows else None
        )

    @property
    def view(self) -> kernels.TableView:
        """For native calls before the next `apply`."""
        if self._view is None:
            self._view = kernels.TableView(
                active=self.active, penalised=self.sampling.penalised, tokens=self.tokens, length=self.length,
                num_prompt=self.num_prompt, computed=self.computed, block_table=self.block_table,
                num_blocks=self.num_blocks, sampled=self.sampled, max_length=self.max_model_len,
                block_size=self.block_size, blocks=self.blocks, vocab_size=self.vocab_size,
            )  # fmt: skip
        return self._view

    def release(self, slot: int) -> None:
        """The slot is free. What its row holds is not cleared: `admit` overwrites or bounds all of it."""
        if 0 <= slot < len(self.active):
            self.active[slot] = False
            self.sampling.forget(slot)

    def admit(self, admission: Admission) -> None:
        """Take a slot. Raises ValueError when the admission contradicts itself."""
        slot = admission.slot
        tokens = _unpacked(admission.tokens, "<i4").astype(np.int32)
        blocks = _unpacked(admission.blocks, "<i4").astype(np.int32)
        length = len(tokens)
        if not 0 <= slot < len(self.active):
            raise ValueError(f"slot {slot} does not exist.")
        if self.active[slot]:
            raise ValueError(f"slot {slot} is taken.")
        if not 0 <= admission.num_computed < length or not 0 < admission.num_prompt <= length:
            raise ValueError("its numbers of tokens contradict each other.")
        if length > self.max_model_len:
            raise ValueError(f"it has {length} tokens; at most {self.max_model_len} are possible.")
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.vocab_size:
            raise ValueError(f"a token id is outside the vocabulary of {self.vocab_size} tokens.")
        self._check_blocks(blocks)
        if admission.num_computed > len(blocks) * self.block_size:
            raise ValueError("it has more computed tokens than its blocks can hold.")
        self.sampling.admit(slot, admission.sampling, tokens, admission.num_prompt)
        self.tokens = _widened(self.tokens, self.active, length, self.max_model_len)
        self.block_table = _widened(self.block_table, self.active, len(blocks), self.blocks)
        self.tokens[slot, :length] = tokens
        self.block_table[slot, : len(blocks)] = blocks
        self.length[slot] = length
        self.num_prompt[slot] = admission.num_prompt
        self.computed[slot] = admission.num_computed
        self.num_blocks[slot] = len(blocks)
        self.sampled[slot] = NO_TOKEN
        self.active[slot] = True

    def _check_blocks(self, blocks: NDArray[np.int32]) -> None:
        if len(blocks) and (int(blocks.min()) < 0 or int(blocks.max()) >= self.blocks):
            raise ValueError(f"a block is outside the cache of {self.blocks} blocks.")

    def _accept(self, rows: Rows) -> set[int]:
        """Append the accepted tokens, which an earlier step computed. Returns the indices of rows that cannot have been
        given any, or that say so themselves; theirs are not appended."""
        slots = _unpacked(rows.slots, "<u2").tolist()
        tokens_of = _by_row(rows.accepted_rows, rows.accepted, len(slots))
        refused = set()
        for row, tokens in tokens_of.items():
            slot, more = slots[row], len(tokens)
            if not self._can_take(slot, tokens):
                refused.add(row)
                continue
            length = int(self.length[slot])
            self._widen(slot, length + more)
            self.tokens[slot, length : length + more] = tokens
            self.length[slot] += more
            self.computed[slot] += more
            self.sampling.append(np.full(more, slot), np.asarray(tokens, np.int32))
        return refused

    def _can_take(self, slot: int, tokens: list[int]) -> bool:
        """Whether these tokens, computed, can follow those that it has, which are all computed."""
        return bool(
            slot < len(self.active)
            and self.active[slot]
            and self.computed[slot] == self.length[slot]
            and self.length[slot] + len(tokens) <= min(self.max_model_len, self.num_blocks[slot] * self.block_size)
            and min(tokens) >= 0
            and max(tokens) < self.vocab_size
        )

    def _propose(self, found: StepRows, rows: Rows) -> StepRows:
        """Write the proposed tokens behind those that the rows have, where the next step overwrites them. A row that
        cannot compute them fails."""
        tokens_of = _by_row(rows.proposed_rows, rows.proposed, len(rows.slots) // 2)
        proposed = np.zeros(len(found.slots), np.int64)
        keep = np.ones(len(found.slots), np.bool_)
        for i, (row, slot, samples) in enumerate(
            zip(found.index.tolist(), found.slots.tolist(), found.samples.tolist(), strict=True)
        ):
            tokens = tokens_of.get(row)
            if tokens is None:
                continue
            length, more = int(self.length[slot]), len(tokens)
            room = min(self.max_model_len, int(self.num_blocks[slot]) * self.block_size) - length
            keep[i] = samples and more <= room and min(tokens) >= 0 and max(tokens) < self.vocab_size
            if keep[i]:
                self._widen(slot, length + more)
                self.tokens[slot, length : length + more] = tokens
                proposed[i] = more
        if not keep.all():
            why = "The worker cannot run the request: it cannot compute the tokens proposed for it."
            found = found.kept(keep, [RowFailure(int(slot), why) for slot in found.slots[~keep]])
            proposed = proposed[keep]
        found.counts = found.counts + proposed
        found.proposed = proposed
        return found

    def _widen(self, slot: int, length: int) -> None:
        if length > self.tokens.shape[1]:
            self.tokens = _widened(self.tokens, self.active, length, self.max_model_len)

    def _advance(self, plan: StepPlan, refused: set[int]) -> StepRows:
        """Append tokens and blocks to the rows that run, and check that they can; `refused` cannot."""
        slots = _unpacked(plan.rows.slots, "<u2").astype(np.int64)
        counts = _unpacked(plan.rows.num_tokens, "<u2").astype(np.int64)
        last = _unpacked(plan.rows.last_tokens, "<i4").astype(np.int64)
        block_rows = _unpacked(plan.rows.block_rows, "<u2").astype(np.int64)
        new_blocks = _unpacked(plan.rows.new_blocks, "<i4")
        total = len(slots)
        if len(counts) != total or len(last) != total or len(block_rows) != len(new_blocks):
            raise ValueError("the plan's arrays differ in length.")
        if len(block_rows) and int(block_rows.max()) >= total:
            raise ValueError("the plan gives a block to a row that it does not have.")
        if len(np.unique(slots)) != total:
            raise ValueError("the plan runs a slot twice.")
        exists = slots < len(self.active)
        consistent = np.ones(total, np.bool_)
        consistent[list(refused)] = False
        known = np.zeros(total, np.bool_)
        known[exists] = self.active[slots[exists]]
        safe = np.where(known, slots, 0)
        append = np.where(last == ON_DEVICE, self.sampled[safe], last)
        appends = (last != NO_TOKEN).astype(np.int64)
        extra = np.bincount(block_rows, minlength=total)
        good_blocks = np.ones(total, np.bool_)
        good_blocks[block_rows[(new_blocks < 0) | (new_blocks >= self.blocks)]] = False
        needed = self.computed[safe] + counts
        checks = (
            (known, "its slot is not known"),
            (consistent, "it cannot have been given the tokens that are said to be accepted"),
            ((appends == 0) | ((append >= 0) & (append < self.vocab_size)), "its last token does not exist"),
            (self.length[safe] + appends <= self.max_model_len, "it is longer than the model allows"),
            (counts >= 1, "it computes nothing"),
            (needed <= self.length[safe] + appends, "it computes more tokens than it has"),
            (good_blocks, "it has a block that does not exist"),
            ((self.num_blocks[safe] + extra) * self.block_size >= needed, "it has too few blocks"),
        )
        good = np.logical_and.reduce([check for check, _ in checks])
        failures = [
            RowFailure(
                int(slots[i]),
                f"The worker cannot run the request: {next(why for check, why in checks if not check[i])}.",
            )
            for i in np.flatnonzero(~good).tolist()
        ]
        self._append_blocks(slots, block_rows[good[block_rows]], new_blocks[good[block_rows]])
        index = np.flatnonzero(good)
        slots, counts = slots[index], counts[index]
        appending = appends[index] == 1
        self._append_tokens(slots[appending], append[index][appending].astype(np.int32))
        start = self.computed[slots]
        return StepRows(index, slots, start, counts, start + counts == self.length[slots], failures)

    def _append_tokens(self, slots: Ints, tokens: NDArray[np.int32]) -> None:
        if not len(slots):
            return
        self.tokens = _widened(self.tokens, self.active, int(self.length[slots].max()) + 1, self.max_model_len)
        self.tokens[slots, self.length[slots]] = tokens
        self.length[slots] += 1
        self.sampled[slots] = NO_TOKEN
        self.sampling.append(slots, tokens)

    def _append_blocks(self, slots: Ints, rows: Ints, blocks: NDArray[np.int32]) -> None:
        """`blocks[i]` goes to the end of the table of `slots[rows[i]]`; a row may get several, in order."""
        if not len(rows):
            return
        order = np.argsort(rows, kind="stable")
        rows, blocks = rows[order], blocks[order]
        first = np.searchsorted(rows, rows)  # where this row's run of blocks begins
        at = self.num_blocks[slots[rows]] + np.arange(len(rows)) - first
        self.block_table = _widened(self.block_table, self.active, int(at.max()) + 1, self.blocks)
        self.block_table[slots[rows], at] = blocks
        np.add.at(self.num_blocks, slots[rows], 1)

    # -- what a step reads

    def gather(self, rows: StepRows) -> StepInputs:
        """The inputs of the step, in arrays of their own."""
        if self._view is not None:
            tokens, positions, query_start, contexts, prompts, blocks, places = kernels.gather(
                self._view, rows.slots, rows.start, rows.counts
            )
            return StepInputs(tokens, positions, query_start, contexts, prompts, blocks, places)
        return self._gather(rows)

    def _gather(self, rows: StepRows) -> StepInputs:
        total = int(rows.counts.sum())
        query_start = np.concatenate([[0], np.cumsum(rows.counts)]).astype(np.int64)
        row_of = np.repeat(np.arange(len(rows.slots)), rows.counts)
        positions = np.arange(total) - query_start[row_of] + rows.start[row_of]
        slots = rows.slots[row_of]
        context_lens = rows.start + rows.counts
        used = -(-context_lens // self.block_size)
        width = int(used.max(initial=1))
        tables = np.where(np.arange(width) < used[:, None], self.block_table[rows.slots, :width], 0)
        blocks = tables[row_of, positions // self.block_size].astype(np.int64)
        return StepInputs(
            token_ids=self.tokens[slots, positions].astype(np.int64),
            positions=positions,
            query_start=query_start,
            context_lens=context_lens,
            prompt_lens=self.num_prompt[rows.slots],
            block_tables=tables.astype(np.int32),
            slot_mapping=blocks * self.block_size + positions % self.block_size,
        )

    def produced(self, slot: int, ahead: int = 0) -> NDArray[np.int32]:
        """The request's output tokens so far, and the first `ahead` of those proposed. A view: read it before the next
        plan."""
        return self.tokens[slot, self.num_prompt[slot] : self.length[slot] + ahead]

    def proposed(self, slot: int, count: int) -> NDArray[np.int32]:
        """The `count` tokens proposed for the request in this step. A view."""
        return self.tokens[slot, self.length[slot] : self.length[slot] + count]

    def commit(self, rows: StepRows) -> None:
        """The rows' tokens are computed now; of those proposed the next plan says which are theirs."""
        own = rows.counts if rows.proposed is None else rows.counts - rows.proposed
        self.computed[rows.slots] = rows.start + own

    def keep_sampled(self, slots: Ints, tokens: NDArray[np.int32] | np.int32) -> None:
        """For `ON_DEVICE`: `NO_TOKEN` where a row failed, or had proposed tokens."""
        self.sampled[slots] = tokens


def _unpacked(data: bytes, dtype: str) -> NDArray[Any]:
    """Raises ValueError when `data` is not a whole number of items."""
    return np.frombuffer(data, dtype)


def _by_row(indices: bytes, tokens: bytes, rows: int) -> dict[int, list[int]]:
    """The tokens of each row that has some, in order. Raises ValueError when the arrays do not fit together."""
    at, values = _unpacked(indices, "<u2").tolist(), _unpacked(tokens, "<i4").tolist()
    if len(at) != len(values) or (at and max(at) >= rows):
        raise ValueError("the plan's accepted or proposed tokens do not have one row each.")
    by_row: dict[int, list[int]] = {}
    for row, token in zip(at, values, strict=True):
        by_row.setdefault(row, []).append(token)
    return by_row


def _widened(array: NDArray[np.int32], active: NDArray[np.bool_], width: int, most: int) -> NDArray[np.int32]:
    """`array` [slots, w] with w ≥ `width`, doubled as needed but not above `most`. Copies active slots only, so that
    the memory of the others is not touched."""
    have = array.shape[1]
    if width <= have:
        return array
    wider = np.zeros((len(array), max(width, min(2 * have, most))), np.int32)
    wider[active, :have] = array[active]
    return wider

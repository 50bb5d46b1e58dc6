"""An executor without a model that believes nothing: it models the KV cache and checks every plan against it.

Each cache position holds a fingerprint of the whole prefix up to it. A step fails with `PlanError` when a row would
attend to a position that holds anything else, write into a block another row uses, use a slot or block wrongly, or
break a limit. The next token is a function of the prefix alone, so that a lost, repeated, swapped or foreign token
shows up in everything after it; `oracle` computes the same answer without any engine.

Does not model sampling beyond masks, `min_tokens` and stop tokens, nor time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from phalanx.config import EngineConfig
from phalanx.engine.client import EngineRequest
from phalanx.engine.request import Grammar
from phalanx.executor.base import CacheLayout, StartProgress, WorkerDied, WorkerStatus
from phalanx.step import (
    NO_TOKEN,
    Admission,
    PromptLogprobs,
    RowFailure,
    SamplingState,
    StepPlan,
    StepResult,
    TokenLogprobs,
    decode_plan,
    encode,
    pack,
    unpack,
)

_MASK64 = 2**64 - 1


class _Poisoned(Exception):
    """A row ended the workers."""


class PlanError(AssertionError):
    """The engine sent a plan that breaks the contract."""


def fingerprint(before: int, token: int) -> int:
    mixed = (before * 6364136223846793005 + (token + 1) * 1442695040888963407) & _MASK64
    return mixed ^ (mixed >> 29)


def fingerprints(tokens: Sequence[int]) -> list[int]:
    """One for each position: of all tokens up to it."""
    result, current = [], 1
    for token in tokens:
        current = fingerprint(current, token)
        result.append(current)
    return result


def next_token(prefix: int, vocab_size: int, forbidden: Container[int], mask: np.ndarray | None) -> int:
    """The token after a prefix with this fingerprint: the first one allowed, from a hashed place on."""
    first = (prefix >> 17) % vocab_size
    for offset in range(vocab_size):
        token = (first + offset) % vocab_size
        if token not in forbidden and (mask is None or int(mask[token // 32]) >> (token % 32) & 1):
            return token
    raise PlanError("a mask forbids every token")


def fake_logprobs(prefix: int) -> TokenLogprobs:
    return TokenLogprobs(-(prefix % 1000) / 100, 1)


def oracle(
    request: EngineRequest, vocab_size: int, max_model_len: int = 10**9, grammar: Grammar | None = None
) -> tuple[list[int], str]:
    """All output tokens and the finish reason that `request` must come to; `grammar` is at its beginning."""
    sampling, num_prompt = request.sampling, len(request.prompt_token_ids)
    stops = frozenset((*request.eos_token_ids, *sampling.stop_token_ids))
    prefix = fingerprints(request.prompt_token_ids)[-1]
    output: list[int] = []
    while True:
        early = len(output) < sampling.min_tokens
        token = next_token(prefix, vocab_size, stops if early else (), mask_of(grammar, vocab_size))
        output.append(token)
        prefix = fingerprint(prefix, token)
        if grammar is not None and token not in request.eos_token_ids:
            check(grammar.accept(token), "a grammar refuses what its mask allows")
        if (token in stops and not early) or (grammar is not None and grammar.terminated):
            return output, "stop"
        if len(output) == sampling.max_tokens or num_prompt + len(output) >= max_model_len:
            return output, "length"


def mask_of(grammar: Grammar | None, vocab_size: int) -> np.ndarray | None:
    if grammar is None:
        return None
    mask = np.zeros(-(-vocab_size // 32), np.int32)
    grammar.fill_mask(mask)
    return mask


@dataclass
class _Row:
    tokens: list[int]
    num_prompt: int
    computed: int
    table: list[int]
    sampling: SamplingState
    prefixes: list[int] = field(default_factory=list)
    proposed: list[int] = field(default_factory=list)
    """In the latest step."""


class FakeExecutor:
    """`lose_submit` and `lose_result` lose the workers at the next submit, or in its step; `fail_row(slot, step_id)`
    says which rows fail; `restart_layouts` holds what the next restarts return, or raise. A step with a row that
    `poisons` names loses them, too."""

    def __init__(
        self,
        layout: CacheLayout,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_in_flight: int = 1,
        max_proposed: int = 0,
    ) -> None:
        self.layout = layout
        self.max_proposed = max_proposed
        self.max_in_flight = max_in_flight
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.fail_row: Callable[[int, int], bool] = lambda slot, step_id: False
        self.failures_asked_for = False
        self.restart_layouts: list[CacheLayout | Exception] = []
        self.lose_submit = False
        self.lose_result = False
        self.poisons: Callable[[list[int]], bool] = lambda tokens: False
        """Of a row's tokens, at the beginning of a step."""
        self.ranks = 1
        self.returned: str | None = None
        self.restarts: list[int] = []
        """Epochs."""
        self.plans: list[StepPlan] = []
        self.plan_bytes: list[int] = []
        self.keep_plans = False
        self.computed_tokens = 0
        self.uncollected: list[_Result] = []
        self.closed = False
        self._begin(0)
        self._last_step = 0

    def _begin(self, epoch: int) -> None:
        self.epoch = epoch
        self.lost = False
        self.rows: dict[int, _Row] = {}
        self.users: Counter[int] = Counter()
        self.cache = [[0] * self.layout.block_size for _ in range(self.layout.blocks)]

    # The contract

    def start(self, config: EngineConfig, progress: StartProgress | None = None) -> CacheLayout:
        return self.layout

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        if self.lose_submit:
            self.lose_submit = False
            raise WorkerDied(0, "lost at submit")
        data = encode(plan)
        if self.keep_plans:
            self.plans.append(plan)
            self.plan_bytes.append(len(data))
        self.uncollected = [future for future in self.uncollected if not future.collected]
        check(len(self.uncollected) < self.max_in_flight, "more plans in flight than allowed")
        future = _Result()
        self.lost |= self.lose_result
        self.lose_result = False
        if not self.lost:
            try:
                future.set_result(self._run(decode_plan(data)))
            except _Poisoned:
                self.lost = True
        if self.lost:
            future.set_exception(WorkerDied(0, "lost in a step", kind="killed", silent=0.01))
        self.uncollected.append(future)
        return future

    def restart(self, epoch: int) -> CacheLayout:
        check(epoch > max([self.epoch, *self.restarts]), "an epoch is used twice")
        self.restarts.append(epoch)
        if self.restart_layouts:
            layout = self.restart_layouts.pop(0)
            if isinstance(layout, Exception):
                raise layout
            self.layout = layout
        self._begin(epoch)
        self.uncollected.clear()
        return self.layout

    @property
    def hang_bound(self) -> float:
        return 0.0

    @property
    def progress(self) -> int:
        return self._last_step

    @property
    def wants_restart(self) -> str | None:
        return self.returned

    def check_health(self) -> list[WorkerStatus]:
        state = "dead" if self.lose_submit else "ready"
        return [WorkerStatus(rank, 1, "", "", state, f"of {self.ranks}", 1, {}) for rank in range(self.ranks)]

    def close(self) -> None:
        self.closed = True

    # One step

    def _run(self, plan: StepPlan) -> StepResult:
        check(plan.epoch == self.epoch, "a plan of another epoch")
        check(plan.step_id > self._last_step, "steps do not count up")
        self._last_step = plan.step_id
        for slot in unpack(plan.released, "H"):
            check(slot in self.rows, "a slot is released that is not in use")
            self.users.subtract(self.rows.pop(slot).table)
        admitted = [self._admit(admission) for admission in plan.admissions]
        rows = plan.rows
        slots, counts, last = unpack(rows.slots, "H"), unpack(rows.num_tokens, "H"), unpack(rows.last_tokens)
        check(len(slots) == len(counts) == len(last) > 0, "the arrays of a plan are not parallel")
        check(len(set(slots)) == len(slots), "a slot runs twice in a step")
        accepted = _by_row(rows.accepted_rows, rows.accepted, len(slots))
        proposed = _by_row(rows.proposed_rows, rows.proposed, len(slots))
        most = max((len(tokens) for tokens in proposed.values()), default=0)
        check(most <= self.max_proposed, "too much is proposed for a row")
        total = sum(counts) + sum(map(len, proposed.values()))
        check(total <= self.max_num_batched_tokens, "the budget of tokens is exceeded")
        check(set(admitted) <= set(slots), "a request is admitted that does not run")
        if any(self.poisons(self.rows[slot].tokens) for slot in slots if slot in self.rows):
            raise _Poisoned
        for index, block in zip(unpack(rows.block_rows, "H"), unpack(rows.new_blocks), strict=True):
            check(index < len(slots) and slots[index] in self.rows, "a block for a row that is not there")
            self._use(self.rows[slots[index]].table, [block])
        self.computed_tokens += total
        masks = self._masks(plan)
        for index, tokens in accepted.items():
            self._accept(slots[index], tokens)
        answers = [
            self._compute(slot, count, token, proposed.get(index, []), masks.get(index, []))
            for index, (slot, count, token) in enumerate(zip(slots, counts, last, strict=True))
        ]
        sampled_rows = sum(1 + len(proposed.get(i, ())) for i, answer in enumerate(answers) if answer.tokens)
        check(sampled_rows <= self.max_num_seqs + self.max_proposed, "more is sampled than there is memory for")
        failures = [
            RowFailure(slot, "this row failed", self.failures_asked_for)
            for slot in slots
            if self.fail_row(slot, plan.step_id)
        ]
        failed = {failure.slot for failure in failures}
        sampled = [(slot, a) for slot, a in zip(slots, answers, strict=True) if a.tokens and slot not in failed]
        return StepResult(
            epoch=plan.epoch,
            step_id=plan.step_id,
            slots=pack((slot for slot, a in sampled for _ in a.tokens), "H"),
            tokens=pack(token for _, a in sampled for token in a.tokens),
            logprobs={slot: a.logprobs for slot, a in sampled if a.logprobs},
            prompt_logprobs=[a.prompt for a in answers if a.prompt is not None and a.prompt.slot not in failed],
            failures=failures,
            compute_s=0.001,
        )

    def _use(self, table: list[int], blocks: Sequence[int]) -> None:
        for block in blocks:
            check(0 <= block < self.layout.blocks, "a block that does not exist")
            check(block not in table, "a block twice in one table")
            table.append(block)
            self.users[block] += 1

    def _admit(self, admission: Admission) -> int:
        slot, tokens = admission.slot, list(unpack(admission.tokens))
        check(0 <= slot < self.max_num_seqs, "a slot that does not exist")
        check(slot not in self.rows, "a slot is admitted twice")
        row = _Row(
            tokens,
            admission.num_prompt,
            admission.num_computed,
            [],
            admission.sampling,
            fingerprints(tokens),
        )
        self._use(row.table, unpack(admission.blocks))
        check(0 < row.num_prompt <= len(tokens), "a prompt of a wrong length")
        check(0 <= row.computed < len(tokens), "a prefix hit that leaves nothing to compute")
        check(row.computed % self.layout.block_size == 0, "a prefix hit that ends inside a block")
        self._check_content(row, row.computed)
        self.rows[slot] = row
        return slot

    def _masks(self, plan: StepPlan) -> dict[int, list[np.ndarray]]:
        words = -(-self.layout.vocab_size // 32)
        indices = unpack(plan.mask_rows, "H")
        check(len(plan.masks) == len(indices) * words * 4, "masks of a wrong size")
        masks: dict[int, list[np.ndarray]] = {}
        for index, mask in zip(indices, np.frombuffer(plan.masks, np.int32).reshape(-1, words), strict=True):
            masks.setdefault(index, []).append(mask)
        return masks

    def _accept(self, slot: int, tokens: list[int]) -> None:
        row = self.rows.get(slot)
        if row is None:
            raise PlanError("a token is accepted for a row that was never admitted")
        check(row.computed == len(row.tokens), "a token is accepted before those in front of it are computed")
        check(tokens == row.proposed[: len(tokens)], "a token is accepted that was not proposed")
        for token in tokens:
            row.tokens.append(token)
            row.prefixes.append(fingerprint(row.prefixes[-1], token))
        row.computed += len(tokens)
        self._check_content(row, row.computed)

    def _compute(self, slot: int, count: int, last: int, proposed: list[int], masks: list[np.ndarray]) -> _Answer:
        row = self.rows.get(slot)
        if row is None:
            raise PlanError("a row runs that was never admitted")
        check(count >= 1, "a row without tokens")
        if last != NO_TOKEN:
            check(0 <= last < self.layout.vocab_size, "a last token outside the vocabulary")
            check(row.computed == len(row.tokens), "a token is appended before those in front of it are computed")
            row.tokens.append(last)
            row.prefixes.append(fingerprint(row.prefixes[-1], last))
        end = row.computed + count
        check(end <= len(row.tokens), "more tokens are computed than there are")
        check(not proposed or end == len(row.tokens), "tokens are proposed for a row that does not sample")
        prefixes = list(row.prefixes)
        for token in proposed:
            check(0 <= token < self.layout.vocab_size, "a proposed token outside the vocabulary")
            prefixes.append(fingerprint(prefixes[-1], token))
        self._write(row, prefixes, end + len(proposed))
        self._check_content(row, end)
        start, row.computed, row.proposed = row.computed, end, proposed
        prompt = None
        if row.sampling.prompt_logprobs >= 0 and start + 1 < row.num_prompt:
            positions = range(start, min(end, row.num_prompt - 1))
            prompt = PromptLogprobs(slot, start + 1, [fake_logprobs(row.prefixes[p + 1]) for p in positions])
        if end < len(row.tokens):
            check(not masks, "a mask for a row that does not sample")
            return _Answer([], [], prompt)
        check(not masks or len(masks) == 1 + len(proposed), "not a mask for each token that is sampled")
        tokens = self._draw(row, proposed, masks)
        if row.sampling.logprobs < 0:
            return _Answer(tokens, [], prompt)
        after = [fingerprint(prefixes[end - 1 + i], token) for i, token in enumerate(tokens)]
        return _Answer(tokens, [fake_logprobs(prefix) for prefix in after], prompt)

    def _write(self, row: _Row, prefixes: list[int], end: int) -> None:
        size = self.layout.block_size
        check(end <= len(row.table) * size, "a position without a block")
        for position in range(row.computed, end):
            block = row.table[position // size]
            check(self.users[block] == 1, "a write into a block that another row uses")
            self.cache[block][position % size] = prefixes[position]

    def _draw(self, row: _Row, proposed: list[int], masks: list[np.ndarray]) -> list[int]:
        """The next token, and those after each proposed one, up to the first that was not proposed."""
        prefix, tokens = row.prefixes[-1], []
        for place, expected in enumerate([*proposed, NO_TOKEN]):
            early = len(row.tokens) + place - row.num_prompt < row.sampling.min_tokens
            forbidden = frozenset(unpack(row.sampling.stop_token_ids)) if early else ()
            tokens.append(next_token(prefix, self.layout.vocab_size, forbidden, masks[place] if masks else None))
            if tokens[-1] != expected:
                break
            prefix = fingerprint(prefix, expected)
        return tokens

    def _check_content(self, row: _Row, end: int) -> None:
        size = self.layout.block_size
        check(end <= len(row.table) * size, "a position without a block")
        for index in range(-(-end // size)):
            wanted = row.prefixes[index * size : min(end, (index + 1) * size)]
            check(self.cache[row.table[index]][: len(wanted)] == wanted, "a position that holds something else")


@dataclass(frozen=True)
class _Answer:
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    prompt: PromptLogprobs | None


class _Result(Future[StepResult]):
    collected = False

    def result(self, timeout: float | None = None) -> StepResult:
        self.collected = True
        return super().result(timeout)


def _by_row(indices: bytes, tokens: bytes, rows: int) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for index, token in zip(unpack(indices, "H"), unpack(tokens), strict=True):
        check(index < rows, "a token for a row that is not there")
        found.setdefault(index, []).append(token)
    return found


def check(holds: bool, fault: str) -> None:
    if not holds:
        raise PlanError(fault)

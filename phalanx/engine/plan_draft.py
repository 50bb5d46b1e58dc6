"""One plan while it is being made: rows go in one by one, a `StepPlan` comes out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.engine.request import Request
from phalanx.step import NO_TOKEN, Admission, Rows, StepPlan, pack

MAX_ROW_TOKENS = 65535
"""Most tokens of one request in one step: `Rows.num_tokens` is uint16."""


@dataclass(frozen=True, slots=True)
class Row:
    request: Request
    slot: int
    count: int
    """Tokens computed."""
    samples: bool
    """Whether all its tokens are computed then, so that the step draws the next one."""


class PlanDraft:
    """Rows of one step under a budget of tokens. `rows` is what the scheduler remembers until the result is back."""

    def __init__(self, epoch: int, step_id: int, budget: int, vocab_size: int) -> None:
        self.epoch = epoch
        self.step_id = step_id
        self.budget = budget
        """Tokens that this step may still take."""
        self.rows: list[Row] = []
        self._mask_words = -(-vocab_size // 32)
        self._admissions: list[Admission] = []
        self._last_tokens: list[int] = []
        self._block_rows: list[int] = []
        self._new_blocks: list[int] = []
        self._mask_rows: list[int] = []
        self._masks: list[bytes] = []

    def add(self, request: Request, count: int, fresh: list[int]) -> None:
        """Compute the next `count` tokens of `request`, which has a slot and blocks for them; `fresh` are those of its
        blocks that workers who know it have not been told of. What its grammar raises leaves the draft unchanged."""
        if request.slot is None:
            raise ValueError("a request without a slot cannot run")
        row = len(self.rows)
        samples = request.num_computed + count == len(request.tokens)
        if samples and request.grammar is not None:
            mask = np.zeros(self._mask_words, dtype=np.int32)
            request.grammar.fill_mask(mask)
            self._mask_rows.append(row)
            self._masks.append(mask.tobytes())
        if not request.num_sent:
            self._admissions.append(request.admission())
            self._last_tokens.append(NO_TOKEN)
        else:
            self._last_tokens.append(request.tokens[-1] if request.num_sent < len(request.tokens) else NO_TOKEN)
            self._block_rows += [row] * len(fresh)
            self._new_blocks += fresh
        self.rows.append(Row(request, request.slot, count, samples))
        self.budget -= count
        request.num_sent = len(request.tokens)
        request.in_flight = count

    def plan(self, released: list[int]) -> StepPlan:
        return StepPlan(
            epoch=self.epoch,
            step_id=self.step_id,
            admissions=self._admissions,
            rows=Rows(
                slots=pack((row.slot for row in self.rows), "H"),
                num_tokens=pack((row.count for row in self.rows), "H"),
                last_tokens=pack(self._last_tokens),
                block_rows=pack(self._block_rows, "H"),
                new_blocks=pack(self._new_blocks),
            ),
            released=pack(released, "H"),
            mask_rows=pack(self._mask_rows, "H"),
            masks=b"".join(self._masks),
        )

"""One plan while it is being made: rows go in one by one, a `StepPlan` comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.engine.request import Grammar, Request
from phalanx.errors import InvalidRequest
from phalanx.step import NO_TOKEN, Admission, Rows, StepPlan, pack

MAX_ROW_TOKENS = 65535
"""Most tokens of one request in one step: `Rows.num_tokens` is uint16."""


@dataclass(slots=True)
class Row:
    request: Request
    slot: int
    count: int
    """Tokens of its own that are computed."""
    samples: bool
    """Whether all its tokens are computed then, so that the step draws the next one."""
    proposed: list[int]


class PlanDraft:
    """Rows of one step under a budget of tokens. `rows` is what the scheduler remembers until the result is back."""

    def __init__(self, epoch: int, step_id: int, budget: int, vocab_size: int) -> None:
        self.epoch = epoch
        self.step_id = step_id
        self.budget = budget
        """Tokens that this step may still take."""
        self.proposals = 0
        """Tokens that may still be proposed."""
        self.rows: list[Row] = []
        self._mask_words = -(-vocab_size // 32)
        self._admissions: list[Admission] = []
        self._last_tokens: list[int] = []
        self._block_rows: list[int] = []
        self._new_blocks: list[int] = []
        self._accepted_rows: list[int] = []
        self._accepted: list[int] = []
        self._proposed_rows: list[int] = []
        self._proposed: list[int] = []
        self._mask_rows: list[int] = []
        self._masks: list[bytes] = []

    def add(self, request: Request, count: int, fresh: list[int], proposed: Sequence[int] = ()) -> None:
        """Compute the next `count` tokens of `request`, and those `proposed` as far as its grammar allows. It has a
        slot and blocks for them; `fresh` are those of its blocks that workers who know it have not been told of. What
        its grammar raises leaves the draft unchanged."""
        if request.slot is None:
            raise ValueError("a request without a slot cannot run")
        row = len(self.rows)
        samples = request.num_to_plan == count
        if samples and request.grammar is not None:
            masks, proposed = self._constrained(request.grammar, request, proposed)
            self._mask_rows += [row] * len(masks)
            self._masks += masks
        if not request.num_sent:
            self._admissions.append(request.admission())
            self._last_tokens.append(NO_TOKEN)
        else:
            new = request.tokens[request.num_sent :]
            self._last_tokens.append(new.pop() if new else NO_TOKEN)
            self._accepted_rows += [row] * len(new)
            self._accepted += new
            self._block_rows += [row] * len(fresh)
            self._new_blocks += fresh
        self._proposed_rows += [row] * len(proposed)
        self._proposed += proposed
        self.rows.append(Row(request, request.slot, count, samples, list(proposed)))
        self.budget -= count + len(proposed)
        self.proposals -= len(proposed)
        request.num_sent = len(request.tokens)
        request.in_flight += count

    def _constrained(
        self, grammar: Grammar, request: Request, proposed: Sequence[int]
    ) -> tuple[list[bytes], Sequence[int]]:
        """A mask for each token that is sampled, and the proposed tokens that the answer may go on with."""
        masks = [self._mask(grammar)]
        if not proposed:
            return masks, proposed
        fork = grammar.fork()
        try:
            for token in proposed:
                if token in request.given.eos_token_ids or not fork.accept(token) or fork.terminated:
                    break
                masks.append(self._mask(fork))
        except InvalidRequest:  # too complex to go on with, should it come to that
            pass
        return masks, proposed[: len(masks) - 1]

    def _mask(self, grammar: Grammar) -> bytes:
        mask = np.zeros(self._mask_words, dtype=np.int32)
        grammar.fill_mask(mask)
        return mask.tobytes()

    def plan(self, released: list[int]) -> StepPlan:
        return StepPlan(
            epoch=self.epoch,
            step_id=self.step_id,
            admissions=self._admissions,
            rows=Rows(
                slots=_packed([row.slot for row in self.rows], "H"),
                num_tokens=_packed([row.count for row in self.rows], "H"),
                last_tokens=_packed(self._last_tokens),
                block_rows=_packed(self._block_rows, "H"),
                new_blocks=_packed(self._new_blocks),
                accepted_rows=_packed(self._accepted_rows, "H"),
                accepted=_packed(self._accepted),
                proposed_rows=_packed(self._proposed_rows, "H"),
                proposed=_packed(self._proposed),
            ),
            released=_packed(released, "H"),
            mask_rows=_packed(self._mask_rows, "H"),
            masks=b"".join(self._masks),
        )


def _packed(values: list[int], code: str = "i") -> bytes:
    return pack(values, code) if values else b""  # most are empty in most steps

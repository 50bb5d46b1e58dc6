"""What the worker keeps of every request in order to draw its tokens: one row a slot.

Numbers that every draw needs are columns, so that those of a batch are gathered at once. What few requests have
(biases, bad words, penalties, …) is a `Constraints` record of the slot. `admit` replaces all of a slot's row, so
nothing of the request that had it before can be seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from phalanx.kernels.decoding import SamplingView
from phalanx.sampling.penalties import TokenCounts
from phalanx.step import SamplingState

_Tokens = TypeVar("_Tokens", np.int32, np.int64)

GREEDY_BELOW = 1e-5
"""Temperatures below this choose the most likely token, as in vLLM."""


@dataclass(slots=True)
class Constraints:
    """What changes the logits of one request. Ids are columns of the table's span, but for bad words."""

    first: int
    """The token of column 0."""
    allowed: NDArray[np.int64] | None
    bias_ids: NDArray[np.int64]
    bias_values: NDArray[np.float32]
    bad_words: tuple[tuple[int, ...], ...]
    """Of tokens; those whose last one has a column."""
    stop_ids: NDArray[np.int64]
    counts: TokenCounts | None
    """None without penalties."""


def _token_ids(values: NDArray[np.int64], vocab_size: int, what: str) -> NDArray[np.int64]:
    if len(values) and (int(values.min()) < 0 or int(values.max()) >= vocab_size):
        raise ValueError(f"{what} has a token id outside the vocabulary of {vocab_size} tokens.")
    return values


class SamplingTable:
    """Sampling state by slot. Not thread-safe.

    `span` are the tokens whose logits this rank has, all by default: constraints are kept for these alone.
    """

    def __init__(self, slots: int, vocab_size: int, span: tuple[int, int] | None = None):
        self.vocab_size = vocab_size
        self.span = span or (0, vocab_size)
        self.temperature = np.zeros(slots, np.float64)
        self.top_k = np.zeros(slots, np.int64)
        self.top_p = np.zeros(slots, np.float64)
        self.min_p = np.zeros(slots, np.float64)
        self.presence = np.zeros(slots, np.float64)
        self.frequency = np.zeros(slots, np.float64)
        self.repetition = np.zeros(slots, np.float64)
        self.seed = np.zeros(slots, np.uint64)
        self.choice = np.zeros(slots, np.int64)
        self.min_tokens = np.zeros(slots, np.int64)
        self.logprobs = np.zeros(slots, np.int64)
        self.prompt_logprobs = np.zeros(slots, np.int64)
        self.constrained = np.zeros(slots, np.bool_)
        """The slot has constraints other than `min_tokens`."""
        self.penalised = np.zeros(slots, np.bool_)
        self.plain = np.zeros(slots, np.bool_)
        """The slot takes the largest of the model's own logits, and nothing else is asked of it."""
        self.simple = np.zeros(slots, np.bool_)
        """The slot takes the largest of the model's own logits, or draws from them, and nothing else is asked of it."""
        self._constraints: list[Constraints | None] = [None] * slots

    def admit(self, slot: int, state: SamplingState, tokens: NDArray[np.int32], num_prompt: int) -> None:
        """Replace the slot's row. Raises ValueError when a value makes no sense, leaving the slot unchanged."""
        vocab = self.vocab_size
        _check_numbers(state)
        bias_ids = np.fromiter(state.logit_bias.keys(), np.int64, len(state.logit_bias))
        bias_values = np.fromiter(state.logit_bias.values(), np.float32, len(state.logit_bias))
        if not np.isfinite(bias_values).all():
            raise ValueError("logit_bias must hold finite numbers.")
        allowed = np.frombuffer(state.allowed_token_ids, "<i4").astype(np.int64)
        stop_ids = np.frombuffer(state.stop_token_ids, "<i4").astype(np.int64)
        bad_words = tuple(word for word in state.bad_words if word)
        for word in bad_words:
            _token_ids(np.asarray(word, np.int64), vocab, "bad_words")
        penalised = bool(state.presence_penalty or state.frequency_penalty or state.repetition_penalty != 1.0)
        _token_ids(bias_ids, vocab, "logit_bias")
        here = self._has(bias_ids)
        counts = None
        if penalised:
            counted_prompt = tokens[:num_prompt] if state.repetition_penalty != 1.0 else tokens[:0]
            counts = TokenCounts(self.columns(counted_prompt), self.columns(tokens[num_prompt:]))
        constraints = Constraints(
            first=self.span[0],
            allowed=self.columns(np.unique(_token_ids(allowed, vocab, "allowed_token_ids"))) if len(allowed) else None,
            bias_ids=self.columns(bias_ids),
            bias_values=bias_values[here],
            bad_words=tuple(word for word in bad_words if self.span[0] <= word[-1] < self.span[1]),
            stop_ids=self.columns(_token_ids(stop_ids, vocab, "stop_token_ids")),
            counts=counts,
        )
        self._constraints[slot] = constraints
        self.temperature[slot] = state.temperature
        self.top_k[slot] = max(state.top_k, 0)
        self.top_p[slot] = state.top_p
        self.min_p[slot] = state.min_p
        self.presence[slot] = state.presence_penalty
        self.frequency[slot] = state.frequency_penalty
        self.repetition[slot] = state.repetition_penalty
        self.seed[slot] = np.uint64(state.seed & 0xFFFFFFFFFFFFFFFF)
        self.choice[slot] = state.choice
        self.min_tokens[slot] = state.min_tokens if len(stop_ids) else 0
        self.logprobs[slot] = state.logprobs
        self.prompt_logprobs[slot] = state.prompt_logprobs
        self.constrained[slot] = penalised or bool(allowed.size or bias_ids.size or bad_words)
        self.penalised[slot] = penalised
        unasked = not self.min_tokens[slot] and state.logprobs < 0 and state.prompt_logprobs < 0
        self.simple[slot] = unasked and not self.constrained[slot]
        self.plain[slot] = self.simple[slot] and state.temperature < GREEDY_BELOW

    @cached_property
    def view(self) -> SamplingView:
        return SamplingView(
            simple=self.simple, temperature=self.temperature, top_p=self.top_p, min_p=self.min_p, top_k=self.top_k,
            choice=self.choice, seed=self.seed,
        )  # fmt: skip

    def _has(self, tokens: NDArray[_Tokens]) -> NDArray[np.bool_]:
        return (tokens >= self.span[0]) & (tokens < self.span[1])

    def columns(self, tokens: NDArray[_Tokens]) -> NDArray[_Tokens]:
        """Those of `tokens` that have a column here, as columns."""
        if self.span == (0, self.vocab_size):
            return tokens
        return tokens[self._has(tokens)] - tokens.dtype.type(self.span[0])

    def forget(self, slot: int) -> None:
        """The slot is free: drop what it holds memory for."""
        self._constraints[slot] = None
        self.constrained[slot] = self.penalised[slot] = False

    def append(self, slots: NDArray[np.int64], tokens: NDArray[np.int32]) -> None:
        """Each of `slots` produced the token beside it."""
        for i in np.flatnonzero(self.penalised[slots]).tolist():
            constraints = self._constraints[slots[i]]
            column = int(tokens[i]) - self.span[0]
            here = 0 <= column < self.span[1] - self.span[0]
            if here and constraints is not None and constraints.counts is not None:
                constraints.counts.add(column)

    def constraints(self, slots: NDArray[np.int64], outputs: NDArray[np.int64]) -> Iterator[tuple[int, Constraints]]:
        """(row, constraints) of the rows that have any in force; `outputs` [R] counts tokens produced so far."""
        in_force = self.constrained[slots] | (outputs < self.min_tokens[slots])
        for row in np.flatnonzero(in_force).tolist():
            constraints = self._constraints[slots[row]]
            if constraints is not None:
                yield row, constraints


def _check_numbers(state: SamplingState) -> None:
    """Raises ValueError. `not low <= x` is true for NaN as well."""
    checks = {
        "temperature": 0 <= state.temperature < float("inf"),
        "top_p": 0 < state.top_p <= 1,
        "min_p": 0 <= state.min_p <= 1,
        "presence_penalty": abs(state.presence_penalty) < float("inf"),
        "frequency_penalty": abs(state.frequency_penalty) < float("inf"),
        "repetition_penalty": 0 < state.repetition_penalty < float("inf"),
    }
    for name, good in checks.items():
        if not good:
            raise ValueError(f"{name} has a value that cannot be used.")

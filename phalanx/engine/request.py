"""What a request is inside the engine: everything needed to start it, and to start it again.

A request is in one place at a time:

    compiling -> waiting <-> running -> finished
                    \\_________________/

Only `given`, `tokens` and the grammar's state matter for starting again; slot, blocks and `num_computed` say where it
lives now and are forgotten when it stops running.

Covers one request's state and the rules that need nothing else (when it is finished, what its workers must know).
Does not know the queue, the pool or other requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from phalanx.engine.client import EngineOutput, EngineRequest, RequestError
from phalanx.engine.speculation import Proposer
from phalanx.errors import ContextLengthExceeded, InvalidRequest
from phalanx.step import Admission, PromptLogprobs, SamplingState, TokenLogprobs, pack


class Grammar(Protocol):
    """The part of `structured.grammar.Grammar` that the engine uses."""

    @property
    def terminated(self) -> bool:
        """The text is complete: nothing but end-of-text may follow."""
        ...

    def accept(self, token_id: int) -> bool:
        """Go on by one token. False when the grammar does not allow it."""
        ...

    def fill_mask(self, out: NDArray[np.int32]) -> None:
        """Set bit t of `out`, int32 [ceil(vocab / 32)], for every token t allowed next, and clear the others."""
        ...

    def fork(self) -> Grammar:
        """Another one at the same place; what happens to it changes nothing here."""
        ...


@dataclass(slots=True, eq=False)
class Request:
    given: EngineRequest
    arrival: int
    """Position in the order of arrival; unique."""
    queued_s: float
    """Engine clock."""
    max_total: int
    """Most tokens, prompt and output, it can come to."""
    tokens: list[int]
    """Prompt and output."""
    resumed: bool
    """It has run before, here or elsewhere."""
    grammar: Grammar | None = None
    proposer: Proposer | None = None
    """Proposes tokens for it, where that is wanted."""
    finished: bool = False

    slot: int | None = None
    """Its row in the workers while it runs."""
    blocks: list[int] = field(default_factory=list)
    num_found: int = 0
    """How many of `blocks`, at its beginning, were in the prefix cache; the others it computes itself."""
    num_computed: int = 0
    """Tokens whose keys and values are in `blocks`."""
    num_sent: int = 0
    """Tokens that the workers know; 0 before its admission is sent."""
    in_flight: int = 0
    """Tokens being computed by plans whose results are not back, those proposed not counted."""

    hashes: list[bytes] = field(default_factory=list)
    """Of its full blocks, as far as they were needed; they depend on its tokens alone."""
    awaits: bytes | None = None
    """The hash of a block that another request computes and this one waits for."""
    num_cached: int | None = None
    """Prompt tokens found in the prefix cache when it was first admitted."""
    scheduled_s: float | None = None
    """Engine clock, first admission."""
    prompt_logprobs_sent: int = 0
    parked_s: float | None = None
    """Engine clock: since when it is too long for a cache that has shrunk."""

    @classmethod
    def create(cls, given: EngineRequest, arrival: int, now: float, max_model_len: int) -> Request:
        """Raises InvalidRequest. Values are checked by the front end; this keeps what would break the engine out."""
        prompt, sampling = given.prompt_token_ids, given.sampling
        if not prompt:
            raise InvalidRequest("The prompt is empty.", fix="Send at least one token.", param="prompt")
        if sampling.seed is None or sampling.max_tokens is None:
            raise InvalidRequest("`seed` and `max_tokens` must be set before a request reaches the engine.")
        if len(prompt) >= max_model_len:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {max_model_len} tokens. "
                f"However, the prompt has {len(prompt)} tokens.",
                fix="Please reduce the length of the prompt.",
                param="prompt",
            )
        return cls(
            given=given,
            arrival=arrival,
            queued_s=now,
            max_total=min(len(prompt) + sampling.max_tokens, max_model_len),
            tokens=[*prompt, *given.output_token_ids],
            resumed=bool(given.output_token_ids),
        )

    @property
    def request_id(self) -> str:
        return self.given.request_id

    @property
    def num_prompt(self) -> int:
        return len(self.given.prompt_token_ids)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_to_compute(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def num_to_plan(self) -> int:
        """Of those to compute, which no plan in flight computes."""
        return len(self.tokens) - self.num_computed - self.in_flight

    def order(self) -> tuple[int, int]:
        """Who goes first among running requests; the last one is the first to be preempted."""
        return (self.given.priority, self.arrival)

    def wants_prompt_logprobs(self) -> bool:
        """Whether some are still to be delivered. They are complete before the first output token."""
        return self.given.sampling.prompt_logprobs is not None and not self.num_output

    def finish(self) -> tuple[str | None, int | None]:
        """The finish reason its latest token gives it, and the entry of `stop_token_ids` that did it."""
        if not self.num_output:
            return None, None
        latest, sampling = self.tokens[-1], self.given.sampling
        if self.num_output > sampling.min_tokens:
            if latest in self.given.eos_token_ids:
                return "stop", None
            if latest in sampling.stop_token_ids:
                return "stop", latest
        if self.grammar is not None and self.grammar.terminated:
            return "stop", None
        if len(self.tokens) >= self.max_total:
            return "length", None
        return None, None

    def admission(self) -> Admission:
        """What workers that know nothing of it must be told. It has a slot and blocks for all of its tokens."""
        if self.slot is None:
            raise ValueError("a request without a slot cannot be admitted")
        return Admission(
            slot=self.slot,
            tokens=pack(self.tokens),
            num_prompt=self.num_prompt,
            num_computed=self.num_computed,
            blocks=pack(self.blocks),
            sampling=self._sampling_state(),
        )

    def _sampling_state(self) -> SamplingState:
        sampling = self.given.sampling
        prompt_logprobs = sampling.prompt_logprobs if self.wants_prompt_logprobs() else None
        return SamplingState(
            temperature=sampling.temperature,
            top_k=max(sampling.top_k, 0),
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            seed=(sampling.seed or 0) % 2**64,
            choice=self.given.choice,
            logit_bias=sampling.logit_bias,
            allowed_token_ids=pack(sampling.allowed_token_ids or ()),
            bad_words=self.given.bad_words_token_ids,
            min_tokens=sampling.min_tokens,
            stop_token_ids=pack(dict.fromkeys((*self.given.eos_token_ids, *sampling.stop_token_ids))),
            logprobs=-1 if sampling.logprobs is None else sampling.logprobs,
            prompt_logprobs=-1 if prompt_logprobs is None else prompt_logprobs,
        )

    def new_prompt_logprobs(self, piece: PromptLogprobs) -> list[TokenLogprobs]:
        """The entries of `piece` that were not delivered before: a prompt computed again reports them again."""
        entries = piece.entries[max(0, self.prompt_logprobs_sent + 1 - piece.start) :]
        self.prompt_logprobs_sent += len(entries)
        return entries


def error_output(request: Request, error: RequestError) -> EngineOutput:
    return EngineOutput(request.request_id, request.num_output, finish_reason="error", error=error)

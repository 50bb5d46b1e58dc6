"""What crosses from the engine to its workers: a `StepPlan` out, a `StepResult` back. Numbers and bytes only.

A plan is a delta. A request the workers do not know yet comes as an `Admission` with everything needed to start it
(or to start it again: resuming after preemption and recovery are admissions too). Every request that runs in this
step is then one entry of the parallel arrays in `rows`. Nothing else is repeated from step to step.

A row samples a token in a step exactly when, after the step, all tokens the worker knows of that request have been
computed; so a chunk of a prompt that is not its last one samples nothing.

A row that samples may carry proposed tokens: what may come next. They are computed behind the request's own, and a
token is sampled after each of them too, as if it were the request's. The first sampled token stands in any case, and
the one after a proposed token where that is what was sampled in its place. The next plan tells workers which stood.

Covers the wire format and its packing. Does not cover transport, which is the executor's business.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import msgspec

ON_DEVICE = -1
"""`Rows.last_tokens`: the token sampled for this row in the step before is still on the workers; use it."""

NO_TOKEN = -2
"""`Rows.last_tokens`: nothing to append; the worker already has every token it needs."""

_ITEM = {"H": 2, "i": 4, "f": 4}


def pack(values: Iterable[int] | Iterable[float], code: str = "i") -> bytes:
    """Little-endian packed numbers: `i` int32, `H` uint16, `f` float32."""
    return array(code, values).tobytes()


def unpack(data: bytes, code: str = "i") -> Sequence[int]:
    """The inverse of `pack`. Raises ValueError when `data` is not a whole number of items."""
    if len(data) % _ITEM[code]:
        raise ValueError(f"{len(data)} bytes are not a whole number of '{code}' items")
    values: array[int] = array(code)
    values.frombytes(data)
    return values


class SamplingState(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What a worker needs to draw this request's tokens. A draw depends on (`seed`, `choice`, position) alone."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    """Unsigned 64 bits."""
    choice: int = 0
    """Which of a request's `n` answers this is."""
    logit_bias: dict[int, float] = {}
    allowed_token_ids: bytes = b""
    """int32; empty allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences whose last token is forbidden when the rest has just been produced."""
    min_tokens: int = 0
    stop_token_ids: bytes = b""
    """int32; forbidden until `min_tokens` output tokens exist."""
    logprobs: int = -1
    """How many top alternatives to report beside the chosen token; -1 reports nothing."""
    prompt_logprobs: int = -1


class Admission(msgspec.Struct, frozen=True, array_like=True):
    """A request the workers do not know: all of its state, in one record."""

    slot: int
    tokens: bytes
    """int32: prompt and every output token so far."""
    num_prompt: int
    """The first `num_prompt` of `tokens` are the prompt."""
    num_computed: int
    """Tokens whose KV is already in `blocks` (a prefix-cache hit), always < len(tokens)."""
    blocks: bytes
    """int32: the block table so far."""
    sampling: SamplingState


class Rows(msgspec.Struct, frozen=True, array_like=True):
    """Who runs in this step: parallel arrays, one entry a request."""

    slots: bytes = b""
    """uint16."""
    num_tokens: bytes = b""
    """uint16: how many tokens of the request are computed in this step (≥ 1), those proposed not counted."""
    last_tokens: bytes = b""
    """int32: a token to append before computing, or `ON_DEVICE`, or `NO_TOKEN`."""
    block_rows: bytes = b""
    """uint16: indices into `slots`, one per new block, in order."""
    new_blocks: bytes = b""
    """int32: the block to append to that row's table."""
    accepted_rows: bytes = b""
    """uint16: indices into `slots`, one per token of `accepted`, in order."""
    accepted: bytes = b""
    """int32: a token to append before the one in `last_tokens`; it was proposed and is computed already."""
    proposed_rows: bytes = b""
    """uint16: indices into `slots`, one per token of `proposed`, in order; only rows that sample."""
    proposed: bytes = b""
    """int32: a token that may come next, for this step only."""


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    epoch: int
    """One life of the workers between two restarts; a worker drops a plan of another epoch."""
    step_id: int
    admissions: list[Admission] = []
    rows: Rows = Rows()
    released: bytes = b""
    """uint16: slots that are free from now on. Applied before `admissions`, which may reuse them."""
    mask_rows: bytes = b""
    """uint16: indices into `rows.slots` whose next token a grammar restricts; for a row with proposed tokens once for
    each token it samples, in order."""
    masks: bytes = b""
    """One bitmask a masked row, ceil(vocab / 32) int32 words each; bit t of the mask set = token t allowed."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: the token's own, its rank (1 = most likely), and the top alternatives."""

    logprob: float
    rank: int
    top_ids: bytes = b""
    """int32, most likely first."""
    top_logprobs: bytes = b""
    """float32, parallel to `top_ids`."""


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of prompt tokens `start`, `start + 1`, …; token 0 has none and is never in here."""

    slot: int
    start: int
    entries: list[TokenLogprobs]


class RowFailure(msgspec.Struct, frozen=True, array_like=True):
    """This row alone failed; the message is for its client."""

    slot: int
    message: str
    asked_for: bool = False
    """What its request asks for cannot be done: the same request would fail again, on any machine."""


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    epoch: int
    step_id: int
    slots: bytes = b""
    """uint16: the rows that sampled, in the order of the plan, once for each token that stands."""
    tokens: bytes = b""
    """int32, parallel to `slots`."""
    logprobs: dict[int, list[TokenLogprobs]] = {}
    """By slot, for rows that asked, one for each token that stands."""
    prompt_logprobs: list[PromptLogprobs] = []
    failures: list[RowFailure] = []
    compute_s: float = 0.0
    """Wall time of the step on the worker."""


_encoder = msgspec.msgpack.Encoder()
_plans = msgspec.msgpack.Decoder(StepPlan)
_results = msgspec.msgpack.Decoder(StepResult)


def encode(message: StepPlan | StepResult) -> bytes:
    return _encoder.encode(message)


def decode_plan(data: bytes) -> StepPlan:
    """Raises msgspec.DecodeError or msgspec.ValidationError on anything that is not a plan."""
    return _plans.decode(data)


def decode_result(data: bytes) -> StepResult:
    """Raises msgspec.DecodeError or msgspec.ValidationError on anything that is not a result."""
    return _results.decode(data)

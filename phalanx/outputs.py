"""What a caller gets back. `LLM` returns whole outputs; `AsyncEngine` yields the same types as deltas."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """One token at one position."""

    token_id: int
    logprob: float
    rank: int | None
    """1 is the most likely token; None when only listed among the alternatives of another model call."""
    text: str
    data: bytes
    """The token's raw bytes, for tokens that are parts of a character."""


@dataclass(slots=True)
class PositionLogprobs:
    """The token at a position and the alternatives asked for, most likely first."""

    chosen: Logprob
    top: list[Logprob] = field(default_factory=list)


@dataclass(slots=True)
class CompletionOutput:
    """One answer of a request. In a delta, `text`, `token_ids` and `logprobs` hold only what is new."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    """None while running, then "stop", "length" or "abort"."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for end-of-text or a length limit."""


@dataclass(slots=True)
class RequestMetrics:
    """Seconds on the engine's monotonic clock."""

    arrival: float = 0.0
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    """One entry a prompt token, None for the first."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

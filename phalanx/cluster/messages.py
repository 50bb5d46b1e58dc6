"""What users of `RayDistributedEngine` say and get: `Request`, `Response`, `SamplingConfig` (= `SamplingParams`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from phalanx.errors import InvalidRequest
from phalanx.sampling_params import SamplingParams

SamplingConfig = SamplingParams


@dataclass(frozen=True)
class Progress:
    """What is delivered of one answer: another worker goes on after it."""

    token_ids: tuple[int, ...] = ()
    seed: int | None = None
    """Of its draws; None while that is not known."""
    finish_reason: str | None = None
    """Set when the engine had ended it."""
    stop_token_id: int | None = None

    def then(self, more: Progress) -> Progress:
        """Both after each other."""
        seed = self.seed if more.seed is None else more.seed
        finish = self if more.finish_reason is None else more
        return Progress(self.token_ids + more.token_ids, seed, finish.finish_reason, finish.stop_token_id)


@dataclass
class Request:
    """One prompt to answer. Raises InvalidRequest."""

    prompt: str | list[int]
    """Text as it is, without a chat template, or token ids."""
    sampling: SamplingParams | None = None
    """None: what the call says for all."""
    request_id: str | None = None
    """None: the engine gives it one."""
    priority: int = 0
    """Lower runs first."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The user's own; its response starts with a copy."""
    progress: Progress | None = field(default=None, repr=False)
    """The engine's own: set when a request is sent again."""

    def __post_init__(self) -> None:
        if isinstance(self.prompt, tuple):
            self.prompt = list(self.prompt)
        if not isinstance(self.prompt, (str, list)):
            raise InvalidRequest(
                f"`prompt` must be a text or token ids, got {type(self.prompt).__name__}.", param="prompt"
            )
        if self.sampling is not None and not isinstance(self.sampling, SamplingParams):
            raise InvalidRequest(f"`sampling` must be SamplingConfig, got {type(self.sampling).__name__}.")
        if self.request_id is not None and not isinstance(self.request_id, str):
            raise InvalidRequest(f"`request_id` must be a text, got {type(self.request_id).__name__}.")
        if not isinstance(self.metadata, dict):
            raise InvalidRequest(f"`metadata` must be a dictionary, got {type(self.metadata).__name__}.")


@dataclass
class Response:
    """One answer. In a stream, `text` and `token_ids` hold only what is new, `usage` and `finish_reason` come last."""

    request_id: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    """"stop" or "length"; None while it goes on."""
    usage: dict[str, int] = field(default_factory=dict)
    """`prompt_tokens`, `completion_tokens`, `total_tokens`, `cached_tokens`."""
    metadata: dict[str, Any] = field(default_factory=dict)

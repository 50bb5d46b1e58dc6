"""What front ends and engines say to each other, and `EngineClient`, the seam where they meet: tokens in, tokens out.

Text never crosses here: the front end tokenises before and detokenises after, so that a request can be sent again,
to the same engine or another, from its prompt and the tokens delivered so far.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

import msgspec

from phalanx.errors import EngineDead, PhalanxError
from phalanx.executor.base import Shares, WorkerStatus
from phalanx.metrics.speculation import SpeculationCounts
from phalanx.sampling_params import SamplingParams
from phalanx.step import TokenLogprobs


class EngineRequest(msgspec.Struct, frozen=True):
    """One answer to produce, complete: everything needed to start it, or to start it again anywhere."""

    request_id: str
    """Unique in the engine; answer i of a request with n > 1 has its own, made by the front end."""
    prompt_token_ids: list[int]
    sampling: SamplingParams
    """`max_tokens` and `seed` are resolved, never None."""
    choice: int = 0
    eos_token_ids: tuple[int, ...] = ()
    """Empty with `ignore_eos`."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    """Lower runs first; equal ones as the scheduling policy says."""
    cache_salt: str = ""
    """Requests with different salts never share cached blocks."""
    output_token_ids: tuple[int, ...] = ()
    """Tokens already delivered: the engine goes on after them."""
    owner: int = 0
    """A number for whoever asks (one of several API keys); those who wait are served fairly. 0 is nobody in
    particular."""


class RequestError(msgspec.Struct, frozen=True):
    """Why one request failed, ready for an OpenAI error object."""

    message: str
    type: str = "server_error"
    code: str | None = "internal_error"
    status: int = 500
    param: str | None = None
    retry_after: float | None = None
    retryable: bool | None = None
    """Whether its client should send the same request again; None leaves that to the status."""


def request_error(error: BaseException) -> RequestError:
    """`error` as its client may see it; of an unexpected one only that it happened."""
    if not isinstance(error, PhalanxError):
        return RequestError("The engine failed on this request. This is a bug in Phalanx; the log has the cause.")
    return RequestError(
        message=str(error),
        type=error.type,
        code=error.code,
        status=error.status,
        param=error.param,
        retry_after=error.retry_after,
        retryable=error.retryable,
    )


class EngineOutput(msgspec.Struct, frozen=True):
    """What is new for one request. `start` counts output tokens before these, so a receiver can keep a cursor."""

    request_id: str
    start: int
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    """Parallel to `token_ids`."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Entries for prompt tokens 1, 2, … in order; they may come in several pieces."""
    finish_reason: str | None = None
    """None while running, then "stop", "length", "abort" or "error". Set exactly once, on the last output."""
    stop_token_id: int | None = None
    """The entry of `stop_token_ids` that ended it (an end-of-text token leaves this None)."""
    error: RequestError | None = None
    num_cached_tokens: int = 0
    scheduled_s: float | None = None
    """Monotonic engine clock: first scheduled. With `queued_s`, sent with the first token."""
    queued_s: float | None = None


class EngineLost(EngineDead):
    """An engine is gone; `cause` says why, in words that follow a colon, `kind` and `silent` are as in `WorkerDied`."""

    def __init__(
        self, message: str, cause: str, *, kind: str = "failed", silent: float | None = None, fix: str | None = None
    ):
        super().__init__(message, fix=fix)
        self.cause = cause
        self.kind = kind
        self.silent = silent

    @classmethod
    def closed(cls) -> EngineLost:
        """Its owner has closed it."""
        return cls("The engine is closed.", "it was closed", kind="ended")


class EngineInfo(msgspec.Struct, frozen=True):
    """Fixed facts of a started engine."""

    model: str
    dtype: str
    device: str
    max_model_len: int
    vocab_size: int
    block_size: int
    blocks: int
    kv_bytes: int
    pid: int
    executor: str
    mesh: dict[str, int]
    load_s: float
    weights: str = ""
    """Of the model's files (`checkpoint.fingerprint`)."""
    shares: Shares | None = None
    """Of the model, where they were decided at the start and not by the configuration."""


class Recovery(msgspec.Struct, frozen=True):
    """One loss, the first, and how it was made good; durations in seconds, None while they are not known."""

    epoch: int
    """The one that it began, or will."""
    rank: int
    """-1 is the engine process itself."""
    node: str
    kind: str
    """As `WorkerDied.kind`; `regained` when nothing was lost, but something came back and was taken in."""
    cause: str
    since: float
    """Wall-clock time at which it was noticed; for people, since clocks are set. `lasted` is for counting."""
    plan: str
    """`restart` of what was lost, `split` anew over what is left, or `wait` for what is missing."""
    missing: str = ""
    """What is waited for, in words."""
    last_try: str = ""
    """Why the latest try to make it good has failed, in words; empty where none has."""
    estimate: float | None = None
    """From `since` to the next token, by what earlier recoveries and the loading took."""
    detection_s: float | None = None
    """From the last sign of life to the notice."""
    reload_s: float | None = None
    """From the notice until all workers were ready again."""
    first_token_s: float | None = None
    """From the notice until the next token was committed."""
    resumed: int = 0
    """Requests that go on after it."""
    recomputed: int = 0
    """Tokens of theirs that had been computed before."""
    lasted: float = 0.0
    """Seconds from the notice until now, or until it was over."""
    engine: int = 0
    """Which of several engines; `rank` and `epoch` are its own."""


class EngineState(msgspec.Struct):
    """One of several engines."""

    pid: int | None
    state: str
    epoch: int
    running: int
    waiting: int
    outstanding: int
    """Tokens that its requests may still need, prompt and answer."""
    slowness: float = 1.0
    """How many times as long as the fastest engine it takes over a token; 1 for all that are about as fast."""
    relieved: int = 0
    """Requests that went on elsewhere because it was slow."""


class EngineStatus(msgspec.Struct):
    """A snapshot of a running engine; `/status` and the metrics are made of it."""

    state: str
    """loading, ready, recovering, draining or failed."""
    epoch: int = 0
    step: int = 0
    cause: str | None = None
    since: float = 0.0
    """Wall-clock time at which `state` began."""
    running: int = 0
    waiting: int = 0
    blocks: int = 0
    free_blocks: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    computed_tokens: int = 0
    speculation: SpeculationCounts = msgspec.field(default_factory=SpeculationCounts)
    step_seconds: float = 0.0
    """Sum over steps, with `step` the mean."""
    heartbeat: float = 0.0
    """Wall-clock time of the last step or idle tick."""
    ranks: int = 0
    """As many as were asked for, which is the most that compute."""
    returned: str | None = None
    """Places that were lost and are back, in words; they are taken in at a quiet moment."""
    workers: list[WorkerStatus] = []
    recovery: Recovery | None = None
    """The one under way; without one, None."""
    recoveries: list[Recovery] = []
    """The latest that are over, oldest first; a few."""
    failures: dict[str, int] = {}
    """Losses by kind, since the start."""
    hang_bound: float = 0.0
    """Seconds without progress after which a worker counts as hung now."""
    engines: list[EngineState] = []
    """What it is made of; empty where that is a single engine itself."""


class EngineClient(Protocol):
    """A way to one or more engines. `Replica`, `Router` and `EchoEngine` are some."""

    async def start(self) -> EngineInfo:
        """Raises UserError when the model cannot be loaded."""
        ...

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """Yields until an output with a finish reason. The first output of an accepted request has no tokens: it says
        that the request is in the queue; one that is refused gets an error output instead (`error.status` 503 when
        the queue is full). Closing the generator aborts the request. Raises EngineDead when the engine is lost."""
        ...

    async def abort(self, request_id: str) -> None: ...

    def status(self) -> EngineStatus:
        """The latest known; never waits for the engine."""
        ...

    async def lost(self) -> EngineLost:
        """Returns when the engine, once started, can do nothing any more, and says why."""
        ...

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait for running ones. False when some were still running after `timeout` s."""
        ...

    async def close(self) -> None:
        """Idempotent; ends everything it started."""
        ...

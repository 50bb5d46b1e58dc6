"""`EchoEngine`: an `EngineClient` without a model, for tests and trials of whatever stands in front of an engine.

It answers every request with the prompt's own tokens, over and over, until `max_tokens`, an end-of-text or a stop
token. It refuses, delays and dies on demand. Does not draw tokens: sampling parameters other than limits, stops,
`min_tokens` and log-probabilities (always certain) are ignored.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

from phalanx.engine.client import (
    EngineInfo,
    EngineLost,
    EngineOutput,
    EngineRequest,
    EngineStatus,
    request_error,
)
from phalanx.errors import Draining, PhalanxError, QueueFull
from phalanx.step import TokenLogprobs, pack


class EchoEngine:
    """One token a step for each request, every `delay` seconds (0 yields to the event loop only).

    `max_requests` refuses more with QueueFull; after `die_after` tokens in all the engine is lost, as if killed, and so
    it is by a request that would draw the token `poison`. `refuse_to_start` is raised by `start`.
    """

    def __init__(
        self,
        *,
        model: str = "echo",
        vocab_size: int = 50_000,
        max_model_len: int = 4096,
        delay: float = 0.0,
        max_requests: int = 100_000,
        die_after: int | None = None,
        poison: int | None = None,
        refuse_to_start: PhalanxError | None = None,
    ):
        self._info = EngineInfo(
            model=model,
            dtype="float32",
            device="cpu",
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            block_size=16,
            blocks=4096,
            kv_bytes=0,
            pid=0,
            executor="echo",
            mesh={"dp": 1, "pp": 1, "cp": 1, "tp": 1},
            load_s=0.0,
        )
        self.delay = delay
        self._max_requests = max_requests
        self._tokens_left = die_after
        self._poison = poison
        self._refuse_to_start = refuse_to_start
        self._gone = asyncio.Event()
        self._running: dict[str, bool] = {}
        """Request id to whether it was aborted."""
        self._idle = asyncio.Event()
        self._status = EngineStatus(state="loading", since=time.time(), blocks=4096, free_blocks=4096)
        self.requests: list[EngineRequest] = []
        """Everything ever accepted, for tests to look at."""

    async def start(self) -> EngineInfo:
        if self._refuse_to_start is not None:
            raise self._refuse_to_start
        self._set_state("ready")
        return self._info

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        rid, start = request.request_id, len(request.output_token_ids)
        self._check_alive()
        refusal: Exception | None = None
        if self._status.state == "draining":
            refusal = Draining("The engine is shutting down.")
        elif len(self._running) >= self._max_requests:
            refusal = QueueFull(f"The queue is full: {len(self._running)} requests.", retry_after=1.0)
        if refusal is not None:
            yield EngineOutput(rid, start, finish_reason="error", error=request_error(refusal))
            return
        self._running[rid] = False
        self.requests.append(request)
        try:
            yield EngineOutput(rid, start)
            for position in range(start, request.sampling.max_tokens or 1):
                await asyncio.sleep(self.delay)
                self._check_alive()
                if self._running[rid]:
                    yield EngineOutput(rid, position, finish_reason="abort")
                    return
                output = self._step(request, position, first=position == start)
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self._running.pop(rid, None)
            if not self._running:
                self._idle.set()

    def _step(self, request: EngineRequest, position: int, *, first: bool) -> EngineOutput:
        sampling, prompt = request.sampling, request.prompt_token_ids
        token = prompt[position % len(prompt)]
        if token == self._poison:
            self.die("it met its poison")
            self._check_alive()
        if self._tokens_left is not None:
            self._tokens_left -= 1
        self._status.step += 1
        self._status.computed_tokens += 1
        may_stop = position + 1 > sampling.min_tokens
        stopped = may_stop and (token in request.eos_token_ids or token in sampling.stop_token_ids)
        reason = "stop" if stopped else "length" if position + 1 == sampling.max_tokens else None
        prompt_logprobs = None
        if first and sampling.prompt_logprobs is not None:
            prompt_logprobs = [_certain(t, sampling.prompt_logprobs) for t in prompt[1:]]
        now = time.monotonic()
        return EngineOutput(
            request_id=request.request_id,
            start=position,
            token_ids=[token],
            logprobs=None if sampling.logprobs is None else [_certain(token, sampling.logprobs)],
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_token_id=token if stopped and token in sampling.stop_token_ids else None,
            scheduled_s=now if first else None,
            queued_s=now if first else None,
        )

    async def abort(self, request_id: str) -> None:
        if request_id in self._running:
            self._running[request_id] = True

    def die(self, cause: str = "it was told to") -> None:
        """Be lost at once, as a killed engine is: every stream raises EngineDead at its next token."""
        self._set_state("failed", cause)
        self._gone.set()

    async def lost(self) -> EngineLost:
        await self._gone.wait()
        return self._loss()

    def _loss(self) -> EngineLost:
        """Noticed at once."""
        cause = self._status.cause or ""
        return EngineLost(f"The engine is gone: {cause}.", cause, kind="killed", silent=0.0)

    def status(self) -> EngineStatus:
        self._status.running = len(self._running)
        self._status.heartbeat = time.time()
        return self._status

    async def drain(self, timeout: float) -> bool:
        self._set_state("draining")
        if not self._running:
            return True
        self._idle.clear()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        if self._status.state != "failed":
            self.die("closed")

    def _set_state(self, state: str, cause: str | None = None) -> None:
        self._status.state, self._status.cause, self._status.since = state, cause, time.time()

    def _check_alive(self) -> None:
        if self._tokens_left is not None and self._tokens_left <= 0 and self._status.state != "failed":
            self.die("its tokens are used up")
        if self._status.state == "failed":
            raise self._loss()


def _certain(token: int, alternatives: int) -> TokenLogprobs:
    top = [token] if alternatives else []
    return TokenLogprobs(0.0, 1, pack(top), pack([0.0] * len(top), "f"))

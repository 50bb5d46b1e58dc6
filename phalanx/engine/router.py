"""`Router`: one `EngineClient` over several. It sends each request to the engine with the least outstanding work and
keeps a cursor on it, so that a request outlives its engine.

When an engine is lost, each of its unfinished requests goes to another live one as prompt and tokens delivered so far,
and the stream goes on at the cursor: nothing is repeated, nothing is lost. When no engine is left, the stream ends with
EngineDead. Does not restart engines and does not look into prompts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

import msgspec

from phalanx.engine.client import EngineClient, EngineInfo, EngineOutput, EngineRequest, EngineStatus
from phalanx.errors import EngineDead, PhalanxError

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Engine:
    client: EngineClient
    outstanding: int = 0
    """Tokens that the requests sent there may still need: prompt tokens to compute and output tokens to make."""


@dataclass
class _Cursor:
    """How far one request is delivered."""

    request: EngineRequest
    delivered: list[int]
    prompt_logprobs: int = 0
    """Entries delivered."""
    skip_prompt_logprobs: int = 0
    """Entries that the present engine will repeat."""
    accepted: bool = False
    finished: bool = False

    def accept(self, output: EngineOutput) -> EngineOutput | None:
        """What of `output` is new, or None. Raises PhalanxError on a gap."""
        known = len(self.delivered) - output.start
        if known < 0:
            raise PhalanxError(
                f"Tokens of an answer were lost on the way: expected number {len(self.delivered)}, got {output.start}.",
                fix="This is a bug in Phalanx; please report it with the log.",
            )
        repeated = min(self.skip_prompt_logprobs, len(output.prompt_logprobs or ()))
        acknowledgement = not output.token_ids and output.finish_reason is None and not output.prompt_logprobs
        if acknowledgement and self.accepted:
            return None
        if known or repeated:
            output = msgspec.structs.replace(
                output,
                start=output.start + min(known, len(output.token_ids)),
                token_ids=output.token_ids[known:],
                logprobs=output.logprobs[known:] if output.logprobs is not None else None,
                prompt_logprobs=(output.prompt_logprobs or [])[repeated:] or None,
            )
        self.skip_prompt_logprobs -= repeated
        self.prompt_logprobs += len(output.prompt_logprobs or ())
        self.delivered += output.token_ids
        self.accepted = True
        self.finished = output.finish_reason is not None
        return output

    def resume(self) -> EngineRequest:
        """The request for another engine to go on with."""
        self.skip_prompt_logprobs = self.prompt_logprobs
        sampling = self.request.sampling
        if sampling.prompt_logprobs is not None and self.prompt_logprobs >= len(self.request.prompt_token_ids) - 1:
            # All delivered: without the wish the new engine may use its prefix cache.
            sampling = dataclasses.replace(sampling, prompt_logprobs=None)
            self.skip_prompt_logprobs = 0
        return msgspec.structs.replace(self.request, sampling=sampling, output_token_ids=tuple(self.delivered))


class Router:
    """An `EngineClient`. `clients` must not be empty; it starts, drains and closes them all."""

    def __init__(self, clients: Sequence[EngineClient]):
        if not clients:
            raise ValueError("a router needs at least one engine")
        self._engines = [_Engine(client) for client in clients]
        self._home: dict[str, _Engine] = {}

    async def start(self) -> EngineInfo:
        infos = await asyncio.gather(*(engine.client.start() for engine in self._engines))
        return infos[0]

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        cursor = _Cursor(request, list(request.output_token_ids))
        tried: set[_Engine] = set()
        lost: EngineDead | None = None
        refused: EngineOutput | None = None
        while (engine := self._choose(tried)) is not None:
            tried.add(engine)
            if lost is not None:
                log.warning("request %s goes on elsewhere after %d tokens", request.request_id, len(cursor.delivered))
            try:
                async with aclosing(self._run(engine, cursor)) as outputs:
                    async for output in outputs:
                        if output.error is not None and output.error.status == 503:
                            refused = output  # full or shutting down: another engine may take it
                            break
                        yield output
                    else:
                        return
            except EngineDead as error:
                lost = error
        if refused is not None:
            yield refused
            return
        raise lost or EngineDead("The engine is gone.", fix="Its log has the cause; restart it.")

    async def _run(self, engine: _Engine, cursor: _Cursor) -> AsyncGenerator[EngineOutput, None]:
        request = cursor.resume() if cursor.accepted else cursor.request
        work = len(request.prompt_token_ids) + (request.sampling.max_tokens or 0)
        engine.outstanding += work
        self._home[request.request_id] = engine
        try:
            stream = cast("AsyncGenerator[EngineOutput, None]", engine.client.generate(request))
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    if output.error is not None:
                        yield output
                        return
                    new = cursor.accept(output)
                    if new is not None:
                        yield new
                    if cursor.finished:
                        return
            raise EngineDead("The engine ended the answer without saying why.")
        finally:
            engine.outstanding -= work
            self._home.pop(request.request_id, None)

    def _choose(self, tried: set[_Engine]) -> _Engine | None:
        """The engine with the least outstanding work among those not tried that look alive; draining ones come last."""
        best: _Engine | None = None
        best_rank: tuple[bool, int] | None = None
        for engine in self._engines:
            state = engine.client.status().state
            if engine in tried or state == "failed":
                continue
            rank = (state == "draining", engine.outstanding)
            if best_rank is None or rank < best_rank:
                best, best_rank = engine, rank
        return best

    async def abort(self, request_id: str) -> None:
        engine = self._home.get(request_id)
        if engine is not None:
            await engine.client.abort(request_id)

    def status(self) -> EngineStatus:
        """The engine's own when there is one; sums, and the best state, of several."""
        statuses = [engine.client.status() for engine in self._engines]
        return statuses[0] if len(statuses) == 1 else _merge(statuses)

    async def drain(self, timeout: float) -> bool:
        return all(await asyncio.gather(*(engine.client.drain(timeout) for engine in self._engines)))

    async def close(self) -> None:
        await asyncio.gather(*(engine.client.close() for engine in self._engines))


_BEST_FIRST = ("ready", "recovering", "loading", "draining", "failed")


def _merge(statuses: list[EngineStatus]) -> EngineStatus:
    best = min(statuses, key=lambda status: _BEST_FIRST.index(status.state))
    summed = (
        "running", "waiting", "blocks", "free_blocks", "preemptions",
        "prefix_queries", "prefix_hits", "computed_tokens", "step_seconds", "step",
    )  # fmt: skip
    return EngineStatus(
        state=best.state,
        epoch=max(status.epoch for status in statuses),
        cause=next((status.cause for status in statuses if status.cause), None),
        since=best.since,
        heartbeat=max(status.heartbeat for status in statuses),
        workers=[worker for status in statuses for worker in status.workers],
        **{name: sum(getattr(status, name) for status in statuses) for name in summed},
    )

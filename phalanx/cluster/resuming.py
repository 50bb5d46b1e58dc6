"""`Resuming`: an `EngineClient` over another that starts answers where they were left, and says how far they are.

An answer that another worker began is told from its beginning, so that whoever assembles its text sees all of it; the
engine computes only what is missing. Tokens only; does not repeat anything by itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec

from phalanx.cluster.messages import Progress
from phalanx.engine.client import EngineClient, EngineInfo, EngineLost, EngineOutput, EngineRequest, EngineStatus

Report = Callable[[Progress], None]
"""Is told what is new of an answer: its seed and, with each call, more tokens."""


class Resuming:
    """`client` is started, drained and closed with this."""

    def __init__(self, client: EngineClient):
        self._client = client
        self._expected: dict[str, tuple[Progress, Report]] = {}

    def expect(self, name: str, progress: Progress, report: Report) -> None:
        """The next request whose id begins with `name` and a dash goes on after `progress`."""
        self._expected[name] = (progress, report)

    def forget(self, name: str) -> None:
        self._expected.pop(name, None)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        rid = request.request_id
        progress, report = self._expected.pop(rid.rpartition("-")[0], (None, None))
        if progress is None or report is None:
            async with aclosing(self._client.generate(request)) as outputs:
                async for output in outputs:
                    yield output
            return
        if progress.seed is not None:
            request = msgspec.structs.replace(
                request, sampling=dataclasses.replace(request.sampling, seed=progress.seed)
            )
        report(Progress(seed=request.sampling.seed))
        if progress.finish_reason is not None:
            yield EngineOutput(rid, 0)
            yield EngineOutput(
                rid,
                0,
                token_ids=list(progress.token_ids),
                finish_reason=progress.finish_reason,
                stop_token_id=progress.stop_token_id,
            )
            return
        if progress.token_ids:
            request = msgspec.structs.replace(request, output_token_ids=progress.token_ids)
        told = not progress.token_ids
        async with aclosing(self._client.generate(request)) as outputs:
            async for output in outputs:
                if not told and output.error is None:
                    told = True
                    yield EngineOutput(rid, 0, token_ids=list(progress.token_ids))
                if output.token_ids or output.finish_reason in ("stop", "length"):
                    report(Progress(tuple(output.token_ids), None, output.finish_reason, output.stop_token_id))
                yield output

    async def start(self) -> EngineInfo:
        return await self._client.start()

    async def abort(self, request_id: str) -> None:
        await self._client.abort(request_id)

    def status(self) -> EngineStatus:
        return self._client.status()

    async def lost(self) -> EngineLost:
        return await self._client.lost()

    async def drain(self, timeout: float) -> bool:
        return await self._client.drain(timeout)

    async def close(self) -> None:
        await self._client.close()

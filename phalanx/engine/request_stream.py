"""`RequestStream`: the answers of one request as they come, from as many engine requests as it has choices.

One task per choice reads the engine and turns tokens into text at once, so that a stop string ends the work when it
appears and not when somebody looks. What a slow reader has not taken is merged into one delta: it costs little memory
and stalls nobody. Does not validate and does not know what an engine is beyond `EngineClient`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any

from phalanx.engine.client import EngineClient, EngineOutput, EngineRequest
from phalanx.engine.core_messages import raised
from phalanx.engine.news import News
from phalanx.engine.output_processor import RequestAssembly, merge
from phalanx.errors import EngineDead, PhalanxError
from phalanx.outputs import RequestOutput


class _Gathering:
    """What the tasks and the reader share. Apart from the stream, so that a forgotten stream can be noticed."""

    def __init__(self, client: EngineClient, children: list[EngineRequest], assembly: RequestAssembly):
        self._client = client
        self._assembly = assembly
        self._waiting = len(children)
        """Choices not yet admitted."""
        self._pending: RequestOutput | None = None
        self._error: Exception | None = None
        self._closed = False
        self._news = News()
        self.admitted = asyncio.Event()
        """Set when every choice is in the queue, or when one failed."""
        self._tasks = [asyncio.create_task(self._read(child)) for child in children]

    async def _read(self, child: EngineRequest) -> None:
        rid, announced = child.request_id, False
        try:
            async with aclosing(self._client.generate(child)) as outputs:  # which aborts the engine's request
                async for output in outputs:
                    if output.error is not None:
                        raise raised(output.error)
                    if not announced:
                        announced = True
                        self._admit()
                    self._push(output)
                    if self._assembly.done(rid):
                        return
            raise EngineDead("The engine ended the answer without saying why.")
        except asyncio.CancelledError:
            raise
        except PhalanxError as error:
            self._fail(error)
        except Exception as error:
            failure = PhalanxError("The request failed inside Phalanx. This is a bug; please report it.")
            failure.__cause__ = error
            self._fail(failure)

    def _admit(self) -> None:
        self._waiting -= 1
        if self._waiting == 0:
            self.admitted.set()

    def _push(self, output: EngineOutput) -> None:
        delta = self._assembly.push(output)
        if delta is not None:
            self._pending = delta if self._pending is None else merge(self._pending, delta)
            self._news.tell()

    def _fail(self, error: Exception) -> None:
        """One choice failed: so has the request."""
        if self._error is None:
            self._error = error
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        self.admitted.set()
        self._news.tell()

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    async def next(self) -> RequestOutput:
        """What is new; waits for it. Raises the request's error after what came before it, StopAsyncIteration at the
        end. May be cancelled and called again."""
        while True:
            if self._pending is not None:
                delta, self._pending = self._pending, None
                return delta
            self.raise_error()
            if self._assembly.finished or self._closed:
                raise StopAsyncIteration
            await self._news.wait()

    @property
    def running(self) -> bool:
        return any(not task.done() for task in self._tasks)

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        self.cancel()
        self._closed, self._pending = True, None
        self._news.tell()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()  # one that was cancelled knows where it was, and so this: a circle for the collector


class RequestStream(AsyncIterator[RequestOutput]):
    """An async iterator of deltas: each has what is new since the one before, `finished` on the last.

    `aclose()`, or dropping the last reference, aborts what still runs. Cancelling a waiting `__anext__` (a time-out for
    a keep-alive) loses nothing: call it again.
    """

    def __init__(
        self,
        client: EngineClient,
        children: list[EngineRequest],
        assembly: RequestAssembly,
    ):
        self.request_id = assembly.request_id
        self.prompt_token_ids = assembly.prompt_token_ids
        self._loop = asyncio.get_running_loop()
        self._gathering = _Gathering(client, children, assembly)

    @property
    def running(self) -> bool:
        """Whether any choice is still being produced."""
        return self._gathering.running

    async def admitted(self) -> None:
        """Returns once every choice is in the engine's queue. Raises what refused one of them."""
        await self._gathering.admitted.wait()
        self._gathering.raise_error()

    def __aiter__(self) -> RequestStream:
        return self

    def __anext__(self) -> Coroutine[Any, Any, RequestOutput]:
        return self._gathering.next()

    async def aclose(self) -> None:
        """Idempotent."""
        await self._gathering.close()

    def __del__(self) -> None:
        gathering = getattr(self, "_gathering", None)
        if gathering is not None and gathering.running and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(gathering.cancel)

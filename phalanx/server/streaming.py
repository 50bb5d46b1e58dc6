"""The life of one request on the HTTP side: work that ends when the client goes, when its time is up, or on shutdown.

`InFlight` knows every request that is being worked on, so that draining can end the rest. `EventStream` is the
answer of a streaming request: raw ASGI, with one send per engine output and no task per token. It starts only once the
engine has admitted the request, so that refusals keep their real status; what fails later becomes an error frame and
`[DONE]`. Does not know what is inside the frames.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from phalanx.errors import PhalanxError, RequestTimeout
from phalanx.server.failures import ClientGone, error_body, internal_error

logger = logging.getLogger("phalanx.server")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

LAST_WORDS_S = 2.0
"""How long the final frames of a failed stream may take to be sent; a client that does not read is left alone."""

Result = TypeVar("Result")


class InFlight:
    """Requests being worked on. Work ends with a result, with an error of its own, with ClientGone when the client
    closes, with RequestTimeout at its deadline, or with the error given to `fail_all`."""

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._failing: dict[asyncio.Task[Any], PhalanxError | None] = {}
        """Each running task, with the error that ends it once there is one."""

    def __len__(self) -> int:
        return len(self._failing)

    def deadline(self) -> float:
        """On the event loop's clock, for a request that arrives now."""
        return asyncio.get_running_loop().time() + self._timeout

    def fail_all(self, error: PhalanxError) -> int:
        """End everything that runs with `error`; says how many that were."""
        running = [task for task in self._failing if not task.done()]
        for task in running:
            self._fail(task, error)
        return len(running)

    def _fail(self, task: asyncio.Task[Any], error: PhalanxError) -> None:
        if task in self._failing and not task.done():
            self._failing[task] = error
            task.cancel()

    async def run(self, work: Coroutine[Any, Any, Result], receive: Receive, deadline: float) -> Result:
        """`work` as a task of its own. Cancelled, it must clean up promptly (closing a stream aborts its request)."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(work)
        watcher = loop.create_task(_until_disconnect(receive))
        self._failing[task] = None
        timeout = RequestTimeout(f"The request took longer than {self._timeout:g} s.", fix="See --request-timeout.")
        timer = loop.call_at(deadline, self._fail, task, timeout)
        try:
            await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))
                if not task.cancelled():
                    task.exception()  # looked at, so that it is not reported as forgotten
                raise ClientGone
            return task.result()
        except asyncio.CancelledError:
            error = self._failing.get(task)
            if error is not None and task.cancelled():
                raise error from None
            task.cancel()  # the server itself is being cancelled
            await asyncio.wait((task,), timeout=LAST_WORDS_S)
            raise
        finally:
            timer.cancel()
            watcher.cancel()
            del self._failing[task]


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """A server-sent event stream as an ASGI response. `frames` yields whole frames (bytes, one or more events) and may
    raise PhalanxError. `close` aborts what is left of the request; it is always called."""

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        in_flight: InFlight,
        *,
        deadline: float,
        keep_alive: float,
        request_id: str,
        on_failure: Callable[[BaseException], None],
        close: Callable[[], Awaitable[None]],
    ):
        super().__init__(
            frames,
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            media_type="text/event-stream",
        )
        self._frames = frames
        self._in_flight = in_flight
        self._deadline = deadline
        self._keep_alive = keep_alive
        self._request_id = request_id
        self._on_failure = on_failure
        self._close = close
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        idle = None
        last = DONE
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            send = scope["state"]["send"]
            idle = asyncio.create_task(self._keep_open(send))
            await self._in_flight.run(self._pump(send), receive, self._deadline)
        except ClientGone as gone:
            self._on_failure(gone)
            return
        except PhalanxError as error:
            self._on_failure(error)
            last = frame(error_body(error)) + DONE
        except Exception as error:
            self._on_failure(error)
            last = frame(error_body(internal_error(self._request_id))) + DONE
        finally:
            if idle is not None:
                idle.cancel()
            await self._frames.aclose()
            await self._close()
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await send({"type": "http.response.body", "body": last, "more_body": False})
        except TimeoutError:
            logger.info("The client of request %s does not read its stream; closed.", self._request_id)

    async def _pump(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        async for data in self._frames:
            self._last_sent = clock()
            await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _keep_open(self, send: Send) -> None:
        """A comment whenever nothing was sent for `keep_alive` seconds. Frames are sent whole: none is ever cut."""
        if self._keep_alive <= 0:
            return
        clock = asyncio.get_running_loop().time
        self._last_sent = clock()
        while True:
            wait = self._last_sent + self._keep_alive - clock()
            if wait > 0:
                await asyncio.sleep(wait)
                continue
            self._last_sent = clock()
            await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})


def frame(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"

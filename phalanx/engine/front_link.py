"""`FrontLink`: one API server's requests at the router, as long as it is there.

Guarantees: when the server is gone, or `close` is called, all of its requests are aborted; a request that cannot be
read or answered is that request's error; a server that does not read delays nobody but itself. Does not know what a
server is beyond its messages, and does not watch it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing

import msgspec

from phalanx.engine.client import EngineClient, EngineOutput, request_error
from phalanx.engine.core_messages import Abort, BrokenFrame, LoadFailed, Submit, decode_request, send_outputs
from phalanx.engine.frames import FrameStream
from phalanx.engine.front_messages import Alive, Counted, FromServer, Gather, Leaving, Ready, ToServer
from phalanx.errors import InvalidRequest, PhalanxError

log = logging.getLogger(__name__)

Told = Ready | LoadFailed | Alive | Counted | Gather | Leaving
"""What is not about a request."""


class FrontLink:
    def __init__(
        self,
        router: EngineClient,
        stream: FrameStream[FromServer],
        *,
        heard: Callable[[], None],
        told: Callable[[Told], None],
        prefix: str = "",
    ):
        """`heard` is called for every message, `told` with those that are not about a request. `prefix` is put before
        the ids of its requests, where others or a former link may use the same ones."""
        self._router, self._stream = router, stream
        self._heard, self._told = heard, told
        self._prefix = prefix
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._outputs: list[EngineOutput] = []
        """To be sent together at the end of the event loop's turn."""

    def post(self, message: ToServer) -> None:
        self._stream.post(message)

    async def serve(self) -> str:
        """Until the server is gone: why, in words that follow a colon. Its requests are aborted then."""
        try:
            while True:
                message = await self._stream.receive()
                self._heard()
                if isinstance(message, Submit):
                    self._submit(message)
                elif isinstance(message, Abort):
                    self._abort(message)
                else:
                    self._told(message)
        except (EOFError, OSError):
            return "it closed the connection"
        except BrokenFrame as error:
            return f"it sent something that is no message ({error})"
        finally:
            await self.close()

    async def close(self) -> None:
        tasks = list(self._requests.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._stream.close()

    def _submit(self, message: Submit) -> None:
        rid = message.request_id
        if rid in self._requests:
            refusal = request_error(InvalidRequest(f"A request with the id '{rid}' is running."))
            self._put(EngineOutput(rid, 0, finish_reason="error", error=refusal))
            return
        task = self._requests[rid] = asyncio.create_task(self._answer(rid, message))
        task.add_done_callback(lambda _: self._requests.pop(rid, None))

    def _abort(self, message: Abort) -> None:
        for rid in message.request_ids:
            task = self._requests.get(rid)
            if task is not None:
                task.cancel()

    async def _answer(self, rid: str, message: Submit) -> None:
        start = 0
        try:
            request = decode_request(message.request)
            start = len(request.output_token_ids)
            if self._prefix:
                request = msgspec.structs.replace(request, request_id=self._prefix + rid)
            async with aclosing(self._router.generate(request)) as outputs:
                async for output in outputs:
                    self._put(msgspec.structs.replace(output, request_id=rid) if self._prefix else output)
                    start = output.start + len(output.token_ids)
                    await self._stream.room()
        except Exception as error:
            if not isinstance(error, PhalanxError | msgspec.MsgspecError):
                log.exception("request %s failed", rid)
            self._put(EngineOutput(rid, start, finish_reason="error", error=request_error(error)))

    def _put(self, output: EngineOutput) -> None:
        if not self._outputs:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outputs.append(output)

    def _flush(self) -> None:
        outputs, self._outputs = self._outputs, []
        send_outputs(self.post, outputs, None, lambda rid: self._abort(Abort([rid])))

"""`Mailboxes`: what one connection has brought for each request, until its reader takes it.

A slow reader delays nobody; what it has not taken is merged. Closing a stream aborts its request. Knows neither what is
at the other end nor whether it lives: its owner hands in what arrives (`deliver`) and what went wrong (`fail`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any

import msgspec

from phalanx.engine.client import EngineOutput, EngineRequest
from phalanx.engine.core_messages import Abort, Submit, submit
from phalanx.engine.news import News
from phalanx.errors import InvalidRequest


class Mailbox:
    """What was sent for one request and its reader has not taken."""

    def __init__(self, start: int) -> None:
        self._outputs: list[EngineOutput] = []
        self._finished = False
        self._error: Exception | None = None
        self._news = News()
        self.next_start = start

    def put(self, output: EngineOutput) -> None:
        if self._finished:  # an abort came too late
            return
        self._finished = output.finish_reason is not None
        self._outputs.append(output)
        self.next_start = output.start + len(output.token_ids)
        self._news.tell()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._news.tell()

    async def take(self) -> EngineOutput:
        """Everything that is there, as one output. Raises what `fail` was told after that."""
        while not self._outputs:
            if self._error is not None:
                raise self._error
            await self._news.wait()
        outputs, self._outputs = self._outputs, []
        return outputs[0] if len(outputs) == 1 else merged(outputs)


def merged(outputs: list[EngineOutput]) -> EngineOutput:
    """One output for several of one request that follow each other."""
    first, last = outputs[0], outputs[-1]
    logprobs = [entry for output in outputs for entry in output.logprobs or ()]
    prompt_logprobs = [entry for output in outputs for entry in output.prompt_logprobs or ()]
    scheduled = next((output for output in outputs if output.scheduled_s is not None), first)
    return msgspec.structs.replace(
        last,
        start=next((output.start for output in outputs if output.token_ids), last.start),
        token_ids=[token for output in outputs for token in output.token_ids],
        logprobs=logprobs or None,
        prompt_logprobs=prompt_logprobs or None,
        num_cached_tokens=max(output.num_cached_tokens for output in outputs),
        scheduled_s=scheduled.scheduled_s,
        queued_s=scheduled.queued_s,
    )


class Mailboxes:
    """`send` sends a message and waits for room, `post` does not wait."""

    def __init__(self, send: Callable[[Submit], Coroutine[Any, Any, None]], post: Callable[[Abort], None]) -> None:
        self._send, self._post = send, post
        self.open: dict[str, Mailbox] = {}
        self.idle = asyncio.Event()
        self.idle.set()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """As `EngineClient.generate`. Raises InvalidRequest, and what `fail` is told."""
        rid = request.request_id
        if rid in self.open:
            raise InvalidRequest(f"A request with the id '{rid}' is running.")
        try:
            message = submit(request)
        except (ValueError, OverflowError, TypeError):
            raise InvalidRequest("The request holds a value that cannot be sent to the engine.") from None
        mailbox = self.open[rid] = Mailbox(len(request.output_token_ids))
        self.idle.clear()
        finished = False
        try:
            await self._send(message)
            while not finished:
                output = await mailbox.take()
                finished = output.finish_reason is not None
                yield output
        finally:
            self.open.pop(rid, None)
            if not self.open:
                self.idle.set()
            if not finished:
                self._post(Abort([rid]))

    def abort(self, request_id: str) -> None:
        mailbox = self.open.get(request_id)
        if mailbox is not None:
            self._post(Abort([request_id]))
            mailbox.put(EngineOutput(request_id, mailbox.next_start, finish_reason="abort"))

    async def deliver(self, outputs: Sequence[EngineOutput]) -> None:
        """Hand them out. First tokens go ahead: whoever waits for one need not wait until all others, who have text to
        read, have their next one."""
        begun = {output.request_id for output in outputs if output.scheduled_s is not None}
        if begun and len(begun) < len(outputs):
            self._put([output for output in outputs if output.request_id in begun])
            await asyncio.sleep(0)  # they are made text; with the next turn they go to who reads it
            outputs = [output for output in outputs if output.request_id not in begun]
        self._put(outputs)

    def _put(self, outputs: Sequence[EngineOutput]) -> None:
        for output in outputs:
            mailbox = self.open.get(output.request_id)
            if mailbox is not None:  # else it was aborted in the meantime
                mailbox.put(output)

    def fail(self, error: Exception) -> None:
        for mailbox in self.open.values():
            mailbox.fail(error)

    async def drained(self, timeout: float) -> bool:
        """False when some requests were still there after `timeout` seconds."""
        try:
            await asyncio.wait_for(self.idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

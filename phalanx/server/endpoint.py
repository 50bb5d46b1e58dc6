"""The steps that every JSON endpoint begins with, and the two ways an answer leaves."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from phalanx.errors import InvalidRequest, PhalanxError
from phalanx.server.failures import ClientGone
from phalanx.server.generation import Generation
from phalanx.server.middleware import log_bug, owner_of, sane_request_id
from phalanx.server.openai_types import _Request
from phalanx.server.request_fields import refuse_unsupported
from phalanx.server.state import ServerState
from phalanx.server.streaming import EventStream

encode = msgspec.json.Encoder().encode

Body = TypeVar("Body", bound=_Request)
Result = TypeVar("Result")


def json_response(content: msgspec.Struct) -> Response:
    return Response(encode(content), media_type="application/json")


@dataclass(slots=True)
class Call(Generic[Body]):
    """One request to a JSON endpoint, its body read and its fields checked for what this version does not have."""

    state: ServerState
    request: Request
    body: Body
    model: str
    """The name to answer with."""
    deadline: float

    @property
    def request_id(self) -> str:
        """Of the HTTP request: for the answer's id, the response header and the log."""
        return str(self.request.state.request_id)

    @property
    def owner(self) -> int:
        """A number for whoever asks."""
        return owner_of(self.request.scope)

    async def work(self, work: Coroutine[Any, Any, Result]) -> Result:
        """`work`, ended when the client goes or the time is up. Raises ClientGone, PhalanxError."""
        return await self.state.in_flight.run(work, self.request.receive, self.deadline)

    async def reply(self, generation: Generation, work: Coroutine[Any, Any, msgspec.Struct]) -> Response:
        """The answer that is not streamed. Whatever happens, nothing of the request is left in the engine."""
        try:
            return json_response(await self.work(work))
        except BaseException as error:
            generation.failed(error)
            raise
        finally:
            await generation.close()

    def stream(self, generation: Generation, frames: AsyncGenerator[bytes, None]) -> EventStream:
        def failed(error: BaseException) -> None:
            generation.failed(error)
            if _is_bug(error):
                log_bug(error, self.request_id)

        return EventStream(
            frames,
            self.state.in_flight,
            deadline=self.deadline,
            keep_alive=self.state.config.server.sse_keep_alive_interval,
            request_id=self.request_id,
            on_failure=failed,
            close=generation.close,
        )


async def receive_call(state: ServerState, request: Request, kind: type[Body]) -> Call[Body]:
    """Raises PhalanxError, ClientGone."""
    deadline = state.in_flight.deadline()
    body = await state.bodies.read(request, kind)
    if body.model_extra:
        refuse_unsupported(body.model_extra, state.unknown_fields)
    request_id = getattr(body, "request_id", None)
    if request_id is not None:
        if not sane_request_id(request_id):
            raise InvalidRequest("`request_id` must be 1 to 128 printable ASCII characters.", param="request_id")
        request.state.request_id = request_id
    salt = getattr(body, "cache_salt", None)
    if salt == "":
        raise InvalidRequest("`cache_salt` must not be empty.", param="cache_salt")
    return Call(state, request, body, state.check_model(body.model), deadline)


def answer_id(prefix: str, request_id: str) -> str:
    """Such as `chatcmpl-…`; letters, digits and a few signs only."""
    return f"{prefix}-{re.sub(r'[^A-Za-z0-9_.:-]', '_', request_id)}"


def _is_bug(error: BaseException) -> bool:
    return not isinstance(error, (PhalanxError, ClientGone))

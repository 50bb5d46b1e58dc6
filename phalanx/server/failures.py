"""From an exception to an HTTP answer: always OpenAI's full error object, never our insides and never the prompt.

Covers status, `Retry-After`, `x-should-retry` and the body. Does not cover the error frame inside a stream, which is
the same body sent by `streaming`.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.responses import Response

from phalanx.errors import EngineDead, InvalidRequest, PhalanxError, Unavailable

MAX_REPORTED = 10
"""Invalid values named in one answer; the rest is only counted."""

MAX_MESSAGE = 8192
"""Characters of an error message; with the escapes of JSON the body stays under 16 KB for ordinary text."""

MAX_BODY = 16 * 1024

RETRY_AFTER_RANGE = (1, 60)
"""Whole seconds. The openai client gives up when it is told to wait more than 120."""

_encode = msgspec.json.Encoder().encode


class HttpError(PhalanxError):
    """A refusal that only HTTP knows (method, content type, key, origin): the status is given by the raiser."""

    type = "invalid_request_error"

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        headers: dict[str, str] | None = None,
        **details: Any,
    ):
        super().__init__(message, **details)
        self.status = status
        if type is not None:
            self.type = type
        self.headers = headers or {}


class ClientGone(Exception):
    """The client closed the connection. Counted as status 499; nothing is sent."""


def internal_error(request_id: str) -> PhalanxError:
    """What a client may know of a bug of ours: that it happened, and the id under which the log has it."""
    return PhalanxError(f"Internal error while handling request {request_id}.", fix="See the server's log.")


def error_body(error: PhalanxError) -> bytes:
    """The JSON body, at most 16 KB."""
    body = error.body()
    message = body["error"]["message"]
    if len(message) > MAX_MESSAGE:
        body["error"]["message"] = message[:MAX_MESSAGE] + " …"
    data = _encode(body)
    if len(data) > MAX_BODY:
        body["error"]["message"] = message[: MAX_MESSAGE // 4] + " …"
        data = _encode(body)
    return data


def error_headers(error: PhalanxError) -> dict[str, str]:
    headers = dict(getattr(error, "headers", {}))
    retry_after = error.retry_after
    if retry_after is None and isinstance(error, (Unavailable, EngineDead)):
        retry_after = 1.0
    if retry_after is not None:
        low, high = RETRY_AFTER_RANGE
        headers["Retry-After"] = str(min(max(math.ceil(retry_after), low), high))
    if error.status == 500 or error.retryable is False:
        headers["x-should-retry"] = "false"  # the same request would meet the same end again
    return headers


def error_response(error: PhalanxError) -> Response:
    return Response(error_body(error), error.status, error_headers(error), media_type="application/json")


def invalid_fields(error: ValidationError) -> InvalidRequest:
    """The first invalid fields, by name and reason. Values are left out: they may be parts of a prompt."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    lines, missing = [], True
    for item in found[:MAX_REPORTED]:
        where = field_path(item["loc"])
        missing &= item["type"] == "missing"
        reason = item["msg"].removeprefix("Value error, ")
        lines.append(f"`{where}`: {reason}." if where else f"{reason}.")
    if len(found) > MAX_REPORTED:
        lines.append(f"({len(found) - MAX_REPORTED} more problems are not shown.)")
    code = "missing_required_parameter" if missing else "invalid_value"
    return InvalidRequest(" ".join(lines), param=field_path(found[0]["loc"]) or None, code=code)


def field_path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "content")` as `messages[0].content`, without the names of union members."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier():
            path += f".{part}" if path else part
    return path[:200]

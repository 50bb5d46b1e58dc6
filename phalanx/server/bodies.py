"""Reads a request's JSON body under limits, before anything looks at what it says.

Refused here: other content types, compressed bodies, bodies that are too large or arrive too slowly (chunked ones
too), text that is not strict JSON (duplicate keys, NaN, numbers beyond a double, deep nesting), and bodies that are
not an object.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from phalanx.errors import InvalidRequest, QueueFull, RequestTooLarge
from phalanx.server.failures import ClientGone, HttpError, invalid_fields

MAX_DEPTH = 128
"""Levels of arrays and objects in a body."""

GRACE_S = 15.0
MIN_BYTES_PER_S = 4096
"""A body has `GRACE_S` seconds, and one more for every `MIN_BYTES_PER_S` that have arrived."""

MAX_HELD = 256 * 2**20
"""Bytes of bodies that are being received or parsed, over all requests."""

LARGE = 64 * 1024
"""Bodies above this many bytes are parsed on a thread, so that the event loop goes on serving others."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

_CLOSE = {"Connection": "close"}

Body = TypeVar("Body", bound=BaseModel)


class BodyReader:
    """Reads the bodies of one application, and holds at most `MAX_HELD` bytes (or one whole body) of them at a time."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._max_held = max(MAX_HELD, max_bytes)
        self._held = 0

    async def read(self, request: Request, kind: type[Body]) -> Body:
        """The body as a `kind`. Raises InvalidRequest, RequestTooLarge, HttpError (408, 415), QueueFull, ClientGone."""
        check_headers(request, self._max_bytes)
        mine = 0

        def hold(size: int) -> None:
            nonlocal mine
            if self._held + size > self._max_held:
                raise _too_much_at_once()
            self._held += size
            mine += size

        try:
            data = await read_bytes(request, self._max_bytes, hold)
            if len(data) > LARGE:
                return await asyncio.to_thread(parse, data, kind)
            return parse(data, kind)
        finally:
            self._held -= mine


def parse(data: bytes, kind: type[Body]) -> Body:
    """Raises InvalidRequest."""
    content = parse_json(data)
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise invalid_fields(error) from None
    except RecursionError:
        raise _too_deep() from None


def check_headers(request: Request, max_bytes: int) -> None:
    headers = request.headers
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise HttpError(
            415,
            "Compressed request bodies are not accepted.",
            fix="Send the body without Content-Encoding.",
            code="unsupported_content_encoding",
            headers=_CLOSE,
        )
    media, _, parameters = headers.get("content-type", "").partition(";")
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    if media.strip().lower() != "application/json" or charset not in ("", "utf-8", "utf8"):
        raise HttpError(
            415,
            "The request body must be JSON in UTF-8.",
            fix="Send `Content-Type: application/json`.",
            code="unsupported_content_type",
            headers=_CLOSE,
        )
    length = headers.get("content-length", "")
    if length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > max_bytes):
        raise _too_large(max_bytes)


async def read_bytes(request: Request, max_bytes: int, hold: Callable[[int], None]) -> bytes:
    """`hold` is told of every piece before it is kept, and may refuse it."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    chunks: list[bytes] = []
    size = 0
    while True:
        deadline = started + GRACE_S + size / MIN_BYTES_PER_S
        try:
            async with asyncio.timeout_at(deadline):
                message = await request.receive()
        except TimeoutError:
            raise HttpError(
                408, "The request body arrived too slowly.", type="timeout_error", code="timeout", headers=_CLOSE
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        hold(len(chunk))
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def parse_json(data: bytes) -> dict[str, Any]:
    """Strict JSON: one object, no duplicate keys, only finite numbers, at most `MAX_DEPTH` levels."""
    try:
        content = json.loads(
            data.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite
        )
    except RecursionError:
        raise _too_deep() from None
    except UnicodeDecodeError:
        raise InvalidRequest("The request body is not UTF-8.", code="invalid_json") from None
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"The request body is not valid JSON: {error.msg} at character {error.pos}.", code="invalid_json"
        ) from None
    except ValueError:  # an integer with thousands of digits
        raise InvalidRequest("A number in the request body has too many digits.", code="invalid_json") from None
    if _SURROGATE.search(data) and not _encodable(content):
        raise InvalidRequest("A string in the request body has half a surrogate pair.", code="invalid_json")
    if not isinstance(content, dict):
        raise InvalidRequest("The request body must be a JSON object.", code="invalid_json")
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _deeper_than(content, MAX_DEPTH):
        raise _too_deep()
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise InvalidRequest("An object in the request body has the same key twice.", code="invalid_json")
    return content


def _encodable(content: Any) -> bool:
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


def _refuse_constant(name: str) -> Any:
    raise InvalidRequest(f"{name} is not JSON.", code="invalid_json")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise InvalidRequest("A number in the request body is too large.", code="invalid_json")
    return value


def _deeper_than(content: Any, limit: int) -> bool:
    level = [content]
    for _ in range(limit):
        below = []
        for item in level:
            for child in item.values() if isinstance(item, dict) else item:
                if isinstance(child, (dict, list)):
                    below.append(child)
        if not below:
            return False
        level = below
    return True


def _too_deep() -> InvalidRequest:
    return InvalidRequest(f"The request body is nested deeper than {MAX_DEPTH} levels.", code="invalid_json")


def _too_much_at_once() -> QueueFull:
    error = QueueFull("Too many large requests are arriving at once.", fix="Try again soon.", retry_after=2.0)
    error.headers = dict(_CLOSE)  # type: ignore[attr-defined]
    return error


def _too_large(max_bytes: int) -> RequestTooLarge:
    error = RequestTooLarge(
        f"The request body is larger than {max_bytes} bytes.", fix="Send less, or raise --max-body-bytes on the server."
    )
    error.headers = dict(_CLOSE)  # type: ignore[attr-defined]
    return error

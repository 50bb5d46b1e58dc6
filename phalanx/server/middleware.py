"""What every HTTP request passes before a route sees it, from the outside in: `CrossOrigin` (CORS, when allowed),
`RequestBoundary` (id, last resort, metrics, access log), `KeyGuard`, `BrowserGuard` (foreign hosts and origins),
`Admission` (loading, draining, too many at once).

Plain ASGI, so that nothing buffers a stream. A guard refuses by raising PhalanxError. All decisions are made on
`scope["path"]`, the very text that routing uses, never on a URL put together from headers. Does not read bodies.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
import time
import traceback
import uuid
from collections.abc import Callable, Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phalanx.engine.queue import SHARE
from phalanx.errors import Draining, Loading, PhalanxError, QueueFull
from phalanx.logging import escape
from phalanx.metrics.serving import ServingMetrics
from phalanx.server.failures import ClientGone, HttpError, error_response, internal_error
from phalanx.server.places import Places

logger = logging.getLogger("phalanx.server")
access_logger = logging.getLogger("phalanx.server.access")

PUBLIC_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ping"})
"""Answered without a key. Every other path, known or not, needs one where a key is set."""

ALWAYS_PATHS = PUBLIC_PATHS | {"/status", "/metrics", "/version", "/server_info", "/docs", "/openapi.json"}
"""Answered while loading and draining, and not counted against the limit of concurrent requests."""

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

_REQUEST_ID = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]{0,126}[\x21-\x7e])?")


def sane_request_id(text: str) -> bool:
    """1 to 128 printable ASCII characters, no space at either end."""
    return _REQUEST_ID.fullmatch(text) is not None


def header_values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


class RequestBoundary:
    """Gives each request its id (the client's `X-Request-Id` when sane), turns what was raised below into an
    answer, counts it, and writes the access log if there is one. Pieces of a stream may go by `state["send"]`, past
    everybody who is only interested in how an answer begins."""

    def __init__(self, app: ASGIApp, metrics: ServingMetrics, access_log: bool):
        self._app = app
        self._metrics = metrics
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        request_id = self._request_id(scope)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["send"] = send
        status = 0

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", state["request_id"].encode("ascii"))]
            await send(message)

        self._metrics.in_flight.inc()
        try:
            await self._app(scope, receive, tagged)
        except ClientGone:
            pass  # nobody to answer
        except PhalanxError as error:
            if not status:
                await error_response(error)(scope, receive, tagged)
        except Exception as error:
            log_bug(error, request_id)
            if not status:
                await error_response(internal_error(request_id))(scope, receive, tagged)
        finally:
            del state["send"]  # it knows the scope: a circle for the collector
            self._metrics.in_flight.dec()
            self._record(scope, status or 499, time.monotonic() - started)

    def _request_id(self, scope: Scope) -> str:
        given = header_values(scope, b"x-request-id")
        text = given[0].decode("latin-1") if len(given) == 1 else ""
        return text if sane_request_id(text) else uuid.uuid4().hex

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        route = scope["state"].get("route", "unknown")
        self._metrics.http(scope["method"], route, status, seconds)
        if self._access_log:
            client = scope.get("client") or ("-",)
            access_logger.info(
                "%s %s %s %d %.1f ms id=%s",
                client[0], escape(scope["method"]), escape(scope["path"]), status, seconds * 1000,
                scope["state"]["request_id"],
            )  # fmt: skip


def log_bug(error: BaseException, request_id: str) -> None:
    """Where it happened, without the exception's message: that may hold a piece of a prompt."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.error("Bug: %s while handling request %s:\n%s", type(error).__name__, request_id, frames)


class CrossOrigin:
    """CORS for the origins that the operator allows. Answers their preflight requests, which browsers send without a
    key."""

    def __init__(self, app: ASGIApp, allowed: Iterable[str]):
        self._app = app
        self._allowed = frozenset(origin.rstrip("/").lower() for origin in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origins = header_values(scope, b"origin") if scope["type"] == "http" and self._allowed else []
        if len(origins) != 1 or not origin_allowed(origins[0].decode("latin-1"), self._allowed):
            await self._app(scope, receive, send)
            return
        headers = [
            (b"access-control-allow-origin", origins[0]),
            (b"vary", b"Origin"),
            (b"access-control-expose-headers", b"X-Request-Id, Retry-After, x-should-retry"),
        ]
        if scope["method"] == "OPTIONS" and header_values(scope, b"access-control-request-method"):
            headers += [
                (b"access-control-allow-methods", b"GET, POST"),
                (b"access-control-allow-headers", b"Authorization, Content-Type, X-Request-Id, *"),
                (b"access-control-max-age", b"600"),
            ]
            await send({"type": "http.response.start", "status": 204, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *headers]
            await send(message)

        await self._app(scope, receive, marked)


def origin_allowed(origin: str, allowed: frozenset[str]) -> bool:
    return "*" in allowed or origin.lower() in allowed


class KeyGuard:
    """`Authorization: Bearer KEY` on every path that is not public. Keys are compared as digests, in constant time, and
    all of them, so that time says nothing about which one nearly fitted. Where there are several, the number of the one
    that was given, from 1 on, is the request's `owner`; nothing else of a key goes further."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]):
        self._app = app
        self._digests = [_digest(key.encode()) for key in dict.fromkeys(keys)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digests and scope["path"] not in PUBLIC_PATHS:
            given = header_values(scope, b"authorization")
            number = self._number(given[0] if len(given) == 1 else b"")
            if number is None:
                raise HttpError(
                    401, "A valid API key is required.", fix="Send it as `Authorization: Bearer KEY`.",
                    type="authentication_error", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
                )  # fmt: skip
            scope.setdefault("state", {})["owner"] = number if len(self._digests) > 1 else 0
        await self._app(scope, receive, send)

    def _number(self, header: bytes) -> int | None:
        """Which of the keys `header` has, from 1 on; None when it has none of them."""
        scheme, _, key = header.partition(b" ")
        digest = _digest(key.strip())
        found = 0
        for number, expected in enumerate(self._digests, start=1):
            found += number * hmac.compare_digest(expected, digest)
        return found if found and scheme.lower() == b"bearer" else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class BrowserGuard:
    """Keeps web pages of others away. A request must name an allowed host (which stops DNS rebinding), and one that can
    change something must not come from a foreign page."""

    def __init__(self, app: ASGIApp, allowed_hosts: Iterable[str] | None, allowed_origins: Iterable[str]):
        """`allowed_hosts` None accepts loopback names only; `("*",)` any."""
        self._app = app
        self._hosts = None if allowed_hosts is None else tuple(host.lower() for host in allowed_hosts)
        self._origins = frozenset(origin.rstrip("/").lower() for origin in allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            hosts = header_values(scope, b"host")
            authority = hosts[0].decode("latin-1").lower() if len(hosts) == 1 else ""
            host = host_of(authority)
            if host is None and not (scope.get("http_version") == "1.0" and not hosts):
                raise HttpError(400, "The Host header is missing or malformed.", code="invalid_host")
            if host is not None and not self._host_allowed(host):
                raise HttpError(
                    403, "This host name is not served here.", fix="Its operator can allow it with --allowed-hosts.",
                    type="permission_error", code="host_not_allowed",
                )  # fmt: skip
            if scope["method"] not in _SAFE_METHODS and self._foreign(scope, authority):
                raise HttpError(
                    403, "Requests from web pages of other origins are refused.",
                    fix="Its operator can allow an origin with --allowed-origins.",
                    type="permission_error", code="origin_not_allowed",
                )  # fmt: skip
        await self._app(scope, receive, send)

    def _host_allowed(self, host: str) -> bool:
        if self._hosts is None:
            return is_loopback(host)
        return any(
            pattern in ("*", host) or (pattern.startswith("*.") and host.endswith(pattern[1:]))
            for pattern in self._hosts
        )

    def _foreign(self, scope: Scope, authority: str) -> bool:
        origins = [value.decode("latin-1").lower() for value in header_values(scope, b"origin")]
        if any(
            not origin_allowed(origin, self._origins) and origin != f"{scope['scheme']}://{authority}"
            for origin in origins
        ):
            return True
        sites = {value.strip().lower() for value in header_values(scope, b"sec-fetch-site")}
        return not origins and not sites <= {b"same-origin", b"none"}


_NAME = re.compile(r"[a-z0-9_](?:[a-z0-9_.-]{0,252}[a-z0-9_.])?")


def host_of(authority: str) -> str | None:
    """The name or address of a Host header, without port, brackets and final dot; None when it is malformed."""
    match = re.fullmatch(r"(\[[0-9a-f:.]+\]|[^:\[\]]*)(?::(\d{1,5}))?", authority)
    if not match:
        return None
    host = match[1]
    if host.startswith("["):
        try:
            return str(ipaddress.IPv6Address(host[1:-1]))
        except ValueError:
            return None
    return host.rstrip(".") if _NAME.fullmatch(host) else None


def is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def owner_of(scope: Scope) -> int:
    """The number of the API key, where there are several; else 0."""
    owner: int = scope.get("state", {}).get("owner", 0)
    return owner


class Admission:
    """Lets requests in while the model is ready and a place is free; no owner can take all places (`engine.queue`)."""

    def __init__(self, app: ASGIApp, phase: Callable[[], str], places: Places, max_concurrent: int):
        self._app = app
        self._phase = phase
        self._places = places
        self._max = max_concurrent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in ALWAYS_PATHS:
            await self._app(scope, receive, send)
            return
        phase = self._phase()
        if phase == "loading":
            raise Loading("The model is still loading.", fix="Try again soon.", retry_after=5.0)
        if phase == "draining":
            raise Draining("The server is shutting down.", retry_after=5.0)
        owner, left = owner_of(scope), self._max - self._places.taken
        own = self._places.taken_by(owner) if owner else 0
        if left <= 0 or own >= SHARE * left:
            full = f"{self._max} requests are being handled, the most this server takes at once."
            mine = f"{own} requests with this API key are being handled, and few places are left."
            raise QueueFull(full if left <= 0 else mine, fix="Try again soon.", retry_after=1.0)
        self._places.take(owner)
        try:
            await self._app(scope, receive, send)
        finally:
            self._places.leave(owner)


def allowed_hosts(configured: tuple[str, ...], *, bind_host: str, has_key: bool) -> tuple[str, ...] | None:
    """What `--allowed-hosts` means: by default any name with a key or a bind to the network, else loopback names."""
    if configured:
        return configured
    return ("*",) if has_key or not is_loopback(bind_host) else None

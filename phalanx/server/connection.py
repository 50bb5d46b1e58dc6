"""One HTTP/1.1 connection with limits that uvicorn's own protocol does not have: size and number of headers (431), and
time to send them (408). Also speaks JSON when a request cannot be parsed.

Bodies are limited in `bodies`, where the route's limit is known.
"""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import dataclass
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from phalanx.server.failures import HttpError, error_body


@dataclass(frozen=True)
class HeaderLimits:
    bytes: int = 64 * 1024
    """Request line and headers together."""
    count: int = 256
    seconds: float = 10.0
    """From the first byte (or the opening of the connection) to the end of the headers."""


LINGER_S = 1.0
"""A refused client may go on sending for so long. Closing at once would reset the connection, and the client might lose
the answer that says why."""


class _HeadersTooLarge(Exception):
    pass


class _LingeringTransport:
    """The connection's transport, except that `close` in the middle of a request says goodbye first: no more from us,
    and for a moment what still comes is read and dropped."""

    def __init__(self, transport: asyncio.Transport, protocol: LimitedHttpProtocol):
        self._transport = transport
        self._protocol = weakref.ref(protocol)  # no circle, which the collector would have to find
        self._leaving = False
        self.write = transport.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._leaving or self._transport.is_closing()

    def close(self) -> None:
        protocol = self._protocol()
        if self.is_closing() or protocol is None or not protocol.in_request or not self._transport.can_write_eof():
            self._transport.close()
            return
        self._leaving = True
        self._transport.write_eof()
        protocol.ignore_the_rest()
        protocol.loop.call_later(LINGER_S, self._transport.close)


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn constructs one for each connection; `limits` is bound with functools.partial."""

    def __init__(self, limits: HeaderLimits, **arguments: Any):
        super().__init__(**arguments)
        self._limits = limits
        self._in_head = False
        self._head_bytes = 0
        self._refused = False
        """Nothing more is read on this connection."""
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast("asyncio.Transport", _LingeringTransport(transport, self)))
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused or self.parser is None:
            return
        self._unset_keepalive_if_required()
        if self.cycle is None or self.cycle.response_complete:
            self._start_head_timer()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # no other protocol is spoken here; the request is answered as plain HTTP
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, _HeadersTooLarge):
                self._refuse_head_size()
            else:
                self._refuse(400, "The HTTP request cannot be parsed.", "invalid_http")
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.bytes:
                self._refuse_head_size()

    # Parser callbacks

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self._limits.bytes:
            raise _HeadersTooLarge

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > self._limits.count:
            raise _HeadersTooLarge

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_head_timer()
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > self._limits.bytes:
            raise _HeadersTooLarge
        super().on_headers_complete()

    # Time and refusals

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._limits.seconds, self._head_timed_out)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_timed_out(self) -> None:
        self._head_timer = None
        if self._in_head:
            self._refuse(408, "The request's headers arrived too slowly.", "timeout", type="timeout_error")
        elif not self.transport.is_closing():
            self.transport.close()

    def _refuse_head_size(self) -> None:
        limits = self._limits
        message = f"The request's headers are larger than {limits.bytes} bytes or more than {limits.count}."
        self._refuse(431, message, "headers_too_large")

    def _refuse(self, status: int, message: str, code: str, **details: Any) -> None:
        self._refused = True
        self._stop_head_timer()
        if self.transport.is_closing():
            return
        answering = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if not answering:  # never into the middle of another answer
            body = error_body(HttpError(status, message, code=code, **details))
            head = [STATUS_LINE[status], b"content-type: application/json\r\n", b"connection: close\r\n"]
            self.transport.write(b"".join([*head, b"content-length: %d\r\n\r\n" % len(body), body]))
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # its body will never be complete
            self.cycle.message_event.set()
        self.transport.close()

    # For the transport

    @property
    def in_request(self) -> bool:
        """Whether the client has not finished sending what we answer to."""
        return self._refused or self._in_head or (self.cycle is not None and self.cycle.more_body)

    def ignore_the_rest(self) -> None:
        self._refused = True
        self.flow.resume_reading()

    def _unsupported_upgrade_warning(self) -> None:
        """Not worth a line in the log, which a client could fill with it."""

"""`HttpFront`: one application on a listening socket, and how its requests end when the server does."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import uvicorn
from fastapi import FastAPI

from phalanx.errors import Draining
from phalanx.server.connection import HeaderLimits, LimitedHttpProtocol
from phalanx.server.listening import BACKLOG
from phalanx.server.process import LAST_WORDS_S
from phalanx.server.state import ServerState

KEEP_ALIVE_S = 30
"""An idle connection is kept so long for the client's next request."""

DRAIN_REPORT_S = 5.0

FLUSH_S = 0.05
"""For what has been said to reach the kernel."""


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling: what a signal means is decided here, for HTTP and engine together."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpFront:
    """It listens from the start; `stop` ends it, and then `listening` is done."""

    def __init__(self, app: FastAPI, listener: socket.socket, tls: ssl.SSLContext | None):
        self._state: ServerState = app.state.server
        self._http = self._server(app, tls)
        self._until = float("inf")
        self.listening = asyncio.create_task(self._http.serve([listener]))

    def _server(self, app: FastAPI, tls: ssl.SSLContext | None) -> _HttpServer:
        for name in ("uvicorn", "uvicorn.error"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # requests log for themselves
        settings = uvicorn.Config(
            app,
            http=cast("type[asyncio.Protocol]", functools.partial(LimitedHttpProtocol, HeaderLimits())),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
            ssl_context_factory=None if tls is None else lambda config, default: tls,
        )
        return _HttpServer(settings)

    async def last_words(self) -> None:
        """Requests end by themselves, each with an error; so long that takes."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LAST_WORDS_S
        while len(self._state.in_flight) and loop.time() < deadline:  # noqa: ASYNC110 (once in a lifetime)
            await asyncio.sleep(0.02)

    def hurry(self, seconds: float) -> None:
        """`drain` may take so long from now, and not longer than it may anyway."""
        self._until = min(self._until, asyncio.get_running_loop().time() + seconds)

    async def drain(self, report: Callable[[int, float], None] = lambda running, seconds: None) -> None:
        """Let running requests finish, until `hurry` allows no more; then end the rest with an error that their clients
        see. `report` is told now and then how many are left, and for how many seconds at most."""
        self._state.draining = True
        loop, next_report = asyncio.get_running_loop(), 0.0
        while len(self._state.in_flight) and (now := loop.time()) < self._until:
            if now >= next_report:
                next_report = now + DRAIN_REPORT_S
                report(len(self._state.in_flight), self._until - now)
            await asyncio.sleep(0.05)
        ended = self._state.in_flight.fail_all(Draining("The server is shutting down.", retry_after=5.0))
        if ended:
            print(f"Shutting down: {ended} request(s) ended before they were done.", file=sys.stderr, flush=True)
        await self.last_words()

    def stop(self) -> None:
        self._state.draining = True
        self._http.should_exit = True


def say_draining(running: int, seconds: float) -> None:
    left = f"{running} request(s) running, at most {seconds:.0f} s more"
    print(f"Shutting down: {left}.", file=sys.stderr, flush=True)

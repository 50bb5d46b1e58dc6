"""`serve`: from a configuration to a running server and back to a clean end.

The port is taken first, so that a wrong one is noticed before a model is loaded; HTTP answers while the model loads.
SIGTERM drains: readiness and new requests get 503, running ones may finish for `shutdown_timeout` seconds, the rest get
an error, and the exit code is 0. SIGINT (Ctrl-C) ends running requests at once. A second signal ends the process as
soon as running requests have their error, a third on the spot. When the engine is lost and nothing helps, requests end
with an error and the exit code is 1.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import functools
import logging
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import uvicorn

from phalanx.config import EngineConfig, ServerConfig
from phalanx.engine.async_engine import AsyncEngine
from phalanx.engine.client import EngineInfo, EngineLost
from phalanx.errors import ConfigError, Draining
from phalanx.logging import configure
from phalanx.server.app import create_app
from phalanx.server.connection import HeaderLimits, LimitedHttpProtocol
from phalanx.server.middleware import is_loopback
from phalanx.server.progress import LoadingLine
from phalanx.server.state import ServerState
from phalanx.server.summary import base_url, summary

logger = logging.getLogger("phalanx.server")

BACKLOG = 2048
KEEP_ALIVE_S = 30
"""An idle connection is kept so long for the client's next request."""

LAST_WORDS_S = 1.0
"""For the error frames of requests that shutdown ends, and then for connections to close."""

FLUSH_S = 0.05
"""For what has been said to reach the kernel."""

DRAIN_REPORT_S = 5.0

LOOK_S = 5.0
"""Recoveries are counted at least so often, also when nobody asks."""


def serve(config: EngineConfig) -> int:
    """Serve until a signal; returns the exit code. Raises ConfigError for an address or a certificate that cannot be
    used, UserError when the model cannot be loaded; nothing is left running then."""
    own_threads = set(threading.enumerate())
    configure(config.server.log_level, config.server.log_format)
    tls = tls_context(config.server)
    listener = bind(config.server)
    port = listener.getsockname()[1]
    config = dataclasses.replace(config, server=dataclasses.replace(config.server, port=port))
    if not is_loopback(config.server.host) and not config.server.api_key:
        logger.warning("Listening on %s without an API key: everyone who can connect may use it.", config.server.host)
    with listener:
        code = _run(_Serving(config, listener, tls))
    _leave_threads(own_threads, code)
    return code


def _run(serving: _Serving) -> int:
    """On an event loop of its own, which is not kept waiting by threads that cannot be interrupted."""
    loop = _new_loop()
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(serving.run())
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        asyncio.set_event_loop(None)
        loop.close()


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _leave_threads(own: set[threading.Thread], code: int) -> None:
    """A download in a thread cannot be interrupted, and Python would wait for it at exit; leave without it."""
    left = [thread for thread in threading.enumerate() if thread not in own and not thread.daemon]
    for thread in left:
        thread.join(timeout=0.2)
    if any(thread.is_alive() for thread in left):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# ------------------------------------------------------------------------------------------------ address and TLS


def bind(server: ServerConfig) -> socket.socket:
    """A listening socket. Raises ConfigError."""
    if not 0 <= server.port <= 65535:
        raise ConfigError(f"--port is {server.port}; it must be between 0 and 65535.")
    try:
        found = socket.getaddrinfo(server.host or None, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        fix = "Give --host an address of this machine."
        raise ConfigError(f"The address '{server.host}' is unknown.", fix=fix) from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _bind_failure(server, error) from None
    return listener


def _bind_failure(server: ServerConfig, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"Port {server.port} on {server.host} is in use by another program.",
            fix="Choose another with --port (0 takes a free one).",
        )
    if error.errno == errno.EACCES:
        return ConfigError(f"Port {server.port} needs more rights.", fix="Choose a --port from 1024 on.")
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(f"{server.host} is not an address of this machine.", fix="Give another --host.")
    return ConfigError(f"Cannot listen on {server.host}, port {server.port}: {error.strerror}.")


def tls_context(server: ServerConfig) -> ssl.SSLContext | None:
    """None without TLS. Raises ConfigError."""
    if not (server.ssl_certfile or server.ssl_keyfile or server.ssl_ca_certs):
        return None
    if not (server.ssl_certfile and server.ssl_keyfile):
        raise ConfigError("TLS needs a key and a certificate.", fix="Give both --ssl-keyfile and --ssl-certfile.")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def no_password() -> str:
        raise ConfigError("The TLS key is encrypted.", fix="Give an unencrypted --ssl-keyfile that only you can read.")

    try:
        context.load_cert_chain(server.ssl_certfile, server.ssl_keyfile, password=no_password)
        if server.ssl_ca_certs:
            context.load_verify_locations(server.ssl_ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    except ssl.SSLError as error:
        why = error.reason or "not PEM"
        raise ConfigError(f"The TLS files cannot be used: {why}.", fix="They must be PEM files that fit.") from None
    except OSError as error:
        raise ConfigError(f"The TLS files cannot be read: {error.strerror}.", fix="Check the --ssl-… paths.") from None
    return context


# ---------------------------------------------------------------------------------------------------- the server


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling: what a signal means is decided here, for HTTP and engine together."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Stop:
    """The first signal, as an event; the second one ends the process, after a moment for last words."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.asked = asyncio.Event()
        self.signal: signal.Signals | None = None
        self.second: signal.Signals | None = None
        self._loop = loop
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._received, number)

    def _received(self, number: signal.Signals) -> None:
        if self.signal is None:
            self.signal = number
            self.asked.set()
        elif self.second is None:
            print(f"Second {number.name}: ended at once.", file=sys.stderr, flush=True)
            self.second = number
            self._loop.call_later(LAST_WORDS_S, self.exit)
        else:
            self.exit()

    def exit(self) -> None:
        """On the spot. The engine process ends when it loses us."""
        os._exit(128 + (self.second or 0))


class _Serving:
    """One run of the server, from loading to the end."""

    def __init__(self, config: EngineConfig, listener: socket.socket, tls: ssl.SSLContext | None):
        self._config = config
        self._listener = listener
        self._tls = tls

    async def run(self) -> int:
        stop = _Stop(asyncio.get_running_loop())
        engine = AsyncEngine(self._config)
        app = create_app(engine, self._config)
        state: ServerState = app.state.server
        http = self._http_server(app)
        listening = asyncio.create_task(http.serve([self._listener]))
        asked = asyncio.create_task(stop.asked.wait())
        line = LoadingLine()
        loading = asyncio.create_task(engine.start(line))
        lost: asyncio.Task[EngineLost] | None = None
        try:
            await asyncio.wait((loading, asked, listening), return_when=asyncio.FIRST_COMPLETED)
            line.finish()
            if not loading.done():
                print("Stopped while loading.", file=sys.stderr, flush=True)
                return 128 + signal.SIGINT if stop.signal == signal.SIGINT else 0
            self._announce(engine, loading.result(), state)
            lost = asyncio.create_task(self._lost_for_good(engine, state))
            await asyncio.wait((asked, listening, lost), return_when=asyncio.FIRST_COMPLETED)
            if not lost.done():
                await self._drain(state, stop)
            return await self._end_lost(lost.result(), state) if lost.done() else 0
        finally:
            state.draining = True
            for task in (asked, loading, lost):
                if task is not None:
                    task.cancel()
            http.should_exit = True
            await asyncio.gather(loading, return_exceptions=True)
            await asyncio.gather(engine.close(), listening, return_exceptions=True)

    def _http_server(self, app: Any) -> _HttpServer:
        for name in ("uvicorn", "uvicorn.error"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # requests log for themselves
        tls = self._tls
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

    def _announce(self, engine: AsyncEngine, info: EngineInfo, state: ServerState) -> None:
        template = engine.chat_template
        has_chat = template is not None and template.source is not None
        config = dataclasses.replace(engine.config, server=self._config.server)
        print(summary(config, info, engine.status(), state.model_names(), has_chat=has_chat), flush=True)
        print(f"Ready: {base_url(self._config.server)}", flush=True)

    async def _lost_for_good(self, engine: AsyncEngine, state: ServerState) -> EngineLost:
        """Returns when the server has no more reason to be. With recovery switched off it stays, and says what is
        wrong, until somebody ends it."""
        lost = asyncio.create_task(engine.lost())
        try:
            while not lost.done() or not self._config.recovery.enable_recovery:
                await asyncio.wait((lost,), timeout=LOOK_S) if not lost.done() else await asyncio.sleep(LOOK_S)
                state.status()
            return lost.result()
        finally:
            lost.cancel()

    async def _end_lost(self, loss: EngineLost, state: ServerState) -> int:
        """The streams end by themselves, each with an error; then there is one line to say."""
        state.draining = True
        await self._last_words(state)
        print(f"error: {loss}", file=sys.stderr, flush=True)
        return 1

    async def _last_words(self, state: ServerState) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LAST_WORDS_S
        while len(state.in_flight) and loop.time() < deadline:  # noqa: ASYNC110 (once in a lifetime)
            await asyncio.sleep(0.02)

    async def _drain(self, state: ServerState, stop: _Stop) -> None:
        """Let running requests finish, then end the rest with an error that their clients see."""
        state.draining = True
        seconds = 0.0 if stop.signal == signal.SIGINT else self._config.server.shutdown_timeout
        loop = asyncio.get_running_loop()
        now = loop.time()
        deadline, report = now + seconds, now
        while len(state.in_flight) and (now := loop.time()) < deadline and stop.second is None:
            if now >= report:
                report = now + DRAIN_REPORT_S
                left = f"{len(state.in_flight)} request(s) running, at most {deadline - now:.0f} s more"
                print(f"Shutting down: {left}.", file=sys.stderr, flush=True)
            await asyncio.sleep(0.05)
        ended = state.in_flight.fail_all(Draining("The server is shutting down.", retry_after=5.0))
        if ended:
            print(f"Shutting down: {ended} request(s) ended before they were done.", file=sys.stderr, flush=True)
        await self._last_words(state)
        if stop.second is not None:
            await asyncio.sleep(FLUSH_S)
            stop.exit()
        print("Stopped.", file=sys.stderr, flush=True)

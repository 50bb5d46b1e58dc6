"""`serve`: from a configuration to a running server and back to a clean end.

The port is taken first, so that a wrong one is noticed before a model is loaded; HTTP answers while the model loads.
SIGTERM drains: readiness and new requests get 503, running ones may finish for `shutdown_timeout` seconds, the rest get
an error, and the exit code is 0. SIGINT (Ctrl-C) ends running requests at once. A second signal ends the process as
soon as running requests have their error, a third on the spot. When the engine is lost and nothing helps, requests end
with an error and the exit code is 1. All this holds for several server processes as for one (`server.several`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
import socket
import ssl
import sys
import threading

from phalanx.config import EngineConfig
from phalanx.engine.async_engine import AsyncEngine
from phalanx.engine.client import EngineInfo, EngineLost
from phalanx.logging import configure
from phalanx.lossy_output import never_wait
from phalanx.server.app import create_app
from phalanx.server.http import FLUSH_S, HttpFront, say_draining
from phalanx.server.listening import bind, check, tls_context
from phalanx.server.middleware import is_loopback
from phalanx.server.process import Stop, leave_threads, run_to_end, settle
from phalanx.server.progress import LoadingLine
from phalanx.server.state import ServerState
from phalanx.server.summary import base_url, summary

logger = logging.getLogger("phalanx.server")

LOOK_S = 5.0
"""Recoveries are counted at least so often, also when nobody asks."""


def serve(config: EngineConfig) -> int:
    """Serve until a signal; returns the exit code. Raises ConfigError for an address or a certificate that cannot be
    used, UserError when the model cannot be loaded; nothing is left running then."""
    own_threads = set(threading.enumerate())
    never_wait()
    configure(config.server.log_level, config.server.log_format)
    check(config.server)
    tls = tls_context(config.server)
    listener = bind(config.server)
    port = listener.getsockname()[1]
    config = dataclasses.replace(config, server=dataclasses.replace(config.server, port=port))
    if not is_loopback(config.server.host) and not config.server.api_key:
        logger.warning("Listening on %s without an API key: everyone who can connect may use it.", config.server.host)
    with listener:
        if config.server.api_server_count > 1 or config.server.router_listen or config.server.router:
            code = _serve_with_several(config, listener)
        else:
            code = run_to_end(_Serving(config, listener, tls).run())
    leave_threads(own_threads, code)
    return code


def _serve_with_several(config: EngineConfig, listener: socket.socket) -> int:
    """Server processes of their own. Raises ConfigError."""
    from phalanx.engine.remote_servers import open_door
    from phalanx.server.several import Several

    async def run() -> int:
        return await Several(config, listener, door).run()

    door = open_door(config) if config.server.router_listen else None
    with door or contextlib.nullcontext():
        return run_to_end(run())


class _Serving:
    """One run of the server, from loading to the end."""

    def __init__(self, config: EngineConfig, listener: socket.socket, tls: ssl.SSLContext | None):
        self._config = config
        self._listener = listener
        self._tls = tls

    async def run(self) -> int:
        stop = Stop(asyncio.get_running_loop())
        engine = AsyncEngine(self._config)
        app = create_app(engine, self._config)
        state: ServerState = app.state.server
        front = HttpFront(app, self._listener, self._tls)
        asked = asyncio.create_task(stop.asked.wait())
        line = LoadingLine()
        loading = asyncio.create_task(engine.start(line))
        lost: asyncio.Task[EngineLost] | None = None
        try:
            await asyncio.wait((loading, asked, front.listening), return_when=asyncio.FIRST_COMPLETED)
            line.finish()
            if not loading.done():
                print("Stopped while loading.", file=sys.stderr, flush=True)
                return 128 + signal.SIGINT if stop.signal == signal.SIGINT else 0
            info = loading.result()
            settle()
            self._announce(engine, info, state)
            lost = asyncio.create_task(self._lost_for_good(engine, state))
            await asyncio.wait((asked, front.listening, lost), return_when=asyncio.FIRST_COMPLETED)
            if not lost.done():
                await self._drain(front, stop)
            return await self._end_lost(lost.result(), front, state) if lost.done() else 0
        finally:
            front.stop()
            for task in (asked, loading, lost):
                if task is not None:
                    task.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            await asyncio.gather(engine.close(), front.listening, return_exceptions=True)

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

    async def _end_lost(self, loss: EngineLost, front: HttpFront, state: ServerState) -> int:
        """The streams end by themselves, each with an error; then there is one line to say."""
        state.draining = True
        await front.last_words()
        print(f"error: {loss}", file=sys.stderr, flush=True)
        return 1

    async def _drain(self, front: HttpFront, stop: Stop) -> None:
        front.hurry(stop.seconds(self._config.server.shutdown_timeout))
        again = asyncio.create_task(stop.again.wait())
        draining = asyncio.create_task(front.drain(say_draining))
        await asyncio.wait((draining, again), return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
        if stop.second is not None:
            front.hurry(0.0)
        await draining
        if stop.second is not None:
            await asyncio.sleep(FLUSH_S)
            stop.exit()
        print("Stopped.", file=sys.stderr, flush=True)

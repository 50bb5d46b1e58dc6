"""`Several`: several API server processes over one set of engines (`--api-server-count`), on this machine and others.

This process has the engines and their router (with `--router`, the way to those of another machine), starts the servers
and decides how everything ends; it answers no HTTP. Each server is a process of its own (`server.front_end`) that
accepts from the same listening socket. With `--router-listen` servers of other machines may join. What holds for a
server that is one process holds here too: what is printed, what signals mean, the exit code.
"""

from __future__ import annotations

import asyncio
import dataclasses
import mmap
import os
import signal
import socket
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector

from phalanx.config import EngineConfig
from phalanx.engine.client import EngineInfo, EngineLost
from phalanx.engine.core_messages import Start
from phalanx.engine.engines import Engines
from phalanx.engine.front_ends import FrontEnds
from phalanx.engine.remote_router import RemoteEngines, RemoteRouter
from phalanx.engine.remote_servers import RemoteServers
from phalanx.engine.router import Router
from phalanx.metrics.counts import counts
from phalanx.metrics.serving import RecoveryMetrics
from phalanx.server.http import DRAIN_REPORT_S, FLUSH_S, say_draining
from phalanx.server.places import Places, bytes_for
from phalanx.server.process import LAST_WORDS_S, Stop, settle
from phalanx.server.progress import LoadingLine
from phalanx.server.siblings import owners
from phalanx.server.summary import base_url, remote_summary, summary

_T = TypeVar("_T")

LOOK_S = 0.5
"""Between two looks at recoveries, to count them."""
SERVERS_TELL_S = 0.4
"""Within which they have said what they work on."""
SERVERS_END_S = 3.0
"""Beyond the time for requests, for the servers to be gone."""


class Several:
    """One run, from loading to the end."""

    def __init__(self, config: EngineConfig, listener: socket.socket, door: socket.socket | None = None):
        """`door` is where API servers of other machines call."""
        self._config, self._listener, self._door = config, listener, door
        server = config.server
        size = bytes_for(server.api_server_count, owners(server))
        self._memory = os.memfd_create("phalanx-places")
        os.ftruncate(self._memory, size)
        self._places = Places(mmap.mmap(self._memory, size), owners(server))
        self._line = LoadingLine()
        self._engines = self._engines_of(config)
        self._servers: FrontEnds | None = None
        self._elsewhere: RemoteServers | None = None
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._info: EngineInfo | None = None
        self._recoveries = RecoveryMetrics(lambda: self._names()[0], self._registry)

    def _engines_of(self, config: EngineConfig) -> Engines | RemoteEngines:
        if config.server.router is None:
            return Engines(config, progress=self._line, renewed=self._renewed)
        return RemoteEngines(config, say=self._say, progress=self._line, renewed=self._renewed)

    async def run(self) -> int:
        stop = Stop(asyncio.get_running_loop())
        asked = asyncio.create_task(self._asked_to_end(stop))
        loading = asyncio.create_task(self._load())
        ending: asyncio.Task[EngineLost] | None = None
        try:
            await asyncio.wait((loading, asked), return_when=asyncio.FIRST_COMPLETED)
            self._line.finish()
            if not loading.done():
                print("Stopped while loading.", file=sys.stderr, flush=True)
                return 128 + signal.SIGINT if stop.signal == signal.SIGINT else 0
            router, servers = loading.result()
            ending = asyncio.create_task(self._lost_for_good(router))
            await asyncio.wait((asked, ending), return_when=asyncio.FIRST_COMPLETED)
            if not ending.done() or (asked.done() and stop.signal is None):
                await self._drain(servers, stop)
                return 0
            servers.drain(LAST_WORDS_S)
            await asyncio.wait((asyncio.create_task(servers.ended()),), timeout=LAST_WORDS_S + SERVERS_END_S)
            print(f"error: {ending.result()}", file=sys.stderr, flush=True)
            return 1
        finally:
            for task in (asked, loading, ending):
                if task is not None:
                    task.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            if self._elsewhere is not None:
                await self._elsewhere.close()
            if self._servers is not None:
                await self._servers.close()
            await self._engines.close()
            os.close(self._memory)

    async def _asked_to_end(self, stop: Stop) -> None:
        """By a signal, or by the router of another machine."""
        waits: list[asyncio.Task[Any]] = [asyncio.create_task(stop.asked.wait())]
        if isinstance(self._engines, RemoteEngines):
            waits.append(asyncio.create_task(self._engines.router.drains()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
        if stop.signal is None:
            self._say("the router has ended, and so do these servers.")

    async def _load(self) -> tuple[Router | RemoteRouter, FrontEnds]:
        """Raises UserError."""
        router = await self._engines.spawn()
        command = ["-m", "phalanx.server.front_end", "--listener", str(self._listener.fileno())]
        command += ["--places", str(self._memory)]
        servers = self._servers = FrontEnds(
            self._config,
            router,
            command,
            inherited=(self._listener.fileno(), self._memory),
            cleared=self._places.clear,
            counts=lambda: counts(self._registry),
            beyond=router.gather if isinstance(router, RemoteRouter) else None,
        )
        if isinstance(router, RemoteRouter):
            router.servers = servers
        if self._door is not None:
            self._elsewhere = RemoteServers(self._config, self._door, servers.host)
        checkpoint = await self._engines.locate()
        if self._engines.local is not None:
            servers.located(Start(*self._engines.local))
            if self._elsewhere is not None:
                await self._elsewhere.located(*self._engines.local, checkpoint)
        self._info = info = await _unless(servers.failed, router.start())
        servers.started(info)
        has_chat = await _unless(servers.failed, servers.ready())
        settle()
        self._announce(router, info, has_chat=has_chat)
        return router, servers

    def _names(self) -> tuple[str, ...]:
        return self._config.model.served_model_name or ((self._info.model,) if self._info is not None else ("",))

    def _announce(self, router: Router | RemoteRouter, info: EngineInfo, *, has_chat: bool) -> None:
        config = dataclasses.replace(self._engines.config, server=self._config.server)
        self._line.finish()
        if isinstance(router, RemoteRouter):
            print(remote_summary(config, info, router.name, self._names(), has_chat=has_chat), flush=True)
        else:
            print(summary(config, info, router.status(), self._names(), has_chat=has_chat), flush=True)
        print(f"Ready: {base_url(self._config.server)}", flush=True)

    def _say(self, text: str) -> None:
        self._line.finish()
        print(f"API servers: {text}", file=sys.stderr, flush=True)

    def _renewed(self, info: EngineInfo) -> None:
        self._info = info
        if self._servers is not None:
            self._servers.started(info)

    async def _lost_for_good(self, router: Router | RemoteRouter) -> EngineLost:
        """Returns when there is no more reason to be. With recovery switched off the servers stay, and say what is
        wrong, until somebody ends them."""
        lost = asyncio.create_task(router.lost())
        try:
            while not lost.done() or not self._config.recovery.enable_recovery:
                await asyncio.wait((lost,), timeout=LOOK_S) if not lost.done() else await asyncio.sleep(LOOK_S)
                if isinstance(router, Router):  # who has the engines counts what becomes of them
                    self._recoveries.look(router.status().recoveries)
            return lost.result()
        finally:
            lost.cancel()

    async def _drain(self, servers: FrontEnds, stop: Stop) -> None:
        seconds = stop.seconds(self._config.server.shutdown_timeout)
        if isinstance(self._engines, RemoteEngines):
            seconds = min(seconds, self._engines.router.drain_seconds)
        until = asyncio.get_running_loop().time() + seconds
        servers.drain(seconds)
        ended = asyncio.create_task(servers.ended())
        again = asyncio.create_task(stop.again.wait())
        pause = SERVERS_TELL_S
        while (left := until - asyncio.get_running_loop().time()) > -SERVERS_END_S:
            await asyncio.wait((ended, again), timeout=pause, return_when=asyncio.FIRST_COMPLETED)
            if ended.done() or again.done():
                break
            if servers.requests and left > 0:
                say_draining(servers.requests, left)
            pause = DRAIN_REPORT_S
        if stop.second is not None:
            servers.drain(0.0)
            await asyncio.wait((ended,), timeout=LAST_WORDS_S - FLUSH_S)
            await asyncio.sleep(FLUSH_S)
            stop.exit()
        for task in (ended, again):
            task.cancel()
        print("Stopped.", file=sys.stderr, flush=True)


async def _unless(failed: asyncio.Future[None], work: Coroutine[Any, Any, _T]) -> _T:
    """What `work` returns; raises what `failed` gets before that."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task, failed), return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            failed.result()
        return await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

"""One of several API servers, as a process: HTTP and text here, the engines behind a router in the process that
started this one (`server.several`).

Started as `python -m phalanx.server.front_end --fd N …` by `phalanx.engine.front_ends`. Guarantees: it ends when its
parent does; signals are left to the parent; before it ends, each of its requests has ended with an answer or an error.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import mmap
import os
import signal
import socket
import sys
import threading
import time

from phalanx.checkpoint.locate import Checkpoint, locate_text
from phalanx.config import EngineConfig
from phalanx.engine.async_engine import AsyncEngine
from phalanx.engine.client import EngineInfo, EngineLost
from phalanx.engine.core_messages import load_failure
from phalanx.engine.far_router import FarRouter
from phalanx.engine.frames import FrameStream
from phalanx.engine.front_messages import Alive, Counted, Drain, Ready, ServerProcess, Tell, decode_to_server
from phalanx.engine.parent import end_with_parent
from phalanx.errors import PhalanxError
from phalanx.logging import configure
from phalanx.lossy_output import never_wait
from phalanx.metrics.counts import Counts, counts
from phalanx.server.app import create_app
from phalanx.server.http import HttpFront
from phalanx.server.listening import tls_context
from phalanx.server.places import Places
from phalanx.server.process import leave_threads, run_to_end, settle
from phalanx.server.siblings import owners
from phalanx.server.state import ServerState

log = logging.getLogger(__name__)

COUNT_S = 2.0
"""What is counted is told at least so often: that much is forgotten when the process is killed."""


class _Among:
    """Its `Siblings`."""

    has_engines = False

    def __init__(self, places: Places, router: FarRouter):
        self.places = places
        self._router = router

    def servers(self) -> list[ServerProcess]:
        return self._router.servers

    async def counts(self, own: Counts) -> list[Counts]:
        gathered = await self._router.gather(own)
        return [own] if gathered is None else [own, gathered]


class FrontEnd:
    """One life. `name` tells its requests from those of others and of former lives."""

    def __init__(self, connection: socket.socket, listener: socket.socket, memory: int, number: int, name: str):
        self._connection, self._listener = connection, listener
        self._memory, self._number, self._name = memory, number, name
        self._state: ServerState | None = None
        self._front: HttpFront | None = None
        self._engine: AsyncEngine | None = None
        self._counted = 0.0
        self._draining = asyncio.Event()
        self._seconds = float("inf")

    async def run(self) -> int:
        """Until the router says so, 0, or is gone, 1."""
        stream = await FrameStream.over(self._connection, decode_to_server)
        self._router = router = FarRouter(stream, beat=self._alive, asked=self._asked, renewed=self._renewed)
        try:
            config = (await router.begin()).config
        except EngineLost:
            return 1
        configure(config.server.log_level, config.server.log_format, tag=f"server {self._number}")
        engine = self._engine = AsyncEngine(config, client=router, name=self._name)
        memory = mmap.mmap(self._memory, 0)
        siblings = _Among(Places(memory, owners(config.server), self._number), router)
        app = create_app(engine, config, siblings)
        self._state = app.state.server
        front = self._front = HttpFront(app, self._listener, tls_context(config.server))
        tasks = [
            asyncio.create_task(work) for work in (self._load(engine, config), router.lost(), self._drained(front))
        ]
        loading, lost, drained = tasks
        try:
            ends = (lost, drained, front.listening)
            await asyncio.wait((loading, *ends), return_when=asyncio.FIRST_COMPLETED)
            if loading.done() and loading.result():
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return 0 if drained.done() else 1
        finally:
            front.stop()
            for task in (loading, lost, drained):
                task.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            await asyncio.gather(engine.close(), front.listening, return_exceptions=True)
            await router.leave()

    async def _load(self, engine: AsyncEngine, config: EngineConfig) -> bool:
        """What is on this side of the router: tokenizer and templates. False when they cannot be had."""
        try:
            start = await self._router.model()
            engine.checkpoint = await asyncio.to_thread(_located, start.config)
            engine.config = dataclasses.replace(start.config, server=config.server)
            await engine.start()
        except PhalanxError as error:
            if not isinstance(error, EngineLost):
                self._router.post(load_failure(error))
            return False
        settle()
        template = engine.chat_template
        self._router.post(Ready(template is not None and template.source is not None))
        return True

    async def _drained(self, front: HttpFront) -> None:
        await self._draining.wait()
        await front.drain()

    # What passes between it and the router

    def _alive(self) -> Alive:
        state, now = self._state, time.monotonic()
        if state is None:
            return Alive(0)
        due = now - self._counted >= COUNT_S
        if due:
            self._counted = now
        return Alive(len(state.in_flight), counts(state.metrics.registry) if due else None)

    def _asked(self, message: Drain | Tell) -> None:
        if isinstance(message, Tell):
            self._router.post(Counted(counts(self._state.metrics.registry) if self._state is not None else {}))
            return
        if self._front is None:  # nobody has been answered yet
            os._exit(0)
        self._front.hurry(message.seconds)
        self._draining.set()

    def _renewed(self, info: EngineInfo) -> None:
        if self._engine is not None:
            self._engine.info = info


def _located(config: EngineConfig) -> Checkpoint:
    return locate_text(config.model.model, revision=config.model.revision)


def main(argv: list[str] | None = None) -> int:
    """The process."""
    parser = argparse.ArgumentParser(description="One of several API servers; started by `phalanx serve`, not by hand.")
    for name in ("--fd", "--parent", "--listener", "--places", "--number", "--life"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM):  # they may reach all processes of the server; the parent decides
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(options.parent)
    for descriptor in (options.fd, options.listener, options.places):
        os.set_inheritable(descriptor, False)
    own_threads = set(threading.enumerate())
    never_wait()
    connection, listener = socket.socket(fileno=options.fd), socket.socket(fileno=options.listener)
    name = f"{options.number}.{options.life}."
    code = run_to_end(_run(connection, listener, options.places, options.number, name))
    leave_threads(own_threads, code)
    return code


async def _run(connection: socket.socket, listener: socket.socket, memory: int, number: int, name: str) -> int:
    return await FrontEnd(connection, listener, memory, number, name).run()


if __name__ == "__main__":
    sys.exit(main())

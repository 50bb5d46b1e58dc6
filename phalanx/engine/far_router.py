"""`FarRouter`: an `EngineClient` whose `Router` is in another process, at the other end of one connection.

Guarantees: the end of the connection ends every stream with EngineDead, and `lost` returns; while the other process is
silent the engines are not called ready. A slow reader delays nobody. Owns no engine.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

import msgspec

from phalanx.engine.client import EngineInfo, EngineLost, EngineOutput, EngineRequest, EngineStatus
from phalanx.engine.core_messages import Abort, BrokenFrame, Outputs, Start, Started, Submit
from phalanx.engine.frames import FrameStream
from phalanx.engine.front_messages import (
    Begin,
    Drain,
    FromServer,
    Gather,
    Gathered,
    ServerProcess,
    Servers,
    Tell,
    ToServer,
)
from phalanx.engine.mailboxes import Mailboxes
from phalanx.engine.patience import LOOK_S, Patience
from phalanx.errors import EngineDead
from phalanx.metrics.counts import Counts

_T = TypeVar("_T")

GATHER_S = 2.0
"""For the other processes to say what they have counted."""


class FarRouter:
    """`beat` is called every `LOOK_S` and says what this server is doing, `asked` when the router wants something of
    it, `renewed` with the facts of each process that takes the place of the first engine's."""

    def __init__(
        self,
        stream: FrameStream[ToServer],
        *,
        beat: Callable[[], FromServer],
        asked: Callable[[Drain | Tell], None],
        renewed: Callable[[EngineInfo], None],
        hang_timeout: float | None = None,
    ):
        """With a `hang_timeout` the other process is given up when it is silent for too long (`Patience`)."""
        self._stream = stream
        self._beat, self._asked, self._renewed = beat, asked, renewed
        self._mailboxes = Mailboxes(self._send, self._post)
        loop = asyncio.get_running_loop()
        self._begin: asyncio.Future[Begin] = loop.create_future()
        self._start: asyncio.Future[Start] = loop.create_future()
        self._started: asyncio.Future[EngineInfo] = loop.create_future()
        self._gathering: deque[asyncio.Future[Counts]] = deque()
        self._status = EngineStatus(state="loading", since=time.time(), heartbeat=time.time())
        self._patience = Patience(hang_timeout or 0.0, time.monotonic())
        self._may_give_up = hang_timeout is not None
        self._lost: EngineLost | None = None
        self._gone = asyncio.Event()
        self.servers: list[ServerProcess] = []
        """All API servers, by what the router last said."""
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._keep_lease())]

    # What comes

    async def _read(self) -> None:
        why = "it closed the connection"
        try:
            while True:
                await self._take(await self._stream.receive())
        except EOFError:
            pass
        except OSError as error:
            why = f"the connection ended ({error.strerror or error})"
        except BrokenFrame as error:
            why = f"it sent something that is no message ({error})"
        self._lose(_gone(why))

    async def _take(self, message: ToServer) -> None:
        self._patience.heard(time.monotonic())
        if isinstance(message, Outputs):
            if message.status is not None:
                self._status = message.status
            await self._mailboxes.deliver(message.outputs)
        elif isinstance(message, Servers):
            self.servers = message.servers
        elif isinstance(message, Drain | Tell):
            self._asked(message)
        elif isinstance(message, Gathered):
            if self._gathering:
                _settle(self._gathering.popleft(), message.counts)
        elif isinstance(message, Begin):
            _settle(self._begin, message)
        elif isinstance(message, Start):
            _settle(self._start, message)
        else:
            self._take_started(message)

    def _take_started(self, message: Started) -> None:
        self._status = message.status
        if self._started.done():
            self._renewed(message.info)
        _settle(self._started, message.info)

    def _lose(self, loss: EngineLost) -> None:
        if self._lost is not None:
            return
        self._lost = loss
        self._mailboxes.fail(loss)
        awaited: list[asyncio.Future[Any]] = [self._begin, self._start, self._started, *self._gathering]
        for future in awaited:
            if not future.done():
                future.set_exception(loss)
                future.exception()  # perhaps nobody waits for it
        self._gone.set()

    async def _keep_lease(self) -> None:
        while self._lost is None:
            why = self._patience.look(time.monotonic())
            if why is not None and self._may_give_up:
                self._lose(_gone(why))
                self._stream.abort()
                return
            self.post(self._beat())
            await asyncio.sleep(LOOK_S)

    # What goes

    def post(self, message: FromServer) -> None:
        """Say something to the router, without waiting."""
        if self._lost is None:
            self._stream.post(message)

    async def _send(self, message: Submit) -> None:
        self.post(message)
        await self._stream.room()

    def _post(self, message: Abort) -> None:
        self.post(message)

    async def begin(self) -> Begin:
        """Raises EngineLost, as the next ones do."""
        return await self._begin

    async def model(self) -> Start:
        """What the engines load."""
        return await self._start

    async def gather(self, own: Counts, seconds: float = GATHER_S) -> Counts | None:
        """What the other processes have counted; None when it takes too long to say. `own` is what this one has: what
        anybody was shown stays counted."""
        if self._lost is not None:
            return None
        future: asyncio.Future[Counts] = asyncio.get_running_loop().create_future()
        self._gathering.append(future)
        self.post(Gather(own))
        done, _ = await asyncio.wait((future,), timeout=seconds)
        return future.result() if done and future.exception() is None else None

    # An EngineClient

    async def start(self) -> EngineInfo:
        return await asyncio.shield(self._started)

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        if self._lost is not None:
            raise self._lost
        if not self._started.done():
            raise EngineDead("The engine is not started.")
        return self._mailboxes.generate(request)

    async def abort(self, request_id: str) -> None:
        self._mailboxes.abort(request_id)

    def status(self) -> EngineStatus:
        status = msgspec.structs.replace(self._status)
        if self._lost is not None:
            status.state, status.cause = "failed", self._lost.message
        elif self._patience.quiet and status.state == "ready":
            status.state = "recovering"
            status.cause = f"The process with the engines has not answered for {self._patience.silent:.0f} s."
        return status

    @property
    def connected(self) -> bool:
        return self._lost is None

    async def lost(self) -> EngineLost:
        await self._gone.wait()
        return self._lost or EngineLost.closed()

    async def drain(self, timeout: float) -> bool:
        return await self._mailboxes.drained(timeout)

    async def close(self) -> None:
        """Ends the streams; the connection is left to `leave`, since there may be more to say."""
        self._mailboxes.fail(EngineLost.closed())

    async def leave(self) -> None:
        """End the connection, when what was posted has gone."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._lose(EngineLost.closed())
        await self._stream.end()


def _gone(why: str) -> EngineLost:
    return EngineLost(f"The process with the engines is gone: {why}.", why, kind="ended")


def _settle(future: asyncio.Future[_T], result: _T) -> None:
    if not future.done():
        future.set_result(result)

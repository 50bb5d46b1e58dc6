"""`RemoteRouter`: an `EngineClient` whose `Router` is on another machine, over connections that may break.

When the connection is lost, or the router's process is, every request waits here and goes on at its cursor as soon as a
router answers again at the same address: nothing is repeated, nothing is lost. New requests wait with them, as many as
would have had a place. After `recovery_timeout`, or at once with recovery switched off, streams end with EngineLost. A
loss of the connection is no request's fault, so none is suspected of it (unlike in `Router`).

`RemoteEngines` stands where `Engines` does. Neither knows HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from phalanx.checkpoint.fingerprint import changed
from phalanx.config import EngineConfig
from phalanx.distributed.transports.abort import GroupBroken
from phalanx.engine.client import EngineInfo, EngineLost, EngineOutput, EngineRequest, EngineStatus, request_error
from phalanx.engine.core_messages import MAX_FRAME, BrokenFrame
from phalanx.engine.cursor import Cursor
from phalanx.engine.engines import in_daemon_thread, reporting
from phalanx.engine.far_router import FarRouter
from phalanx.engine.front_messages import Alive, Counted, Drain, Leaving, Tell, decode_to_server
from phalanx.engine.remote_link import Join, Refused, SealedStream, call, decode_greeting, join_key
from phalanx.errors import ConfigError, EngineDead, InvalidRequest, PhalanxError, QueueFull
from phalanx.executor.base import StartProgress
from phalanx.executor.survey import text_survey, text_versions
from phalanx.layout_texts import split_address
from phalanx.metrics.counts import Counts, lasting

if TYPE_CHECKING:
    from phalanx.checkpoint.locate import Checkpoint
    from phalanx.engine.front_messages import ToServer
    from phalanx.executor.node_messages import Survey

log = logging.getLogger(__name__)

JOIN_LIMIT_S = 600.0
REPORT_S = 10.0
_ANSWER_S = 10.0
_AGAIN_S = 0.5
"""Between two calls."""
_MEANT = 3
"""So many times turned away without a word, it is meant. A router that is just ending does so too."""
_COUNT_S = 2.0
"""What is counted here is told at least so often."""
_GATHER_S = 1.5
"""Less than what the servers wait that ask for it."""


class ServersHere(Protocol):
    """The API servers of this machine; `FrontEnds` is them."""

    @property
    def requests(self) -> int: ...

    def known(self) -> Counts:
        """What they have counted, as far as it is known without asking."""
        ...

    async def counted(self) -> Counts: ...

    def drain(self, seconds: float) -> None: ...


class Unwelcome(ConfigError):
    """The router does not take these servers."""


class RemoteRouter:
    """`say` shows a line of progress, `renewed` gets the facts of each engine process that takes the place of the
    first one's. `servers` is set before `start`, `survey` too."""

    survey: Survey
    servers: ServersHere

    def __init__(self, config: EngineConfig, *, say: Callable[[str], None], renewed: Callable[[EngineInfo], None]):
        self._config, self._say, self._renewed = config, say, renewed
        self.at = config.server.router or ""
        self.name = ""
        """Of the router's machine, once it is known."""
        self._host, self._port = split_address(self.at)
        self._key = join_key(config.parallel, self._port)
        self._session = secrets.token_hex(8)
        scheduler = config.scheduler
        self._places = scheduler.max_num_queued_reqs + scheduler.max_num_seqs
        self._far: FarRouter | None = None
        """While it can be used."""
        self._gone: EngineLost | None = None
        """Set once nothing helps any more."""
        self._cause: str | None = None
        """Why there is none now."""
        self._reason = ""
        """What became of the latest call."""
        self._status = EngineStatus(state="loading", since=time.time(), heartbeat=time.time())
        """The latest known."""
        self._cursors: dict[str, Cursor] = {}
        """Every unfinished request."""
        self._waiting = 0
        self._changed = asyncio.Event()
        self._beyond: Counts = {}
        """What was last known to be counted by others."""
        self._told_counts = 0.0
        self._first: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._draining = asyncio.Event()
        self.drain_seconds = float("inf")
        """That the router leaves to requests, once it drains."""
        self._tasks: set[asyncio.Task[None]] = set()

    # Connections

    async def start(self) -> EngineInfo:
        """Returns when the engines of the router are loaded, which may take as long as waiting for it does. Raises
        ConfigError."""
        if not self._config.parallel.transport_key:
            self._say("WARNING: no transport key: anybody who answers at the address of the router is believed.")
        self._keep(self._connect_for_ever())
        return await asyncio.shield(self._first)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect_for_ever(self) -> None:
        """One connection after the other; returns when it is no use any more."""
        try:
            far = await self._connected(JOIN_LIMIT_S, patient=False)
            self._first.set_result(await far.start())
            while await self._used(far):
                began = time.monotonic()
                far = await self._connected(self._config.recovery.recovery_timeout, patient=True)
                self._renewed(await far.start())
                waited = time.monotonic() - began
                log.warning("The router at %s is back after %.1f s; %d request(s) go on.", self.at, waited, self._open)
        except Exception as error:
            if not isinstance(error, PhalanxError):
                log.exception("the way to the router at %s", self.at)
                error = EngineDead(f"The way to the router at {self.at} failed. This is a bug in Phalanx.")
            if not self._first.done():
                self._first.set_exception(error)
                self._first.exception()  # perhaps nobody waits for it
            self._give_up(EngineLost(error.message, self._cause or error.message, fix=error.fix))

    @property
    def _open(self) -> int:
        return len(self._cursors)

    async def _connected(self, limit: float, *, patient: bool) -> FarRouter:
        """The next connection, with engines behind it. `patient`: who turns us away may take us later, and engines have
        no longer to load than all together. Raises ConfigError."""
        began, said, reason, closed = time.monotonic(), -REPORT_S, "", 0
        while True:
            refusal: ConfigError | None = None
            try:
                async with asyncio.timeout(began + limit - time.monotonic()):
                    far = await self._join()
                self._reason = reason = "it loads its model"
                if not patient:
                    began = time.monotonic()
                return await self._loaded(far, began + limit - time.monotonic() if patient else None)
            except Unwelcome as error:
                refusal = error
            except GroupBroken:
                reason, closed = "it ended the connection", closed + 1
                refusal = self._turned_away() if closed >= _MEANT else None
            except EngineLost as error:
                reason = error.cause
            except OSError as error:
                reason = _in_words(error) or reason or "no answer"
            except (EOFError, BrokenFrame):
                reason = "it ended the connection"
            if refusal is not None:
                if not patient:
                    raise refusal
                reason = refusal.message.rstrip(".")
            now, self._reason = time.monotonic(), reason
            if now >= began + limit:
                raise ConfigError(
                    f"Waited {limit:g} s for the router at {self.at}, in vain: {reason}.",
                    fix="Check that it runs with --router-listen, that --router names that address, and that no "
                    "firewall is between the machines.",
                )
            if now - said >= REPORT_S:
                said = now
                patience = f"{now - began:.0f} s; gives up after {limit:g} s"
                self._say(f"waiting for the router at {self.at}: {reason} ({patience}).")
            await asyncio.sleep(_AGAIN_S)

    async def _loaded(self, far: FarRouter, seconds: float | None) -> FarRouter:
        """The connection, once the engines at its other end are loaded. Raises EngineLost, TimeoutError, Unwelcome."""
        try:
            async with asyncio.timeout(seconds):
                info = await far.start()
            if self._first.done() and info.weights != self._first.result().weights:
                failure = changed(f"{info.model} on {self.name}")
                raise Unwelcome(failure.message, fix=failure.fix)  # answers would go on as if it were the same model
        except BaseException:
            await self._leave(far)
            raise
        self._far, self._cause, self._reason = far, None, ""
        self._wake()
        return far

    def _turned_away(self) -> ConfigError:
        why = "the transport keys differ, only one side encrypts, or something else listens there"
        return Unwelcome(
            f"The router at {self.at} turned these servers away: {why}.",
            fix="Set the same PHALANX_TRANSPORT_KEY (or none) and the same --encrypt-transport on both machines.",
        )

    async def _join(self) -> FarRouter:
        """One try. Raises OSError, EOFError, GroupBroken, BrokenFrame, Unwelcome."""
        encrypt = self._config.parallel.encrypt_transport
        secure = await call(self._host, self._port, self._key, encrypt=encrypt, answer_s=_ANSWER_S)
        stream: SealedStream[ToServer] = await SealedStream.after(secure, decode_to_server, MAX_FRAME)
        try:
            stream.post(Join(self._session, platform.node(), os.getpid(), text_versions(), self.survey))
            greeting = decode_greeting(await stream.body())
        except BaseException:
            stream.abort()
            raise
        if isinstance(greeting, Refused):
            stream.abort()
            raise Unwelcome(greeting.message, fix=greeting.fix)
        self.name = greeting.name
        self._say(f"joined the router on {self.name} at {self.at}.")
        patience = self._config.recovery.hang_timeout
        return FarRouter(stream, beat=self._beat, asked=self._asked, renewed=self._renewed, hang_timeout=patience)

    async def _used(self, far: FarRouter) -> bool:
        """Until that connection is lost; whether there is to be another one."""
        loss = await far.lost()
        self._drop(far, loss)
        await self._leave(far)
        if self._draining.is_set():
            self._give_up(EngineLost(f"The router at {self.at} has ended.", "it has ended", kind="ended"))
            return False
        if not self._config.recovery.enable_recovery:
            log.error("%s Recovery is off: requests end with errors until the servers are restarted.", self._cause)
            self._give_up(EngineLost(self._cause or loss.message, loss.cause, kind=loss.kind, silent=loss.silent))
            return False
        log.error("%s %d request(s) wait; it is called again.", self._cause, self._open)
        return True

    def _drop(self, far: FarRouter, loss: EngineLost) -> None:
        """Whoever sees it first says so."""
        if self._far is far:
            self._status, self._far = far.status(), None
            self._status.since, self._status.recovery = time.time(), None
            self._cause = f"The connection to the router at {self.at} was lost: {loss.cause}."

    async def _leave(self, far: FarRouter) -> None:
        with contextlib.suppress(EngineLost):
            await far.leave()

    def _give_up(self, loss: EngineLost) -> None:
        self._gone = loss
        self._wake()

    def _wake(self) -> None:
        """Whoever waits looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    # What the router asks of these servers

    def _beat(self) -> Alive:
        now, due = time.monotonic(), False
        if now - self._told_counts >= _COUNT_S:
            self._told_counts, due = now, True
        return Alive(self.servers.requests, self.servers.known() if due else None)

    def _asked(self, message: Drain | Tell) -> None:
        if isinstance(message, Tell):
            self._keep(self._tell())
            return
        self.drain_seconds = min(self.drain_seconds, message.seconds)
        self._draining.set()
        self.servers.drain(message.seconds)

    async def _tell(self) -> None:
        counted = await self.servers.counted()
        if self._far is not None:
            self._far.post(Counted(counted))

    async def drains(self) -> None:
        """Returns when the router has said that it drains."""
        await self._draining.wait()

    async def gather(self, own: Counts) -> Counts:
        """What is counted on other machines; `own` is what is counted here."""
        gathered = None if self._far is None else await self._far.gather(own, _GATHER_S)
        if gathered is not None:
            self._beyond = gathered
            return gathered
        return lasting(self._beyond)

    # An EngineClient

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        rid, cursor = request.request_id, Cursor.of(request)
        if rid in self._cursors:
            raise InvalidRequest(f"A request with the id '{rid}' is running.")
        self._cursors[rid] = cursor
        try:
            while not cursor.finished:
                if cursor.aborted:
                    yield EngineOutput(rid, len(cursor.delivered), finish_reason="abort")
                    return
                if self._far is None:
                    refused = self._no_room()
                    if cursor.accepted:
                        await self._wait()
                    elif refused is not None:
                        error = request_error(refused)
                        yield EngineOutput(rid, len(cursor.delivered), finish_reason="error", error=error)
                        return
                    else:
                        cursor.accepted = True
                        yield EngineOutput(rid, len(cursor.delivered))
                    continue
                async with aclosing(self._run(self._far, cursor)) as outputs:
                    async for output in outputs:
                        yield output
        finally:
            del self._cursors[rid]

    async def _run(self, far: FarRouter, cursor: Cursor) -> AsyncGenerator[EngineOutput, None]:
        """What the router has to say that is new, over one connection."""
        request, sent = cursor.resume() if cursor.accepted else cursor.request, time.monotonic()
        try:
            async with aclosing(far.generate(request)) as outputs:
                async for each in outputs:
                    output = _by_our_clock(each, sent)
                    error = output.error
                    if error is not None and cursor.accepted and error.retry_after is not None:
                        await asyncio.sleep(min(error.retry_after, 1.0))  # it must not be refused any more
                        return
                    new = cursor.accept(output)
                    if new is not None:
                        yield new
                    if cursor.finished:
                        return
        except EngineLost as loss:
            self._drop(far, loss)

    def _no_room(self) -> PhalanxError | None:
        """Why a new request cannot wait. Raises EngineLost."""
        if self._gone is not None:
            raise self._gone
        if self._open > self._places:
            return QueueFull(f"The queue is full: {self._places} requests wait already.", retry_after=5.0)
        return None

    async def _wait(self) -> None:
        self._waiting += 1
        try:
            await self._changed.wait()
        finally:
            self._waiting -= 1

    async def abort(self, request_id: str) -> None:
        cursor = self._cursors.get(request_id)
        if cursor is not None:
            cursor.aborted = True
        if self._far is not None:
            await self._far.abort(request_id)
        self._wake()

    def status(self) -> EngineStatus:
        """The router's; while it is not there, the last one known, with what is wrong."""
        if self._far is not None and self._far.connected:
            return self._far.status()
        status = msgspec.structs.replace(self._status)
        status.waiting += self._waiting
        if self._gone is not None:
            status.state, status.cause = "failed", self._gone.message
        elif self._first.done():
            status.state, status.cause = "recovering", self._cause
            if self._cause and self._reason:
                status.cause = f"{self._cause} It was called again: {self._reason}."
        return status

    async def lost(self) -> EngineLost:
        while self._gone is None:
            await self._changed.wait()
        return self._gone

    async def drain(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while self._cursors and time.monotonic() < deadline:  # noqa: ASYNC110 (once in a lifetime)
            await asyncio.sleep(0.02)
        return not self._cursors

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        far, self._far = self._far, None
        self._give_up(self._gone or EngineLost.closed())
        if far is not None:
            far.post(Leaving())
            await self._leave(far)


def _by_our_clock(output: EngineOutput, sent: float) -> EngineOutput:
    """Machines count seconds from when they started, each for itself; what they agree about is how many have passed."""
    if output.scheduled_s is None or output.queued_s is None:
        return output
    return msgspec.structs.replace(output, scheduled_s=sent + output.scheduled_s - output.queued_s, queued_s=sent)


def _in_words(error: OSError) -> str:
    """As the system says it; nothing for our own limits of time."""
    known = (error.errno or 0) > 0 and not isinstance(error, TimeoutError)
    return os.strerror(error.errno or 0) if known else error.strerror or str(error)


class RemoteEngines:
    """As `Engines`, of another machine: there they are loaded, here the model's files are found for its text."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        say: Callable[[str], None],
        progress: StartProgress,
        renewed: Callable[[EngineInfo], None],
    ):
        self.config = config
        self.local: tuple[EngineConfig, str] | None = None
        """As `Engines.local`, for the API servers."""
        self._progress = progress
        self.router = RemoteRouter(config, say=say, renewed=renewed)
        self._closed = False

    async def spawn(self) -> RemoteRouter:
        """Nothing is started here."""
        return self.router

    async def locate(self) -> Checkpoint:
        """Raises UserError."""
        report = reporting(self._progress, lambda: self._closed)
        checkpoint, self.local, survey = await in_daemon_thread(partial(_located, self.config, report))
        self.router.survey = survey
        return checkpoint

    async def close(self) -> None:
        """Idempotent."""
        self._closed = True
        await self.router.close()


def _located(
    config: EngineConfig, report: Callable[[str, int, int], None]
) -> tuple[Checkpoint, tuple[EngineConfig, str], Survey]:
    from phalanx.checkpoint.locate import locate_text
    from phalanx.engine.async_engine import replace_model
    from phalanx.engine.resolution import for_engine

    model = config.model
    checkpoint = locate_text(model.model, revision=model.revision, progress=report)
    local, name = for_engine(replace_model(config, max_model_len=None), checkpoint)  # the engines' own holds
    return checkpoint, (local, name), text_survey(local, checkpoint)

"""`FrontEnds`: the processes of several API servers, whose requests go through one router in this process.

All accept connections from the same listening socket, so a connection is taken by one that lives. One that dies, or is
silent for too long (its lease runs out), is ended and started again; its requests are aborted, those of the others are
not touched. What it had counted stays counted. Nothing is left of them after `close`.

Beside them there may be groups of servers on other machines (`host`): each is to the router as one server more, which
is not started from here and may come back on another connection.

Does not know HTTP: what a server is, `command` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from phalanx import env
from phalanx.config import EngineConfig
from phalanx.engine.client import EngineClient, EngineInfo
from phalanx.engine.core_messages import LoadFailed, Outputs, Start, Started, loading_error
from phalanx.engine.frames import FrameStream
from phalanx.engine.front_link import FrontLink, Told
from phalanx.engine.front_messages import (
    Alive,
    Begin,
    Counted,
    Drain,
    FromServer,
    Gathered,
    Leaving,
    Ready,
    ServerProcess,
    Servers,
    Tell,
    ToServer,
    decode_from_server,
)
from phalanx.engine.patience import LOOK_S, Patience
from phalanx.errors import PhalanxError
from phalanx.executor.death import describe
from phalanx.metrics.counts import Counts, lasting, summed

if TYPE_CHECKING:
    from phalanx.engine.remote_link import Join, SealedStream

log = logging.getLogger(__name__)

_TELL_S = 1.0
"""For a server to say what it has counted."""
_LOADING_SILENCE_S = 30.0
"""While it imports and reads what it needs, native code may keep it from saying anything for longer."""
_COME_BACK_S = 3600.0
"""Servers of other machines that were lost are not waited for any longer."""
_PAUSES_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Before a server is started again: the more often it was lost without having been ready, the longer."""


@dataclass
class _Place:
    number: int
    life: int = 0
    process: subprocess.Popen[bytes] | None = None
    link: FrontLink | None = None
    state: str = "loading"
    requests: int = 0
    counted: Counts = field(default_factory=dict)
    """What its present life was last known to have counted."""
    telling: deque[asyncio.Future[None]] = field(default_factory=deque)
    has_chat: bool = False
    given_up: str | None = None
    """Why its present life was ended."""

    def shown(self) -> ServerProcess:
        return ServerProcess(
            self.process.pid if self.process is not None else None, self.state, self.life, self.requests
        )


@dataclass
class _Guests(_Place):
    """The servers of another machine. `life` counts their connections."""

    pid: int = 0
    node: str = ""
    left: bool = False
    """They have said that they end."""
    last_seen: float = 0.0

    def shown(self) -> ServerProcess:
        return ServerProcess(self.pid, self.state, self.life, self.requests, self.node)


class FrontEnds:
    """`command` starts a server; the descriptor of its socket is added, and `inherited` are others that it names.
    `cleared` is called with the number of one that has ended, `counts` says what this process has counted itself, and
    `beyond` what is counted on other machines, told what is counted here."""

    def __init__(
        self,
        config: EngineConfig,
        router: EngineClient,
        command: Sequence[str],
        *,
        inherited: Sequence[int],
        cleared: Callable[[int], None],
        counts: Callable[[], Counts],
        beyond: Callable[[Counts], Awaitable[Counts]] | None = None,
    ):
        self._config, self._router = config, router
        self._command, self._inherited = command, inherited
        self._cleared, self._counts, self._beyond = cleared, counts, beyond
        self._places = [_Place(number) for number in range(config.server.api_server_count)]
        self._guests: dict[str, _Guests] = {}
        """By their session."""
        self._hosting: set[asyncio.Task[Any]] = set()
        self._start: Start | None = None
        self._info: EngineInfo | None = None
        self._former: Counts = {}
        """What ended lives have counted."""
        self._ending = asyncio.Event()
        self._deadline = 0.0
        """Of `drain`."""
        self._ready = asyncio.Event()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the error of a server that never could do its work, such as a tokenizer that cannot be read."""
        self._gatherings: set[asyncio.Task[None]] = set()
        self._tasks = [asyncio.create_task(self._keep(place)) for place in self._places]
        self._beating = asyncio.create_task(self._beat())

    # What they are told

    def located(self, start: Start) -> None:
        """The model is found."""
        self._start = start
        self._tell_all(start)

    def started(self, info: EngineInfo) -> None:
        """The engines are, or the first of them is again."""
        self._info = info
        self._tell_all(Started(info, self._router.status()))

    async def ready(self) -> bool:
        """Returns when all have been, and says whether the model has a chat template."""
        await self._ready.wait()
        return any(place.has_chat for place in self._places)

    @property
    def requests(self) -> int:
        """HTTP requests that they work on."""
        return sum(place.requests for place in self._everywhere)

    @property
    def _everywhere(self) -> list[_Place]:
        return [*self._places, *self._guests.values()]

    def drain(self, seconds: float) -> None:
        """They take no more requests, end those that are left in so many seconds, and then themselves; none is started
        again."""
        self._ending.set()
        self._deadline = time.monotonic() + seconds
        for place in self._everywhere:
            place.state = "draining" if place.link is not None else "lost"
        self._tell_all(Drain(seconds))

    async def ended(self) -> None:
        """Returns when all are gone, after `drain`."""
        await asyncio.wait([*self._tasks, *self._hosting])

    async def close(self) -> None:
        """End what is left."""
        self._ending.set()
        tasks = [*self._tasks, self._beating, *self._gatherings]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _tell_all(self, message: ToServer) -> None:
        for place in self._everywhere:
            if place.link is not None:
                place.link.post(message)

    async def _beat(self) -> None:
        while True:
            self._tell_all(Outputs([], self._router.status()))
            self._show()
            await asyncio.sleep(LOOK_S)

    def _show(self) -> None:
        there = [guests for guests in self._guests.values() if guests.link is not None]
        servers = Servers([place.shown() for place in (*self._places, *there)])
        for place in self._places:
            if place.link is not None:
                place.link.post(servers)

    # One server through all of its lives

    async def _keep(self, place: _Place) -> None:
        failures = 0
        while not await self._ends_within(_PAUSES_S[min(failures, len(_PAUSES_S) - 1)]):
            place.life += 1
            why = await self._live(place)
            if self._ending.is_set():
                break
            failures = 0 if place.state == "ready" else failures + 1
            place.state = "lost"
            self._show()
            log.warning("API server %d was lost: %s. Its requests are ended; it is started again.", place.number, why)
        place.state = "lost"

    async def _ends_within(self, seconds: float) -> bool:
        if seconds and not self._ending.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), seconds)
        return self._ending.is_set()

    async def _live(self, place: _Place) -> str:
        """One life. How it ended, in words that follow a colon."""
        place.state = "loading"
        try:
            ours, process = self._spawn(place)
        except OSError as error:  # the system has no memory or descriptors for it
            return f"it could not be started ({error.strerror or error})"
        place.process = process
        stream = await FrameStream.over(ours, decode_from_server)
        try:
            why = await self._attend(place, stream, process.kill, self._greeting())
            if place.given_up is None and await _ends(process):
                code = process.returncode
                why = describe(-code if code < 0 else code << 8)
            return why
        finally:
            process.kill()  # also when this is cancelled: nothing may be left
            await asyncio.to_thread(process.wait)
            self._bury(place)

    async def _attend(
        self,
        place: _Place,
        stream: FrameStream[FromServer],
        end: Callable[[], None],
        greeting: Sequence[ToServer],
        prefix: str = "",
    ) -> str:
        """Have its requests answered until it is gone; `end` ends it when its lease has run out. Why it is gone, in
        words that follow a colon."""
        patience = Patience(self._config.recovery.hang_timeout, time.monotonic())
        first_word = asyncio.Event()
        if isinstance(place, _Guests):  # they have spoken before
            first_word.set()

        def heard() -> None:
            first_word.set()
            patience.heard(time.monotonic())

        link = FrontLink(
            self._router, stream, heard=heard, told=lambda message: self._told(place, message), prefix=prefix
        )
        place.link, place.given_up = link, None
        watching = asyncio.create_task(self._watch(place, end, patience, first_word))
        try:
            for message in greeting:
                link.post(message)
            why = await link.serve()
            return place.given_up or why
        finally:
            watching.cancel()
            if place.link is link:
                place.link = None
            await link.close()

    # Servers of other machines

    async def host(self, stream: SealedStream[FromServer], join: Join) -> None:
        """As long as they are there, on this connection. A former one of theirs is given up."""
        self._forget_old_guests()
        guests = self._guests.setdefault(join.session, _Guests(-1))
        guests.life += 1
        life, task, former = guests.life, asyncio.current_task(), guests.link
        if former is not None:
            await former.close()
        guests.pid, guests.node, guests.left = join.pid, join.name, False
        guests.state = "draining" if self._ending.is_set() else "ready"
        if task is not None:
            self._hosting.add(task)
            task.add_done_callback(self._hosting.discard)
        log.info("API servers on %s have joined.", join.name)
        greeting = [message for message in self._greeting() if isinstance(message, Started | Drain)]
        try:
            why = await self._attend(guests, stream, stream.abort, greeting, f"{join.session}.{life}.")
        finally:
            if guests.life == life:
                guests.state, guests.requests, guests.last_seen = "lost", 0, time.monotonic()
                guests.counted = lasting(guests.counted)
                _cancel(guests.telling)
        if guests.left:
            log.info("API servers on %s have left.", join.name)
        elif guests.life == life and not self._ending.is_set():
            log.warning("API servers on %s were lost: %s. Their requests are ended here.", join.name, why)
        self._show()

    def _forget_old_guests(self) -> None:
        """What they had counted stays counted; they do not come back."""
        now = time.monotonic()
        old = [s for s, guests in self._guests.items() if guests.link is None and now - guests.last_seen > _COME_BACK_S]
        self._former = summed([self._former, *(self._guests.pop(session).counted for session in old)])

    # A server's process

    def _greeting(self) -> list[ToServer]:
        """What a new one must know."""
        messages: list[ToServer] = [Begin(self._config)]
        if self._start is not None:
            messages.append(self._start)
        if self._info is not None:
            messages.append(Started(self._info, self._router.status()))
        if self._ending.is_set():
            messages.append(Drain(max(0.0, self._deadline - time.monotonic())))
        return messages

    def _spawn(self, place: _Place) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        """In a process group of its own: what Ctrl-C means is decided here."""
        ours, theirs = socket.socketpair()
        own = ["--fd", str(theirs.fileno()), "--parent", str(os.getpid())]
        own += ["--number", str(place.number), "--life", str(place.life)]
        with theirs, contextlib.ExitStack() as given_up:
            given_up.enter_context(ours)
            process = subprocess.Popen(
                [sys.executable, "-P", *self._command, *own],
                pass_fds=[theirs.fileno(), *self._inherited],
                stdin=subprocess.DEVNULL,
                stdout=2,
                process_group=0,
                env=env.for_child(),
            )
            given_up.pop_all()
        return ours, process

    async def _watch(
        self, place: _Place, end: Callable[[], None], patience: Patience, first_word: asyncio.Event
    ) -> None:
        """End it when its lease has run out."""
        await first_word.wait()
        while place.given_up is None:
            await asyncio.sleep(LOOK_S)
            why = patience.look(time.monotonic())
            if why is not None and (place.state != "loading" or patience.silent > _LOADING_SILENCE_S):
                place.given_up = f"{why}, so it was ended"
                end()

    def _bury(self, place: _Place) -> None:
        self._former = summed([self._former, lasting(place.counted)])
        place.counted, place.requests = {}, 0
        _cancel(place.telling)
        self._cleared(place.number)

    # What they say

    def _told(self, place: _Place, message: Told) -> None:
        if isinstance(message, Alive):
            place.requests = message.requests
            place.counted = message.counts or place.counted
        elif isinstance(message, Counted):
            place.counted = message.counts
            if place.telling:
                future = place.telling.popleft()
                if not future.done():
                    future.set_result(None)
        elif isinstance(message, Ready):
            place.has_chat = message.has_chat
            if not self._ending.is_set():
                place.state = "ready"
            self._show()
            if all(each.state == "ready" for each in self._places):
                self._ready.set()
        elif isinstance(message, LoadFailed):
            self._failed_to_load(place, loading_error(message))
        elif isinstance(message, Leaving):
            if isinstance(place, _Guests):
                place.left = True
        else:
            place.counted = message.counts
            task = asyncio.create_task(self._gather(place))
            self._gatherings.add(task)
            task.add_done_callback(self._gatherings.discard)

    def _failed_to_load(self, place: _Place, error: PhalanxError) -> None:
        """It ends now. Before all have been ready once, there is no use in going on; later the others do."""
        if self._ready.is_set():
            log.error("API server %d cannot start: %s", place.number, error)
        elif not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # perhaps nobody asks any more

    def known(self) -> Counts:
        """What is counted here, as far as it is known without asking."""
        return summed([self._counts(), self._former, *(place.counted for place in self._everywhere)])

    async def counted(self) -> Counts:
        """What is counted here."""
        await self._ask_all(self._everywhere)
        return self.known()

    async def _gather(self, asker: _Place) -> None:
        """For `asker`, what everybody else has counted."""
        others = [place for place in self._everywhere if place is not asker]
        beyond: list[Counts] = []
        if self._beyond is not None:
            _, there = await asyncio.gather(self._ask_all(others), self._beyond(self.known()))
            beyond.append(there)
        else:
            await self._ask_all(others)
        if asker.link is not None:
            parts = [self._counts(), self._former, *(place.counted for place in others), *beyond]
            asker.link.post(Gathered(summed(parts)))

    async def _ask_all(self, places: Sequence[_Place]) -> None:
        """They say what they have counted, if they can."""
        asked = [self._ask(place) for place in places if place.link is not None and place.state != "loading"]
        if asked:
            await asyncio.wait(asked, timeout=_TELL_S)

    def _ask(self, place: _Place) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place.telling.append(future)
        if place.link is not None:
            place.link.post(Tell())
        return future


def _cancel(telling: deque[asyncio.Future[None]]) -> None:
    for future in telling:
        future.cancel()
    telling.clear()


async def _ends(process: subprocess.Popen[bytes]) -> bool:
    """It has closed its end: it should be gone in a moment."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        await asyncio.to_thread(process.wait, 0.5)
    return process.poll() is not None

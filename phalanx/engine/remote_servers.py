"""`RemoteServers`: where API servers of other machines join the router of this one (`--router-listen`).

    listen ── prove the key ── compare versions and files ── `FrontEnds.host`, until they are gone

Callers without the key get no answer and are counted; who differs is told what differs, and so is the log. Nobody holds
up anybody else. Does not know requests.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from phalanx.config import EngineConfig
from phalanx.distributed.callers import Callers
from phalanx.distributed.transports.abort import GroupBroken
from phalanx.distributed.transports.secure_stream import Unauthenticated
from phalanx.engine.core_messages import MAX_FRAME, BrokenFrame
from phalanx.engine.front_messages import FromServer, decode_from_server
from phalanx.engine.remote_link import (
    JOIN_LIMIT,
    KNOCK_S,
    Join,
    Refused,
    SealedStream,
    Welcome,
    answer,
    decode_join,
    join_key,
)
from phalanx.errors import ConfigError
from phalanx.executor.interfaces import checked, listen
from phalanx.executor.node_messages import Survey
from phalanx.executor.survey import text_difference, text_survey, text_versions, version_difference
from phalanx.layout_texts import split_address
from phalanx.logging import is_worth_a_line

if TYPE_CHECKING:
    from phalanx.checkpoint.locate import Checkpoint

log = logging.getLogger(__name__)

_PAUSE_S = 0.1
"""When the system has no descriptor for a caller."""

Host = Callable[[SealedStream[FromServer], Join], Awaitable[None]]


def open_door(config: EngineConfig) -> socket.socket:
    """Where API servers of other machines call. Raises ConfigError."""
    host, port = split_address(config.server.router_listen or "")
    name = "--router-listen"
    return listen(checked(host, name), port, name, f"Choose another port for {name}, and name it with --router.")


class RemoteServers:
    """`host` has those that joined for as long as they are there."""

    def __init__(self, config: EngineConfig, door: socket.socket, host: Host):
        self._door, self._host = door, host
        self._door.setblocking(False)
        parallel = config.parallel
        self._key = join_key(parallel, door.getsockname()[1])
        self._encrypt = parallel.encrypt_transport
        self._name, self._versions = platform.node(), text_versions()
        self._located: asyncio.Future[tuple[str, Survey]] = asyncio.get_running_loop().create_future()
        self._callers = Callers()
        self.refused = 0
        """Callers turned away."""
        if not parallel.transport_key:
            log.warning(
                "No transport key: ANYBODY who can reach %s can send requests to the engines as if they were API "
                "servers. Set PHALANX_TRANSPORT_KEY to the same secret on every machine.",
                config.server.router_listen,
            )
        self._tasks = {asyncio.create_task(self._accept())}

    async def located(self, config: EngineConfig, model: str, checkpoint: Checkpoint) -> None:
        """The model is found, and called so. Raises CheckpointError."""
        self._located.set_result((model, await asyncio.to_thread(text_survey, config, checkpoint)))

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, peer = await loop.sock_accept(self._door)
            except OSError:  # the caller is gone again, or there are no descriptors
                await asyncio.sleep(_PAUSE_S)
                continue
            address = str(peer[0])
            self._callers.enter(sock, address)
            task = asyncio.create_task(self._hear(sock, address))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _hear(self, sock: socket.socket, peer: str) -> None:
        """A caller's whole life."""
        try:
            admitted = await self._admitted(sock, peer)
        finally:
            self._callers.leave(sock)
        if admitted is None:
            return
        stream, join = admitted
        try:
            model, survey = await asyncio.shield(self._located)
            here, there = self._name, f"{join.name} ({peer})"
            error = version_difference(self._versions, join.versions, here, there)
            if error is None and (error := text_difference(survey, join.survey, here, there)) is not None:
                error = ConfigError(error.message, fix=f"{error.fix} Here the model is {model}.")
            if error is not None:
                self._refuse(f"API servers on {there}: {error.message}")
                stream.post(Refused(error.message, error.fix))
                await stream.end()
                return
            stream.limit = MAX_FRAME
            stream.post(Welcome(self._name))
            await self._host(stream, join)
        finally:
            stream.abort()

    async def _admitted(self, sock: socket.socket, peer: str) -> tuple[SealedStream[FromServer], Join] | None:
        """None when the caller was turned away."""
        try:
            secure = await answer(sock, self._key, "the caller", encrypt=self._encrypt)
            stream = await SealedStream[FromServer].after(secure, decode_from_server, JOIN_LIMIT)
            try:
                async with asyncio.timeout(KNOCK_S):
                    return stream, decode_join(await stream.body())
            except BaseException:
                stream.abort()
                raise
        except (GroupBroken, BrokenFrame, EOFError, OSError) as error:
            why = "it does not have the transport key" if isinstance(error, Unauthenticated) else str(error)
            self._refuse(f"a caller from {peer}: {why or 'it did not say what it is'}")
            return None

    def _refuse(self, what: str) -> None:
        self.refused += 1
        if is_worth_a_line(self.refused):
            log.warning("Turned away %s. (%d turned away so far.)", what.rstrip("."), self.refused)

"""`FrameStream`: frames (`core_messages`) over the streams of an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Generic, Self, TypeVar

import msgspec

from phalanx.engine.core_messages import body_length, frame

Received = TypeVar("Received")

_LAST_S = 1.0


class FrameStream(Generic[Received]):
    """`decode` makes a message of a frame's body, or raises BrokenFrame."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decode: Callable[[bytes | memoryview], Received],
    ):
        self._reader, self._writer, self._decode = reader, writer, decode

    @classmethod
    async def over(cls, sock: socket.socket, decode: Callable[[bytes | memoryview], Received]) -> Self:
        """Over a connected socket, which is its own from now on."""
        return cls(*await asyncio.open_connection(sock=sock), decode)

    async def receive(self) -> Received:
        """Raises EOFError (IncompleteReadError is one), OSError, BrokenFrame."""
        return self._decode(await self.body())

    async def body(self) -> bytes | memoryview:
        """The next frame's, whatever it is. Raises as `receive` does."""
        return await self._reader.readexactly(body_length(await self._reader.readexactly(4)))

    async def send(self, message: msgspec.Struct) -> None:
        """Returns when there is room for more. That the peer is gone is for the reading side to say."""
        self.post(message)
        await self.room()

    def post(self, message: msgspec.Struct) -> None:
        """Send without waiting. What is posted to a peer that is gone, is lost."""
        if not self._writer.is_closing():  # uvloop would raise RuntimeError
            self._writer.write(frame(message))

    async def room(self) -> None:
        """Returns at once while the peer keeps up, and when it is gone."""
        with contextlib.suppress(OSError):
            await self._writer.drain()

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        """Close at once, whatever has not gone yet."""
        self._writer.transport.abort()

    async def end(self) -> None:
        """Close, when what was sent has gone, or the peer takes no more."""
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), _LAST_S)

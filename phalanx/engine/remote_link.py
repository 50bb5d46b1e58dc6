"""The way between API servers on one machine and the router on another: how both prove their key, what they say before
the first message, and the frames of every message.

    servers                                  router
       │── TCP, both prove the key ────────────│     as nodes do (`distributed.transports.secure_stream`)
       │── Join: versions, files of the model ▶│
       │◀── Welcome, or Refused with the reason│
       │◀═══════════ front_messages ══════════▶│     each frame with a code, sealed with --encrypt-transport

Callers without the key get no answer. Nothing is waited for on a thread.
"""

from __future__ import annotations

import asyncio
import errno
import select
import socket
from collections.abc import Callable
from typing import Generic, Self, TypeVar

import msgspec

from phalanx.config import ParallelConfig
from phalanx.distributed.transports.abort import Abort
from phalanx.distributed.transports.secure_stream import CODE, HEADER, SecureStream, Steps, Unauthenticated
from phalanx.engine.core_messages import MAX_FRAME, BrokenFrame, decoded, frame
from phalanx.engine.frames import FrameStream, Received
from phalanx.executor.interfaces import notice_silence
from phalanx.executor.keys import derive, root_secret
from phalanx.executor.node_messages import SILENCE_MS, Survey

CONNECT_S = 3.0
KNOCK_S = 5.0
"""For a caller to prove the key and say what it is."""
JOIN_LIMIT = 1 << 20
"""Bytes of a `Join`, which comes from who is not yet trusted with more."""

_KIND = 1
_LENGTH = 4
"""Bytes before a message in a plain frame; a sealed one has a length of its own."""

_T = TypeVar("_T")


class Join(msgspec.Struct, frozen=True, tag="join"):
    """The first message, of the servers."""

    session: str
    """Drawn by them for their whole life, over all of their connections."""
    name: str
    """Of their machine."""
    pid: int
    versions: dict[str, str]
    survey: Survey
    """Of what makes tokens of text."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    name: str
    """Of the router's machine."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    message: str
    fix: str | None = None


Greeting = Welcome | Refused

_join = msgspec.msgpack.Decoder(Join)
_greeting = msgspec.msgpack.Decoder(Greeting)


def decode_join(body: bytes | memoryview) -> Join:
    """Raises BrokenFrame."""
    return decoded(_join, body, "the first words of API servers")


def decode_greeting(body: bytes | memoryview) -> Greeting:
    """Raises BrokenFrame."""
    return decoded(_greeting, body, "a router's answer")


def join_key(parallel: ParallelConfig, port: int) -> bytes:
    """What both prove. It is not that of nodes, so that neither can be taken for the other."""
    return derive(root_secret(parallel.transport_key, port), "api servers")


async def call(host: str, port: int, key: bytes, *, encrypt: bool, answer_s: float) -> SecureStream:
    """Raises OSError when nobody answers there, GroupBroken when who does ends the connection or lacks the key."""
    sock = await _connected(host, port)
    return await _proven(sock, key, "it", client=True, encrypt=encrypt, seconds=answer_s)


async def answer(sock: socket.socket, key: bytes, peer: str, *, encrypt: bool) -> SecureStream:
    """The other end of `call`. Raises GroupBroken, OSError."""
    return await _proven(sock, key, peer, client=False, encrypt=encrypt, seconds=KNOCK_S)


async def _connected(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    failure: OSError = OSError("the name means no address")
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        try:
            async with asyncio.timeout(CONNECT_S):  # wait_for may lose a cancellation
                await loop.sock_connect(sock, address)
            return sock
        except OSError as error:
            sock.close()
            failure = OSError(errno.ETIMEDOUT, "no answer") if isinstance(error, TimeoutError) else error
        except BaseException:
            sock.close()
            raise
    raise failure


async def _proven(
    sock: socket.socket, key: bytes, peer: str, *, client: bool, encrypt: bool, seconds: float
) -> SecureStream:
    never = Abort()
    try:
        notice_silence(sock, SILENCE_MS)
        secure = SecureStream(sock, never, peer)
        async with asyncio.timeout(seconds):
            await _driven(sock, secure.handshake_steps(key, client=client, encrypt=encrypt))
        return secure
    except TimeoutError:
        sock.close()
        raise TimeoutError(f"{peer} did not answer in time") from None
    except BaseException:
        sock.close()
        raise
    finally:
        never.close()


async def _driven(sock: socket.socket, steps: Steps[_T]) -> _T:
    loop = asyncio.get_running_loop()
    while True:
        try:
            event = next(steps)
        except StopIteration as done:
            result: _T = done.value
            return result
        ready: asyncio.Future[None] = loop.create_future()
        add, remove = (
            (loop.add_reader, loop.remove_reader) if event == select.POLLIN else (loop.add_writer, loop.remove_writer)
        )
        add(sock, _settle, ready)
        try:
            await ready
        finally:
            remove(sock)


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


class SealedStream(FrameStream[Received], Generic[Received]):
    """Frames with a code each, sealed where that was agreed. `limit` is the longest that the peer may send."""

    _secure: SecureStream

    @classmethod
    async def after(cls, secure: SecureStream, decode: Callable[[bytes | memoryview], Received], limit: int) -> Self:
        """Over the connection of `secure`, whose handshake is done."""
        try:
            stream = await cls.over(secure.sock, decode)
        except BaseException:
            secure.close()
            raise
        stream._secure, stream.limit = secure, limit
        return stream

    limit: int = MAX_FRAME

    async def body(self) -> bytes | memoryview:
        header = await self._reader.readexactly(HEADER.size)
        length = HEADER.unpack(header)[0]
        if length > self.limit:
            raise BrokenFrame(f"a frame of {length} bytes is above the limit of {self.limit}")
        data = memoryview(await self._reader.readexactly(length + CODE))
        try:
            return self._secure.open(header, data[:length], bytes(data[length:]))
        except Unauthenticated as error:
            raise BrokenFrame(error.message.rstrip(".")) from None

    def post(self, message: msgspec.Struct) -> None:
        if not self._writer.is_closing():
            self._writer.writelines(self._secure.seal(_KIND, memoryview(frame(message))[_LENGTH:]))

    def close(self) -> None:
        """At once: a peer that cannot be reached is not waited for."""
        self.abort()

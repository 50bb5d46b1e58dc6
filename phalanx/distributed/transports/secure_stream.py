"""Frames over a connected stream socket that only holders of the epoch's key can make.

Both sides prove that they have the key by a challenge each, and derive from it and the two challenges one key a
direction, so nothing recorded earlier, and nothing sent back, is ever accepted. Every frame carries its length, and a
code over its place in the stream, its kind and its content (HMAC-SHA256, cut to 16 bytes), or, when encryption is asked
for, is sealed with AES-256-GCM. A frame that fails is an error and ends the connection.

Covers one connection. Does not know what travels in it, and starts no thread.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence

from phalanx.distributed.transports.abort import Abort, GroupBroken

CODE = 16
"""Bytes of authentication code a frame."""

HEADER = struct.Struct("<IIQ")
"""Bytes of content, kind, number of the frame in its direction."""

_DESCRIPTORS = 0xFD
"""Kind of the frame that announces file descriptors."""

_CHALLENGE = 32
_MAGIC = b"PHLX1"
_MODES = {False: b"A", True: b"E"}


class Unauthenticated(GroupBroken):
    """The peer does not have this epoch's key, or does not agree about encryption."""


class _Codec:
    """One direction: makes or checks the code of frame 0, 1, 2, …"""

    def __init__(self, key: bytes, encrypt: bool):
        self.number = 0
        self._mac = hmac.new(key, digestmod=hashlib.sha256)
        self._cipher = None
        if encrypt:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM

            self._cipher = AESGCM(key)

    def seal(self, kind: int, content: memoryview) -> tuple[bytes, bytes | memoryview, bytes]:
        """Header, content as it travels, code."""
        header = HEADER.pack(len(content), kind, self.number)
        self.number += 1
        if self._cipher is not None:
            sealed = self._cipher.encrypt(header[4:], content, header)
            return header, sealed[:-CODE], sealed[-CODE:]
        return header, content, self._code(header, content)

    def open(self, header: bytes, content: memoryview, code: bytes) -> bytes | memoryview:
        """The content. Raises Unauthenticated when the frame was not sealed with this key, or is out of order."""
        if HEADER.unpack(header)[2] != self.number:
            raise Unauthenticated(f"A frame came out of order: {HEADER.unpack(header)[2]} instead of {self.number}.")
        self.number += 1
        if self._cipher is not None:
            from cryptography.exceptions import InvalidTag

            try:
                return self._cipher.decrypt(header[4:], bytes(content) + code, header)
            except InvalidTag:
                raise Unauthenticated("A frame failed its check.") from None
        if not hmac.compare_digest(self._code(header, content), code):
            raise Unauthenticated("A frame failed its check.")
        return content

    def _code(self, header: bytes, content: memoryview) -> bytes:
        mac = self._mac.copy()
        mac.update(header)
        mac.update(content)
        return mac.digest()[:CODE]


class SecureStream:
    """`sock` becomes non-blocking. Raises Unauthenticated from `handshake`, and GroupBroken when a wait ends badly."""

    def __init__(self, sock: socket.socket, abort: Abort, peer: str):
        self.sock, self.peer = sock, peer
        self._abort = abort
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._send: _Codec
        self._receive: _Codec

    def handshake(self, key: bytes, *, client: bool, encrypt: bool, timeout: float) -> None:
        """Prove the key to each other. The client speaks first; the server says nothing to who lacks the key."""
        deadline = time.monotonic() + timeout
        hello = _MAGIC + _MODES[encrypt]
        mine: bytes | bytearray = os.urandom(_CHALLENGE)
        theirs: bytes | bytearray
        if client:
            self._write(hello + mine + _prove(key, b"client-hello", mine), deadline)
            answer = self._read(_CHALLENGE + 32, deadline)
            theirs, proof = answer[:_CHALLENGE], answer[_CHALLENGE:]
            if not hmac.compare_digest(proof, _prove(key, b"server", mine + theirs)):
                raise Unauthenticated(f"{self.peer} does not have the key.")
            self._write(_prove(key, b"client", theirs + mine), deadline)
            session = bytes(mine + theirs)
        else:
            first = self._read(len(hello) + _CHALLENGE + 32, deadline)
            theirs, proof = first[len(hello) : -32], first[-32:]
            if not hmac.compare_digest(proof, _prove(key, b"client-hello", theirs)):
                raise Unauthenticated(f"{self.peer} does not have the key.")
            if first[: len(hello)] != hello:
                raise Unauthenticated(f"{self.peer} speaks another version, or only one side encrypts.")
            self._write(mine + _prove(key, b"server", theirs + mine), deadline)
            if not hmac.compare_digest(self._read(32, deadline), _prove(key, b"client", mine + theirs)):
                raise Unauthenticated(f"{self.peer} does not have the key.")
            session = bytes(theirs + mine)
        to_server, to_client = (_prove(key, name, session) for name in (b"to-server", b"to-client"))
        self._send = _Codec(to_server if client else to_client, encrypt)
        self._receive = _Codec(to_client if client else to_server, encrypt)

    # -- whole frames, blocking -----------------------------------------------------------------------------------

    def send(self, kind: int, content: bytes | bytearray | memoryview, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        view = memoryview(content).cast("B")
        for part in self._send.seal(kind, view):
            self._write(part, deadline)

    def receive(self, limit: int, timeout: float | None = None) -> tuple[int, bytes | memoryview]:
        """Kind and content of the next frame. Raises GroupBroken when it is longer than `limit` bytes."""
        deadline = None if timeout is None else time.monotonic() + timeout
        header = bytes(self._read(HEADER.size, deadline))
        length, kind, _ = HEADER.unpack(header)
        if length > limit:
            raise GroupBroken(f"{self.peer} sent a frame of {length} bytes; at most {limit} are expected here.")
        content = self._read(length, deadline)
        return kind, self._receive.open(header, memoryview(content), bytes(self._read(CODE, deadline)))

    # -- pieces, for exchanges that send and receive at the same time -------------------------------------------------

    def outgoing(self, kind: int, content: memoryview) -> Iterator[int]:
        """Sends a frame as far as the socket takes it; yields `select.POLLOUT` when it must wait for room."""
        for part in self._send.seal(kind, content):
            view = memoryview(part)
            while view:
                try:
                    view = view[self.sock.send(view) :]
                except BlockingIOError:
                    yield select.POLLOUT
                except OSError as error:
                    raise self._lost(error) from None

    def incoming(self, kind: int, into: memoryview) -> Iterator[int]:
        """Receives the next frame into `into`, whose size and kind it must have; yields `select.POLLIN` to wait."""
        header, code = bytearray(HEADER.size), bytearray(CODE)
        yield from self._fill(memoryview(header))
        length, theirs, _ = HEADER.unpack(header)
        if theirs != kind or length != len(into):
            raise GroupBroken(
                f"{self.peer} is in exchange {theirs} with {length} bytes, this rank in {kind} with {len(into)}."
            )
        yield from self._fill(into)
        yield from self._fill(memoryview(code))
        content = self._receive.open(bytes(header), into, bytes(code))
        if content is not into:
            into[:] = content

    def _fill(self, view: memoryview) -> Iterator[int]:
        while view:
            try:
                count = self.sock.recv_into(view)
            except BlockingIOError:
                yield select.POLLIN
                continue
            except OSError as error:
                raise self._lost(error) from None
            if count == 0:
                raise self._lost(None)
            view = view[count:]

    # -- descriptors, between processes of one node ----------------------------------------------------------------

    def send_descriptors(self, fds: Sequence[int], timeout: float) -> None:
        """File descriptors travel beside a frame that counts them, over a Unix socket only."""
        deadline = time.monotonic() + timeout
        self.send(_DESCRIPTORS, struct.pack("<I", len(fds)), timeout)
        self._wait(select.POLLOUT, deadline)
        socket.send_fds(self.sock, [b"\0"], list(fds))

    def receive_descriptors(self, count: int, timeout: float) -> list[int]:
        """Raises GroupBroken when another number of descriptors comes."""
        deadline = time.monotonic() + timeout
        kind, content = self.receive(4, timeout)
        if kind != _DESCRIPTORS or bytes(content) != struct.pack("<I", count):
            raise GroupBroken(f"{self.peer} was to send {count} descriptors and did not.")
        self._wait(select.POLLIN, deadline)
        _, fds, _, _ = socket.recv_fds(self.sock, 1, count, socket.MSG_CMSG_CLOEXEC)
        if len(fds) != count:
            for fd in fds:
                os.close(fd)
            raise GroupBroken(f"{self.peer} sent {len(fds)} descriptors instead of {count}.")
        return list(fds)

    # -- raw bytes ------------------------------------------------------------------------------------------------

    def _read(self, size: int, deadline: float | None) -> bytearray:
        data = bytearray(size)
        for event in self._fill(memoryview(data)):
            self._wait(event, deadline)
        return data

    def _write(self, data: bytes | bytearray | memoryview, deadline: float | None) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self.sock.send(view) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)
            except OSError as error:
                raise self._lost(error) from None

    def _wait(self, event: int, deadline: float | None) -> None:
        poll = select.poll()
        poll.register(self.sock, event)
        poll.register(self._abort.fileno(), select.POLLIN)
        left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        ready = poll.poll(left)
        self._abort.check()
        if not ready:
            raise GroupBroken(f"{self.peer} did not answer in time.")

    def _lost(self, error: OSError | None) -> GroupBroken:
        return GroupBroken(f"The connection to {self.peer} ended{f' ({error.strerror})' if error else ''}.")

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        self.sock.close()


def _prove(key: bytes, purpose: bytes, data: bytes | bytearray) -> bytes:
    return hmac.digest(key, purpose + b"\0" + bytes(data), "sha256")

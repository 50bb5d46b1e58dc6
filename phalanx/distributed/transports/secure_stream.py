"""Frames over a connected stream socket that only holders of the epoch's key can make.

Both sides prove that they have the key by a challenge each (HMAC-SHA256), and derive from it and the two challenges one
key a direction, so nothing recorded earlier, and nothing sent back, is ever accepted. Every frame is sealed with
AES-256-GCM (NIST SP 800-38D), its number being the nonce: encrypted, or, when encryption is not asked for, with the
content in the clear and only the code beside it. A frame that fails is an error; after any error the stream is of no
more use.

A peer whose kernel is gone is found out while somebody waits for it: by keep-alive probes when nothing is under way,
and by what the kernel says about unanswered packets when something is. TCP_USER_TIMEOUT would do for both, but it also
ends a connection to a peer that lives and is merely too busy to read.

Covers one connection. Does not know what travels in it, and starts no thread.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from phalanx.distributed.transports.abort import Abort, GroupBroken, PeerLost, Unreachable

CODE = 16
"""Bytes of authentication code a frame."""

HEADER = struct.Struct("<IIQQ")
"""Bytes of content, kind, number of the frame in its direction, bytes of all frames that belong together."""

_NONCE = slice(4, 16)
"""Kind and number in the header: never the same twice under one key."""

_PIECE = 1 << 20
"""Bytes of a tensor that one frame carries: checking a piece and receiving the next overlap."""

_JOINED = 1 << 14
"""Frames up to this many bytes are copied together and sent at once."""

_SILENCE_MS = 2250
_RETRANSMITS, _PROBES = 3, 2
"""A peer is lost when so many packets, or probes where there is nothing to send, went unanswered, for so long."""

_CHECK_MS = 500.0
"""How often a wait looks: silence is noticed within 3 s."""

_DESCRIPTORS = 0xFD
"""Kind of the frame that announces file descriptors."""

_CHALLENGE = 32
_MAGIC = b"PHLX1"
_MODES = {False: b"A", True: b"E"}

T = TypeVar("T")
Steps = Generator[int, None, T]
"""Work on a socket in steps: yields the `select` event that must come before it can go on, and returns its result."""


class Unauthenticated(GroupBroken):
    """The peer does not have this epoch's key, or does not agree about encryption."""


class _Codec:
    """One direction: makes or checks the code of frame 0, 1, 2, …"""

    def __init__(self, key: bytes, encrypt: bool):
        self.number = 0
        self._cipher, self._encrypt = AESGCM(key), encrypt

    def seal(self, kind: int, content: memoryview, total: int) -> list[bytes | memoryview]:
        """Header, content and code as they travel."""
        header = HEADER.pack(len(content), kind, self.number, total)
        self.number += 1
        if self._encrypt:
            return [header, self._cipher.encrypt(header[_NONCE], content, header)]
        return [header, content, self._code(header, content)]

    def open(self, header: bytes, content: memoryview, code: bytes) -> bytes | memoryview:
        """The content. Raises Unauthenticated when the frame was not sealed with this key, or is out of order."""
        if HEADER.unpack(header)[2] != self.number:
            raise Unauthenticated(f"A frame came out of order: {HEADER.unpack(header)[2]} instead of {self.number}.")
        self.number += 1
        if self._encrypt:
            try:
                return self._cipher.decrypt(header[_NONCE], bytes(content) + code, header)
            except InvalidTag:
                raise Unauthenticated("A frame failed its check.") from None
        if not hmac.compare_digest(self._code(header, content), code):
            raise Unauthenticated("A frame failed its check.")
        return content

    def _code(self, header: bytes, content: memoryview) -> bytes:
        """The tag of the encrypted header, with the content as data that is authenticated only."""
        return self._cipher.encrypt(header[_NONCE], header, content)[-CODE:]


class SecureStream:
    """`sock` becomes non-blocking. Raises Unauthenticated from `handshake`, and GroupBroken when a wait ends badly."""

    def __init__(self, sock: socket.socket, abort: Abort, peer: str):
        self.sock, self.peer = sock, peer
        self._abort = abort
        sock.setblocking(False)
        self._tcp = sock.family in (socket.AF_INET, socket.AF_INET6)
        if self._tcp:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
        self.encrypted = False
        self._send: _Codec
        self._receive: _Codec

    def handshake(self, key: bytes, *, client: bool, encrypt: bool, timeout: float) -> None:
        """Prove the key to each other. The client speaks first; the server says nothing to who lacks the key."""
        self._drive(self.handshake_steps(key, client=client, encrypt=encrypt), time.monotonic() + timeout)

    def handshake_steps(self, key: bytes, *, client: bool, encrypt: bool) -> Steps[None]:
        hello = _MAGIC + _MODES[encrypt]
        mine: bytes | bytearray = os.urandom(_CHALLENGE)
        theirs: bytes | bytearray
        if client:
            yield from self._drain([hello + mine + _prove(key, b"client-hello", mine)])
            answer = yield from self._take(_CHALLENGE + 32)
            theirs, proof = answer[:_CHALLENGE], answer[_CHALLENGE:]
            if not hmac.compare_digest(proof, _prove(key, b"server", mine + theirs)):
                raise Unauthenticated(f"{self.peer} does not have the key.")
            yield from self._drain([_prove(key, b"client", theirs + mine)])
            session = bytes(mine + theirs)
        else:
            first = yield from self._take(len(hello) + _CHALLENGE + 32)
            theirs, proof = first[len(hello) : -32], first[-32:]
            if not hmac.compare_digest(proof, _prove(key, b"client-hello", theirs)):
                raise Unauthenticated(f"{self.peer} does not have the key.")
            if first[: len(hello)] != hello:
                raise Unauthenticated(f"{self.peer} speaks another version, or only one side encrypts.")
            yield from self._drain([mine + _prove(key, b"server", theirs + mine)])
            proof = yield from self._take(32)
            if not hmac.compare_digest(proof, _prove(key, b"client", mine + theirs)):
                raise Unauthenticated(f"{self.peer} does not have the key.")
            session = bytes(theirs + mine)
        session += _MODES[encrypt]
        self.encrypted = encrypt
        to_server, to_client = (_prove(key, name, session) for name in (b"to-server", b"to-client"))
        self._send = _Codec(to_server if client else to_client, encrypt)
        self._receive = _Codec(to_client if client else to_server, encrypt)

    # -- whole frames, blocking -----------------------------------------------------------------------------------

    def send(self, kind: int, content: bytes | bytearray | memoryview, timeout: float | None = None) -> None:
        view = memoryview(content).cast("B")
        parts = self._send.seal(kind, view, len(view))
        self._drive(self._drain(parts), None if timeout is None else time.monotonic() + timeout)

    def receive(self, limit: int, timeout: float | None = None) -> tuple[int, bytes | memoryview]:
        """Kind and content of the next frame. Raises GroupBroken when it is longer than `limit` bytes."""
        return self._drive(self.receive_steps(limit), None if timeout is None else time.monotonic() + timeout)

    def receive_steps(self, limit: int) -> Steps[tuple[int, bytes | memoryview]]:
        header = bytes((yield from self._take(HEADER.size)))
        length, kind, _, _ = HEADER.unpack(header)
        if length > limit:
            raise GroupBroken(f"{self.peer} sent a frame of {length} bytes; at most {limit} are expected here.")
        content, code = bytearray(length), bytearray(CODE)
        yield from self._fill([content, code])
        return kind, self._receive.open(header, memoryview(content), bytes(code))

    # -- whole frames, for who moves the bytes by other means after the handshake -----------------------------------

    def seal(self, kind: int, content: memoryview) -> list[bytes | memoryview]:
        """The next frame as it travels: header, content and code."""
        return self._send.seal(kind, content, len(content))

    def open(self, header: bytes, content: memoryview, code: bytes) -> bytes | memoryview:
        """The content of the next frame. Raises Unauthenticated."""
        return self._receive.open(header, content, code)

    def _drive(self, steps: Steps[T], deadline: float | None) -> T:
        while True:
            try:
                event = next(steps)
            except StopIteration as done:
                result: T = done.value
                return result
            self._wait(event, deadline)

    # -- tensors, for exchanges that send and receive at the same time ----------------------------------------------

    def outgoing(self, kind: int, content: memoryview) -> Steps[None]:
        """Sends the content in frames of one piece each."""
        for start in range(0, max(len(content), 1), _PIECE):
            self._abort.check()
            yield from self._drain(self._send.seal(kind, content[start : start + _PIECE], len(content)))

    def incoming(self, kind: int, into: memoryview, describe: Callable[[int, int], str]) -> Steps[None]:
        """Receives into `into` what a peer's `outgoing` sends. Raises GroupBroken, with `describe(kind, bytes)` of both
        sides, as soon as it is seen to be of another kind or size."""

        def check() -> None:
            _, theirs, _, total = HEADER.unpack(header)
            if theirs != kind or total != len(into):
                raise GroupBroken(f"{self.peer} is in {describe(theirs, total)}, not {describe(kind, len(into))}.")

        for start in range(0, max(len(into), 1), _PIECE):
            self._abort.check()
            piece = into[start : start + _PIECE]
            header, code = bytearray(HEADER.size), bytearray(CODE)
            yield from self._fill([header, piece, code], check)
            content = self._receive.open(bytes(header), piece, bytes(code))
            if content is not piece:
                piece[:] = content

    # -- descriptors, between processes of one node ----------------------------------------------------------------

    def send_descriptors(self, fds: Sequence[int], timeout: float) -> None:
        """File descriptors travel beside a frame that counts them, over a Unix socket only."""
        deadline = time.monotonic() + timeout
        self.send(_DESCRIPTORS, struct.pack("<I", len(fds)), timeout)
        self._wait(select.POLLOUT, deadline)
        try:
            socket.send_fds(self.sock, [b"\0"], list(fds))
        except OSError as error:
            raise self._lost(error) from None

    def receive_descriptors(self, count: int, timeout: float) -> list[int]:
        """Raises GroupBroken when another number of descriptors comes."""
        deadline = time.monotonic() + timeout
        kind, content = self.receive(4, timeout)
        if kind != _DESCRIPTORS or bytes(content) != struct.pack("<I", count):
            raise GroupBroken(f"{self.peer} was to send {count} descriptors and did not.")
        self._wait(select.POLLIN, deadline)
        try:
            _, fds, _, _ = socket.recv_fds(self.sock, 1, count, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise self._lost(error) from None
        if len(fds) != count:
            for fd in fds:
                os.close(fd)
            raise GroupBroken(f"{self.peer} sent {len(fds)} descriptors instead of {count}.")
        return list(fds)

    # -- raw bytes ------------------------------------------------------------------------------------------------

    def _take(self, size: int) -> Steps[bytearray]:
        data = bytearray(size)
        yield from self._fill([data])
        return data

    def _fill(self, buffers: Sequence[bytearray | memoryview], check: Callable[[], None] | None = None) -> Steps[None]:
        """Receives into the buffers, one after the other; `check` is called once the first one is full."""
        pending = [memoryview(buffer) for buffer in buffers if len(buffer)]
        missing = len(buffers[0])
        while pending:
            try:
                count = self.sock.recvmsg_into(pending)[0]
            except BlockingIOError:
                yield select.POLLIN
                continue
            except OSError as error:
                raise self._lost(error) from None
            if count == 0:
                raise self._lost(None)
            missing -= count
            if missing <= 0 and check is not None:
                check()
                check = None
            _advance(pending, count)

    def _drain(self, parts: Sequence[bytes | bytearray | memoryview]) -> Steps[None]:
        if sum(map(len, parts)) <= _JOINED:
            parts = [b"".join(parts)]
        pending = [memoryview(part) for part in parts if len(part)]
        while pending:
            try:
                _advance(pending, self.sock.sendmsg(pending))
            except BlockingIOError:
                yield select.POLLOUT
            except OSError as error:
                raise self._lost(error) from None

    def _wait(self, event: int, deadline: float | None) -> None:
        poll = select.poll()
        poll.register(self.sock, event)
        poll.register(self._abort.fileno(), select.POLLIN)
        while True:
            left = _CHECK_MS if deadline is None else min(_CHECK_MS, (deadline - time.monotonic()) * 1000)
            ready = poll.poll(max(left, 0.0))
            self._abort.check()
            if ready:
                return
            if left <= 0:
                raise GroupBroken(f"{self.peer} did not answer in time.")
            self.check_answers()

    def check_answers(self) -> None:
        """Raises PeerLost when packets to the peer have gone unanswered for some seconds. For long waits."""
        if not self._tcp:
            return
        try:
            info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 64)
        except OSError as error:
            raise self._lost(error) from None
        retransmits, probes, last_answer = info[2], info[3], struct.unpack_from("=I", info, 56)[0]
        if last_answer > _SILENCE_MS and (retransmits >= _RETRANSMITS or probes >= _PROBES):
            raise Unreachable(self.peer, last_answer / 1000)

    def _lost(self, error: OSError | None) -> GroupBroken:
        return PeerLost(f"The connection to {self.peer} ended{f' ({error.strerror})' if error else ''}.")

    @property
    def ready(self) -> bool:
        """Whether a short frame can be sent without waiting."""
        poll = select.poll()
        poll.register(self.sock, select.POLLOUT)
        return bool(poll.poll(0))

    def shut(self) -> None:
        """The peer sees the end at once; the descriptor stays until `close`."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        self.sock.close()


def _advance(pending: list[memoryview], count: int) -> None:
    """Drop the first `count` bytes."""
    while count:
        if count < len(pending[0]):
            pending[0] = pending[0][count:]
            return
        count -= len(pending.pop(0))


def _prove(key: bytes, purpose: bytes, data: bytes | bytearray) -> bytes:
    return hmac.digest(key, purpose + b"\0" + bytes(data), "sha256")

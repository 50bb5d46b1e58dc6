"""What a front end and its engine process say to each other: typed msgpack frames over an inherited socket.

    front end -> engine    Start, Submit, Abort, Shutdown
    engine -> front end    Progress, Started, LoadFailed, Outputs, Beat, Fatal

A frame is a 4-byte big-endian length and that many bytes of msgpack. Frames above `MAX_FRAME` are refused on both
sides, so a broken peer cannot make the other allocate without bound. Covers the messages, their packing and the
carriage of errors; does not cover processes.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from phalanx import errors
from phalanx.config import EngineConfig
from phalanx.engine.client import (
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineStatus,
    RequestError,
    request_error,
)
from phalanx.error_names import error_named, name_of
from phalanx.errors import EngineDead, InvalidRequest, PhalanxError, Unavailable

MAX_FRAME = 64 * 2**20
"""Bytes. The largest honest frame is a step's outputs with prompt log-probabilities of a long prompt."""

BEAT_S = 0.25
"""Seconds between two `Beat`s."""

_LENGTH = struct.Struct(">I")
_T = TypeVar("_T")


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The first message: what to load. `config` is resolved and names local files."""

    config: EngineConfig
    name: str
    """The model's name, for `EngineInfo.model`."""
    replica: int = 0
    """Which of several."""
    weights: str = ""
    """The fingerprint of those that the processes before this one had."""


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """`request` is an encoded `EngineRequest`, kept apart so that a bad one fails alone."""

    request_id: str
    request: msgspec.Raw


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_ids: list[str]


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    pass


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    phase: str
    share: float
    behind: str
    """As `executor.base.StartProgress`."""


class Started(msgspec.Struct, frozen=True, tag="started"):
    info: EngineInfo
    status: EngineStatus


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed"):
    """The model was not loaded; `kind` is the class name in `phalanx.errors`."""

    kind: str
    message: str
    fix: str | None = None
    code: str | None = None
    param: str | None = None


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """What one step brought. Without outputs it is a heartbeat; `status` comes with every heartbeat."""

    outputs: list[EngineOutput] = []
    status: EngineStatus | None = None


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The engine process lives. Sent by a thread of its own every `BEAT_S`, also in the middle of a step, and at once
    when the state changes. A process that sends none hangs; one whose `turns` and `progress` both stand still hangs
    too, as soon as they have done so for longer than a worker may take (`status.hang_bound`)."""

    status: EngineStatus
    turns: int
    """Counts turns of the loop, which go on when it is idle and while workers start again, but not within a step."""
    progress: int
    """Counts what the workers get done within a step or while they load; it stands still when they are idle."""


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The engine ends itself now; every request is lost."""

    cause: str


ToEngine = Start | Submit | Abort | Shutdown
FromEngine = Progress | Started | LoadFailed | Outputs | Beat | Fatal

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)
_requests = msgspec.msgpack.Decoder(EngineRequest)


class BrokenFrame(Exception):
    """The peer sent something that is no frame of this protocol."""


def frame(message: msgspec.Struct) -> bytes:
    """`message` as one frame. Raises BrokenFrame when it is above `MAX_FRAME`."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise BrokenFrame(f"a frame of {len(body)} bytes is above the limit of {MAX_FRAME}")
    return _LENGTH.pack(len(body)) + body


def send_outputs(
    send: Callable[[Outputs], None],
    outputs: list[EngineOutput],
    status: EngineStatus | None,
    abort: Callable[[str], None],
) -> None:
    """In several frames when one would be too large. An output that is too large alone ends its request, which is
    aborted then."""
    try:
        send(Outputs(outputs, status))
    except BrokenFrame:
        if len(outputs) > 1:
            middle = len(outputs) // 2
            send_outputs(send, outputs[:middle], None, abort)
            send_outputs(send, outputs[middle:], status, abort)
            return
        (output,) = outputs
        refusal = InvalidRequest(
            "The log-probabilities of one step are too many to be sent.", fix="Ask for fewer.", param="logprobs"
        )
        abort(output.request_id)
        ended = EngineOutput(output.request_id, output.start, finish_reason="error", error=request_error(refusal))
        send(Outputs([ended], status))


def submit(request: EngineRequest) -> Submit:
    return Submit(request.request_id, msgspec.Raw(_encoder.encode(request)))


def decode_request(raw: msgspec.Raw) -> EngineRequest:
    """Raises msgspec.DecodeError, msgspec.ValidationError or InvalidRequest on anything that is not a request."""
    return _requests.decode(raw)


def body_length(header: bytes) -> int:
    """The length that a frame's first 4 bytes announce. Raises BrokenFrame above `MAX_FRAME`."""
    length: int = _LENGTH.unpack(header)[0]
    if length > MAX_FRAME:
        raise BrokenFrame(f"a frame of {length} bytes is above the limit of {MAX_FRAME}")
    return length


def decoded(decoder: msgspec.msgpack.Decoder[_T], body: bytes | memoryview, what: str) -> _T:
    """The message in a frame's body. Raises BrokenFrame, which says what it should be."""
    try:
        return decoder.decode(body)
    except Exception as error:
        raise BrokenFrame(f"not {what}: {error}") from error


def decode_from_engine(body: bytes | memoryview) -> FromEngine:
    """Raises BrokenFrame."""
    return decoded(_from_engine, body, "a message of the engine")


_BURST = 1 << 14
"""Bytes. With so many at once, the peer's socket may have been full."""
_BURST_S, _GAP_S = 0.05, 0.005
"""For the rest of a burst, and for the peer to go on with it."""


class FrameSocket:
    """The engine's end of the socket. One thread receives, any may send."""

    def __init__(self, sock: socket.socket):
        self._sock = sock
        self._sock.setblocking(False)
        self._received = bytearray()
        self._sending = threading.Lock()

    def _await(self, event: int, timeout: float | None = None) -> None:
        """Up to `timeout` seconds. By poll: select knows no descriptor from 1024 on, and ours has the number that a
        front end with many open files gave it."""
        poll = select.poll()
        poll.register(self._sock, event)
        poll.poll(None if timeout is None else timeout * 1000)

    def send(self, message: FromEngine) -> None:
        """Waits while the peer's buffer is full. Raises OSError when the peer is gone, and BrokenFrame, with nothing
        sent, when `message` is too large."""
        data = memoryview(frame(message))
        with self._sending:
            while data:
                try:
                    data = data[self._sock.send(data) :]
                except BlockingIOError:
                    self._await(select.POLLOUT)

    def receive(self, timeout: float) -> list[ToEngine]:
        """Everything that has arrived; waits up to `timeout` seconds for the first byte (0 does not wait).

        Raises EOFError when the peer is gone, BrokenFrame when it sends nonsense.
        """
        if timeout > 0:
            self._await(select.POLLIN, timeout)
        # A socket holds some hundred messages. After a burst the rest is still at the peer, aborts behind the requests
        # that they end: a step in between would work for clients that are gone.
        if self._read() >= _BURST:
            end = time.monotonic() + _BURST_S
            while time.monotonic() < end:
                self._await(select.POLLIN, _GAP_S)
                if not self._read():
                    break
        return self._complete()

    def _read(self) -> int:
        """How many bytes were there."""
        before = len(self._received)
        while True:
            try:
                data = self._sock.recv(1 << 18)
            except BlockingIOError:
                return len(self._received) - before
            except OSError as error:
                raise EOFError(str(error)) from error
            if not data:
                raise EOFError("the front end closed the connection")
            self._received += data

    def _complete(self) -> list[ToEngine]:
        messages: list[ToEngine] = []
        position = 0
        while len(self._received) - position >= _LENGTH.size:
            body = position + _LENGTH.size
            end = body + body_length(bytes(self._received[position:body]))
            if len(self._received) < end:
                break
            messages.append(decoded(_to_engine, bytes(self._received[body:end]), "a message of the front end"))
            position = end
        del self._received[:position]
        return messages


_BY_CODE: dict[str | None, type[PhalanxError]] = {
    errors.ContextLengthExceeded.code: errors.ContextLengthExceeded,
    errors.QueueFull.code: errors.QueueFull,
    errors.PoisonRequest.code: errors.PoisonRequest,
}


def load_failure(error: PhalanxError) -> LoadFailed:
    return LoadFailed(name_of(error), error.message, error.fix, error.code, error.param)


def loading_error(failure: LoadFailed) -> PhalanxError:
    """The inverse of `load_failure`: the same class, message and fix."""
    return error_named(failure.kind, failure.message, fix=failure.fix, param=failure.param, code=failure.code)


def raised(error: RequestError) -> PhalanxError:
    """The exception that `error` stands for, of the fitting class."""
    kind = _BY_CODE.get(error.code)
    if kind is None:
        kind = errors.InvalidRequest if 400 <= error.status < 500 else PhalanxError
        kind = Unavailable if error.status == 503 else kind
        kind = EngineDead if error.status == 503 and error.retry_after is None else kind
    result = kind(error.message, param=error.param, code=error.code)
    result.status, result.type = error.status, error.type
    result.code, result.retry_after, result.retryable = error.code, error.retry_after, error.retryable
    return result

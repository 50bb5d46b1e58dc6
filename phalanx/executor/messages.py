"""What an executor and its ranks say to each other beside plans and results: typed msgpack, authenticated.

    executor -> rank    Begin, Allocate, AbortEpoch, Stop
    rank -> executor    Join, Progress, Loaded, Ready, Failed

A rank joins once in its life. Each epoch then goes Begin, (Progress …), Loaded, Allocate, Ready, and plans until the
epoch is aborted. Frames carry a kind: a message, a plan, or a result.
"""

from __future__ import annotations

import msgspec

from phalanx import errors
from phalanx.config import EngineConfig
from phalanx.distributed.bootstrap import Address
from phalanx.distributed.mesh import Mesh
from phalanx.errors import PhalanxError
from phalanx.executor.base import WorkerStatus

MESSAGE, PLAN, RESULT = 1, 2, 3
LIMIT = 1 << 28
"""Bytes of the longest frame: a plan that admits very long prompts, or a result with their log-probabilities."""


class Join(msgspec.Struct, frozen=True, tag="join"):
    """A rank has started."""

    address: Address
    pid: int
    host: str
    """The node's name, for people."""
    versions: dict[str, str]
    """Of what must be the same on all nodes."""


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """An epoch begins: meet the others, load what is not loaded, and say how much fits."""

    epoch: int
    roster: list[Address]
    key: bytes
    config: EngineConfig
    mesh: Mesh
    tensor_weights: tuple[tuple[float, ...], ...]
    stage_layers: tuple[int, ...]
    """Layers of each pipeline stage."""
    node_ranks: int
    """Ranks that share this rank's node and its memory."""
    crowded: bool
    encrypt: bool
    exchange_timeout: float | None
    ring_member: int
    """Place in the node's plan ring, whose descriptors follow; 0 when plans come over this stream."""
    reports: bool
    """This rank's results are the step's; where there is a plan ring, the descriptors of a result ring follow too."""


class Allocate(msgspec.Struct, frozen=True, tag="allocate"):
    blocks: int


class AbortEpoch(msgspec.Struct, frozen=True, tag="abort"):
    reason: str


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    pass


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    phase: str
    share: float


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    epoch: int
    blocks: int
    """The most that fit here."""
    reason: str
    """What decided it."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    epoch: int
    bytes_per_block: int
    vocab_size: int
    status: WorkerStatus


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """This rank cannot go on in this epoch; `kind` is the class name in `phalanx.errors`."""

    epoch: int
    kind: str
    message: str
    fix: str | None = None
    code: str | None = None
    param: str | None = None


ToRank = Begin | Allocate | AbortEpoch | Stop
FromRank = Join | Progress | Loaded | Ready | Failed

_encoder = msgspec.msgpack.Encoder()
_to_rank = msgspec.msgpack.Decoder(ToRank)
_from_rank = msgspec.msgpack.Decoder(FromRank)


def encode(message: ToRank | FromRank) -> bytes:
    return _encoder.encode(message)


def decode_to_rank(data: bytes | memoryview) -> ToRank:
    """Raises msgspec.DecodeError or msgspec.ValidationError."""
    return _to_rank.decode(data)


def decode_from_rank(data: bytes | memoryview) -> FromRank:
    """Raises msgspec.DecodeError or msgspec.ValidationError."""
    return _from_rank.decode(data)


_KINDS: dict[str, type[PhalanxError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, PhalanxError)
}


def failed(epoch: int, error: BaseException) -> Failed:
    """`error` as it travels; of an unexpected one its class and text."""
    if not isinstance(error, PhalanxError):
        return Failed(epoch, "PhalanxError", f"{type(error).__name__}: {error}".rstrip(": "))
    kind = next((k.__name__ for k in type(error).__mro__ if k.__name__ in _KINDS), "PhalanxError")
    return Failed(epoch, kind, error.message, error.fix, error.code, error.param)


def raised(failure: Failed) -> PhalanxError:
    """The exception that `failure` stands for."""
    kind = _KINDS.get(failure.kind, PhalanxError)
    return kind(failure.message, fix=failure.fix, param=failure.param, code=failure.code)

"""What an executor and its ranks say to each other beside plans and results: typed msgpack, authenticated.

    executor -> rank    Begin, Load, Measure, Allocate, AbortEpoch, Stop, Ping
    rank -> executor    Join, Met, Progress, Loaded, Measured, Ready, Failed, Left, Pong

A rank joins once in its life. Each epoch then goes

    Begin ── Met ── Load ── (Progress …) Loaded ── Measure ── Measured ── Allocate ── Ready ── plans … ── Left

and every order is given when all ranks have answered the one before: none loads before all have found that there is
room, none measures what is free while another is still loading. A rank that is asked how it is answers at any time,
from a thread that does nothing else. Frames carry a kind: a message, a plan, or a result.
"""

from __future__ import annotations

import msgspec

from phalanx.config import EngineConfig
from phalanx.distributed.address import Address
from phalanx.distributed.mesh import Mesh
from phalanx.error_names import error_named, name_of
from phalanx.errors import PhalanxError
from phalanx.executor.base import CacheLayout, WorkerStatus

MESSAGE, PLAN, RESULT = 1, 2, 3
EXCHANGE_S = 300.0
"""The most that a rank waits for another one within a step, or the executor to be rid of a plan."""
LIMIT = 1 << 28
"""Bytes of the longest frame: a plan that admits very long prompts, or a result with their log-probabilities."""


class RankStart(msgspec.Struct, frozen=True):
    """All that a new process needs to become a rank."""

    rank: int
    hub: Address
    """Where the executor listens; its `rank` is -1."""
    key: bytes
    host: str | None = None
    """This node's address for ranks of other nodes; None when the world is on one node."""
    cores: tuple[int, ...] = ()
    """Processor cores to run on; empty leaves the choice to the system."""
    threads: int = 1
    """At most; OMP_NUM_THREADS may say fewer."""
    device: str = "cpu"
    device_index: int = 0
    """Which of the node's devices, where they are numbered (GPUs)."""
    encrypt: bool = False
    timeout: float = 60.0
    """Seconds to reach the executor."""
    share: str = ""
    """What it is to hold, by name: it finds the image of its weights that the last rank of this name has left."""
    life: int = 1
    """How many times a process has been started as this rank, with this one."""


class Join(msgspec.Struct, frozen=True, tag="join"):
    """A rank has started."""

    address: Address
    pid: int
    host: str
    """The node's name, for people."""
    versions: dict[str, str]
    """Of what must be the same on all nodes."""


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """An epoch begins: meet the others, and see whether there is room for what is not loaded yet."""

    epoch: int
    roster: list[Address]
    key: bytes
    config: EngineConfig
    mesh: Mesh
    tensor_weights: tuple[tuple[float, ...], ...]
    stage_layers: tuple[int, ...]
    """Layers of each pipeline stage."""
    node_ranks: int
    """Ranks on this rank's node."""
    loading_ranks: int
    """Those of them that are still to load, and share the memory that is free."""
    longest: int
    """Tokens of the longest request for which there must be room; 0 is --max-model-len."""
    weights: str
    """What the ranks of this executor have read (`checkpoint.fingerprint`); empty when none has."""
    crowded: bool
    encrypt: bool
    ring_member: int
    """Place in the node's plan ring, whose descriptors follow; 0 when plans come over this stream."""
    reports: bool
    """This rank's results are the step's; where there is a plan ring, the descriptors of a result ring follow too."""


class Load(msgspec.Struct, frozen=True, tag="load"):
    """All have room: read the weights, unless they are there."""


class Measure(msgspec.Struct, frozen=True, tag="measure"):
    """All have loaded: say how many blocks the cache can have."""


class Allocate(msgspec.Struct, frozen=True, tag="allocate"):
    blocks: int


class AbortEpoch(msgspec.Struct, frozen=True, tag="abort"):
    reason: str


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    pass


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """How are you?"""


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    count: int
    """Changes with progress (`distributed.pulse`)."""
    waits_for: str
    """Who for, in words; empty while it computes."""


class Met(msgspec.Struct, frozen=True, tag="met"):
    """Connected with all groups, and there is room for the weights."""

    epoch: int


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    phase: str
    share: float


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    epoch: int


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    epoch: int
    blocks: int
    """The most that fit here."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    epoch: int
    layout: CacheLayout
    """`bytes_per_block` is this rank's alone."""
    status: WorkerStatus


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """This rank cannot go on in this epoch; `kind` is the class name in `phalanx.errors`."""

    epoch: int
    kind: str
    message: str
    fix: str | None = None
    code: str | None = None
    param: str | None = None
    secondary: bool = False
    """It only noticed that another rank is gone or disagrees; that one's own word, if it comes, says more."""


class Left(msgspec.Struct, frozen=True, tag="left"):
    """This rank has let go of everything that belonged to the epoch, and waits for the next."""

    epoch: int


Order = Load | Measure | Allocate
ToRank = Begin | Order | AbortEpoch | Stop | Ping
FromRank = Join | Met | Progress | Loaded | Measured | Ready | Failed | Left | Pong

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


def failed(epoch: int, error: BaseException, *, secondary: bool = False) -> Failed:
    """`error` as it travels; of an unexpected one its class and text, in one line."""
    if not isinstance(error, PhalanxError):
        text = " ".join(str(error).split())[:500]
        return Failed(epoch, "PhalanxError", f"{type(error).__name__}: {text}".rstrip(": "))
    return Failed(epoch, name_of(error), error.message, error.fix, error.code, error.param, secondary)


def raised(failure: Failed, where: str = "") -> PhalanxError:
    """The exception that `failure` stands for; `where` goes in front of its message."""
    message = where + failure.message
    return error_named(failure.kind, message, fix=failure.fix, param=failure.param, code=failure.code)

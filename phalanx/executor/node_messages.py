"""What node 0 and the other nodes say to each other (the ranks speak for themselves): typed msgpack, authenticated.

    node -> node 0    NodeHello, Prepared, Probed, RankEnded, Leaving, Beat
    node 0 -> node    Welcome, Refused, Probe, StartRanks, EndRank, Stop, Beat

Once in a node's life: hello, welcome, prepared, probe, probed; then starts of ranks, and beats until the end. No key is
among them: a node derives those it needs from the secret that it shares with node 0 (`phalanx.executor.keys`).
"""

from __future__ import annotations

import msgspec

from phalanx.executor.messages import RankStart
from phalanx.worker.capacity import Capacity

FRAME = 1
LIMIT = 1 << 22
"""Bytes of the longest message."""

JOIN_LIMIT_S = 600.0
"""How long nodes wait for each other."""
REPORT_S = 10.0
"""How often they say so."""

BEAT_S = 0.5
PATIENCE_S = 10.0
"""A node that has said nothing for so long, though its kernel still answers, is hung."""

SILENCE_MS = 2000
"""A node whose kernel has acknowledged nothing for so long is gone; with a beat before and a try after it, 3 s."""


class FileFact(msgspec.Struct, frozen=True):
    name: str
    size: int
    sum: str
    """SHA-256 of the first MiB, where the header is."""


class Survey(msgspec.Struct, frozen=True):
    """What must be the same on all nodes."""

    facts: dict[str, str]
    """Name of a thing to its value here; the order is that in which differences are reported."""
    files: list[FileFact]


class NodeHello(msgspec.Struct, frozen=True, tag="hello"):
    node: int
    """Its --node-rank."""
    nnodes: int
    name: str
    address: str
    """Where its ranks can be reached."""
    probe_port: int
    cores: int
    versions: dict[str, str]


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """The node has found the model, or has not: `failure` says why, `lacks` names a path that is not there. Where
    shares are automatic, `capacity` is what it has for ranks, measured: its devices, a host's processor as one."""

    survey: Survey | None = None
    failure: str = ""
    fix: str | None = None
    lacks: str = ""
    capacity: list[Capacity] = []


class Unreachable(msgspec.Struct, frozen=True):
    node: int
    reason: str


class Probed(msgspec.Struct, frozen=True, tag="probed"):
    failures: list[Unreachable]


class RankEnded(msgspec.Struct, frozen=True, tag="ended"):
    rank: int
    life: int
    """Which process of that rank: the number of its start."""
    cause: str


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    reason: str


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    pass


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    session: bytes
    """Drawn by node 0 for this run; all keys of the run depend on it."""
    name: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    message: str
    fix: str | None = None


class Target(msgspec.Struct, frozen=True):
    node: int
    host: str
    port: int


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Try to reach each of these."""

    targets: list[Target]


class StartRanks(msgspec.Struct, frozen=True, tag="start"):
    starts: list[RankStart]
    """Without the key and the cores, which the node fills in."""
    life: int
    first: int
    """The lowest of this node's ranks, which have consecutive numbers."""
    ranks: int
    """How many ranks the node has, these and others."""
    device: str


class EndRank(msgspec.Struct, frozen=True, tag="end"):
    rank: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    pass


ToNode = Welcome | Refused | Probe | StartRanks | EndRank | Stop | Beat
FromNode = NodeHello | Prepared | Probed | RankEnded | Leaving | Beat

_encoder = msgspec.msgpack.Encoder()
_to_node = msgspec.msgpack.Decoder(ToNode)
_from_node = msgspec.msgpack.Decoder(FromNode)


def encode(message: ToNode | FromNode) -> bytes:
    return _encoder.encode(message)


def decode_to_node(data: bytes | memoryview) -> ToNode:
    """Raises msgspec.DecodeError or msgspec.ValidationError."""
    return _to_node.decode(data)


def decode_from_node(data: bytes | memoryview) -> FromNode:
    """Raises msgspec.DecodeError or msgspec.ValidationError."""
    return _from_node.decode(data)

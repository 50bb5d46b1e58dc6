"""What the process that has the router and its API servers say to each other, where there are several: frames as
between a front end and its engine (`core_messages`), over an inherited socket.

    router -> server    Begin, Start, Started, Outputs, Servers, Drain, Tell, Gathered
    server -> router    Submit, Abort, Ready, LoadFailed, Alive, Counted, Gather

A group of API servers on another machine speaks to the router as one server, over TCP (`remote_link`), and says when it
is `Leaving`; it brings its own configuration, and so gets no Begin, Start and Servers.

Whatever a server says renews the lease of its requests; it says something every `LOOK_S`.
"""

from __future__ import annotations

import msgspec

from phalanx.config import EngineConfig
from phalanx.engine.core_messages import Abort, LoadFailed, Outputs, Start, Started, Submit, decoded
from phalanx.metrics.counts import Counts


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The first message. The configuration as it was given, with keys, and with the real port."""

    config: EngineConfig


class ServerProcess(msgspec.Struct):
    """One of several API servers; `/status` shows them."""

    pid: int | None
    state: str
    """loading, ready, draining, or lost while it is not started again."""
    lives: int
    """Processes that have been in this place."""
    requests: int
    """HTTP requests for answers that it works on."""
    node: str = ""
    """The other machine whose servers these are, all of them as one; the process is the one that keeps them."""


class Servers(msgspec.Struct, frozen=True, tag="servers"):
    servers: list[ServerProcess]


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Take no more requests; those that are left in so many seconds are ended. Then end. Another may shorten it."""

    seconds: float


class Tell(msgspec.Struct, frozen=True, tag="tell"):
    """Answered by a `Counted`."""


class Gathered(msgspec.Struct, frozen=True, tag="gathered"):
    """The answer to the oldest `Gather` that has none: what all others have counted."""

    counts: Counts


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """It has what it needs to answer, as soon as the engines have."""

    has_chat: bool
    """The model has a chat template."""


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    requests: int
    """As `ServerProcess.requests`."""
    counts: Counts | None = None
    """Now and then, so that little is forgotten with a process."""


class Counted(msgspec.Struct, frozen=True, tag="counted"):
    """The answer to the oldest `Tell` that has none."""

    counts: Counts


class Gather(msgspec.Struct, frozen=True, tag="gather"):
    """Answered by a `Gathered`; `counts` is what the asker has counted."""

    counts: Counts


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """It has nothing left to do and ends now."""


ToServer = Begin | Start | Started | Outputs | Servers | Drain | Tell | Gathered
FromServer = Submit | Abort | Ready | LoadFailed | Alive | Counted | Gather | Leaving

_to_server = msgspec.msgpack.Decoder(ToServer)
_from_server = msgspec.msgpack.Decoder(FromServer)


def decode_to_server(body: bytes | memoryview) -> ToServer:
    """Raises BrokenFrame."""
    return decoded(_to_server, body, "a message of the router")


def decode_from_server(body: bytes | memoryview) -> FromServer:
    """Raises BrokenFrame."""
    return decoded(_from_server, body, "a message of an API server")

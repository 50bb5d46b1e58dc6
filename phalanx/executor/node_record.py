"""One of the other nodes, as node 0 knows it. Only remembers, and says what it is told to say."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field

from phalanx.distributed.transports.abort import GroupBroken
from phalanx.distributed.transports.secure_stream import SecureStream
from phalanx.errors import ConfigError
from phalanx.executor.node_messages import BEAT_S, FRAME, NodeHello, Prepared, Probed, Survey, ToNode, encode
from phalanx.executor.survey import difference

SAY_S = 5.0


@dataclass
class RankProcess:
    life: int
    cause: str | None = None


@dataclass
class Node:
    """One of the other nodes, as node 0 knows it."""

    hello: NodeHello
    stream: SecureStream
    heard: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    prepared: Prepared | None = None
    probed: Probed | None = None
    lost: str | None = None
    admitted: bool = False
    """It fits, and the others reach it."""
    processes: dict[int, RankProcess] = field(default_factory=dict)
    reader: threading.Thread | None = None

    @property
    def shown(self) -> str:
        return f"node {self.hello.node} ({self.hello.name}, {self.hello.address})"

    @property
    def short(self) -> str:
        return f"node {self.hello.node} ({self.hello.name})"

    def unfit(self, ours: Survey, here: str) -> ConfigError | None:
        """Why it cannot have ranks, once it has looked; `ours` is what the node `here` has found."""
        prepared, name = self.prepared, capital(self.short)
        if prepared is None:
            return None
        if prepared.lacks:
            return ConfigError(
                f"{name} lacks {prepared.lacks}.",
                fix=f"Put the model on {self.hello.name}, at the same path as on the other nodes.",
            )
        if prepared.survey is None:
            return ConfigError(f"{name} cannot use the model: {prepared.failure}", fix=prepared.fix)
        return difference(ours, prepared.survey, here, self.short)

    def say(self, message: ToNode) -> None:
        """A node that is gone is noticed by who listens to it; nothing is raised here."""
        with contextlib.suppress(GroupBroken), self.lock:
            self.stream.send(FRAME, encode(message), SAY_S)


def why_silent(node: Node, error: Exception) -> str:
    """A kernel that lives says at once that a process has ended; one that says nothing is not there, or not reached."""
    silent = time.monotonic() - node.heard
    if silent > 4 * BEAT_S:
        return f"nothing has come from it for {silent:.0f} s: it is down, or the network is"
    text = str(error).rstrip(".")
    return text[:1].lower() + text[1:]


def numbers(nodes: list[int]) -> str:
    return f"node {nodes[0]}" if len(nodes) == 1 else "nodes " + ", ".join(map(str, nodes))


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]

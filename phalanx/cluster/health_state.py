"""What changes in a cluster between two looks, and what of it is worth an event. Pure: looks in, events out.

Something that lasts (a slow link, full memory, no room) begins with one event and is over with another, and not before
it has been seen twice, so that a value that swings about its limit does not flood anybody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

NODE_LOST, NODE_JOINED, ACTOR_LOST = "node_lost", "node_joined", "actor_lost"
LINK_SLOW, MEMORY_HIGH, NO_CAPACITY = "link_slow", "memory_high", "no_capacity"
KINDS = (NODE_LOST, NODE_JOINED, ACTOR_LOST, LINK_SLOW, MEMORY_HIGH, NO_CAPACITY)


@dataclass(frozen=True)
class HealthLimits:
    link_s: float = 0.2
    """A node whose raylet takes longer to accept a connection has a slow link; over at half of it."""
    memory: float = 0.92
    """Share of a node's main memory in use; over 0.05 below."""
    looks: int = 2
    """For so many looks in a row something must last."""


@dataclass(frozen=True)
class NodeSight:
    host: str
    link_s: float | None = None
    """Seconds to connect to it; infinite when it cannot be reached; None when nobody tried."""
    memory: float | None = None


@dataclass(frozen=True)
class ActorSight:
    name: str
    """Class and pid, for people."""
    node: str


@dataclass(frozen=True)
class Look:
    """The cluster at one moment."""

    nodes: Mapping[str, NodeSight] = field(default_factory=dict)
    """Those that live, by Ray's id."""
    actors: Mapping[str, ActorSight] = field(default_factory=dict)
    """Those that live, by Ray's id."""
    ended: Mapping[str, str] = field(default_factory=dict)
    """Why actors ended that lived at the look before; only those that nobody ended on purpose."""
    waiting: frozenset[str] = frozenset()
    """What waits for room, in words."""


@dataclass(frozen=True)
class ClusterEvent:
    kind: str
    """One of KINDS."""
    subject: str
    """The node's or actor's id, or what waits."""
    message: str
    time: float
    """Wall clock."""
    over: bool = False
    """What lasted has ended."""


@dataclass
class _Lasting:
    seen: int = 0
    told: bool = False


class HealthState:
    def __init__(self, limits: HealthLimits | None = None):
        self._limits = limits or HealthLimits()
        self._before: Look | None = None
        self._lasting: dict[tuple[str, str], _Lasting] = {}

    def look(self, look: Look, now: float) -> list[ClusterEvent]:
        """What is new since the look before; the first one is the beginning, and what it lacks is not lost."""
        events: list[ClusterEvent] = []
        before, self._before = self._before, look
        if before is not None:
            events += self._changes(before, look, now)
        for node_id, node in look.nodes.items():
            events += self._links(node_id, node, now) + self._memories(node_id, node, now)
        waiting = {subject for kind, subject in self._lasting if kind == NO_CAPACITY} | look.waiting
        for what in sorted(waiting):
            begins, ends = what in look.waiting, what not in look.waiting
            events += self._last(NO_CAPACITY, what, begins, ends, f"No room: {what}", f"No longer: {what}", now)
        for key in [key for key in self._lasting if key[0] != NO_CAPACITY and key[1] not in look.nodes]:
            del self._lasting[key]
        return events

    def _changes(self, before: Look, look: Look, now: float) -> list[ClusterEvent]:
        events = []
        for node_id, node in before.nodes.items():
            if node_id not in look.nodes:
                events.append(ClusterEvent(NODE_LOST, node_id, f"Node {node.host} ({node_id[:8]}) is lost.", now))
        for node_id, node in look.nodes.items():
            if node_id not in before.nodes:
                events.append(ClusterEvent(NODE_JOINED, node_id, f"Node {node.host} ({node_id[:8]}) has joined.", now))
        for actor_id, cause in look.ended.items():
            actor = before.actors.get(actor_id)
            if actor is not None and actor_id not in look.actors:
                host = before.nodes[actor.node].host if actor.node in before.nodes else "a node that is gone"
                message = f"Actor {actor.name} on {host} is lost: {cause}."
                events.append(ClusterEvent(ACTOR_LOST, actor_id, message, now))
        return events

    def _links(self, node_id: str, node: NodeSight, now: float) -> list[ClusterEvent]:
        if node.link_s is None:
            return []
        limit, took = self._limits.link_s, node.link_s
        text = "cannot be reached" if took == float("inf") else f"took {took * 1000:.0f} ms to answer"
        slow, well = f"The link to {node.host} is slow: it {text}.", f"The link to {node.host} is well again."
        return self._last(LINK_SLOW, node_id, took > limit, took < limit / 2, slow, well, now)

    def _memories(self, node_id: str, node: NodeSight, now: float) -> list[ClusterEvent]:
        if node.memory is None:
            return []
        limit, used = self._limits.memory, node.memory
        high, well = f"{node.host} uses {used:.0%} of its memory.", f"{node.host} has memory again: {used:.0%} in use."
        return self._last(MEMORY_HIGH, node_id, used >= limit, used < limit - 0.05, high, well, now)

    def _last(
        self, kind: str, subject: str, begins: bool, ends: bool, message: str, over: str, now: float
    ) -> list[ClusterEvent]:
        lasting = self._lasting.setdefault((kind, subject), _Lasting())
        lasting.seen = lasting.seen + 1 if begins else 0
        if begins and not lasting.told and lasting.seen >= self._limits.looks:
            lasting.told = True
            return [ClusterEvent(kind, subject, message, now)]
        if not ends:
            return []
        del self._lasting[kind, subject]
        return [ClusterEvent(kind, subject, over, now, over=True)] if lasting.told else []

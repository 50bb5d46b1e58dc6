"""The pure core of `RayActorPool`: events in, actions out, the time as an argument. No Ray, no thread, no clock.

    STARTING ──started──▶ READY ──probe overdue──▶ SILENT ──longer──▶ killed, WAITING
        │                   │  ◀──answered──────────┘
        └─────crashed───────┴──▶ WAITING (back-off, budget) ──▶ STARTING       draining and idle ──▶ stopped

Guarantees: an index means one place for as long as the pool lives and is never used for another; what was handed out
of a place is counted until it is released, whatever becomes of its actor; an actor with work in hand is never stopped
to make the pool smaller; a place is restarted at most `restarts` times in `window` seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

STARTING, READY, SILENT, WAITING = "starting", "ready", "silent", "waiting"


@dataclass(frozen=True)
class PoolLimits:
    """Seconds, except `restarts`."""

    probe_interval: float = 1.0
    """Between the answer to one probe and the next."""
    silent_after: float = 2.0
    """An actor whose probe is unanswered for so long gets no new work."""
    hang_timeout: float = 10.0
    """After so long it is killed and replaced."""
    start_timeout: float = 600.0
    """An actor that has not started by then is given up."""
    restarts: int = 3
    """Of one place within `window`."""
    window: float = 300.0
    backoff: float = 0.5
    """Before the second restart within the window; then it doubles. The first is at once."""


class Do(Enum):
    START = "start"
    """Make the place's actor. Its predecessor, if any, is dead."""
    PROBE = "probe"
    AWAIT = "await"
    """Ray starts it again: hear when it is there."""
    KILL = "kill"
    """It hangs, or is useless: at once."""
    STOP = "stop"
    """It has no work and is not needed any more."""


@dataclass(frozen=True)
class Action:
    do: Do
    index: int
    life: int
    """Which actor of this place, from 1. Events about another one than the present are late, and nothing."""


@dataclass
class Place:
    """One actor's, through all its lives."""

    index: int
    state: str = STARTING
    life: int = 1
    draining: bool = False
    leases: int = 0
    work: float = 0.0
    """Handed out and not released, in the caller's unit."""
    node: str = ""
    since: float = 0.0
    """When `state` began."""
    used: int = 0
    """When it was last handed out, in hand-outs of the pool."""
    asked: float | None = None
    """When the open probe was sent."""
    quiet: float | None = None
    """When the first probe was sent since it was last heard."""
    heard: float = 0.0
    """When it last answered, or started."""
    probe_at: float = 0.0
    """When the next probe is due."""
    restarted: list[float] = field(default_factory=list)
    start_at: float = math.inf
    """While WAITING."""
    cause: str = ""
    """What its last life died of."""


class PoolState:
    """Every method that returns actions expects them to be done in this order."""

    def __init__(self, limits: PoolLimits | None = None):
        self.limits = limits or PoolLimits()
        self.places: dict[int, Place] = {}
        """By index."""
        self._next = 0
        self._handed = 0

    @property
    def size(self) -> int:
        """Places that are kept: the size asked for."""
        return sum(not p.draining for p in self.places.values())

    # What callers do

    def get(
        self, now: float, work: float = 1.0, *, home: str = "", node_load: Mapping[str, float] | None = None
    ) -> int | None:
        """Hand out the healthy actor with the least work; None when there is none. Among equals: the one whose node
        has the least work of ours and of others (`node_load`, 0 to 1), then one on the node `home`, then the one that
        has rested longest."""
        ready = [p for p in self.places.values() if p.state == READY and not p.draining]
        if not ready:
            return None
        loads: dict[str, float] = {}
        for p in self.places.values():
            loads[p.node] = loads.get(p.node, 0.0) + p.work
        others = node_load or {}
        best = min(
            ready, key=lambda p: (p.work, loads[p.node] + others.get(p.node, 0.0), p.node != home, p.used, p.index)
        )
        self._handed += 1
        best.used = self._handed
        best.leases += 1
        best.work += work
        return best.index

    def release(self, index: int, now: float, work: float = 1.0) -> list[Action]:
        """What was handed out is back. Raises KeyError for an index of which nothing is handed out."""
        place = self.places.get(index)
        if place is None or place.leases == 0:
            raise KeyError(index)
        place.leases -= 1
        place.work = max(0.0, place.work - work) if place.leases else 0.0
        return self._stop_if_idle(place)

    def scale(self, size: int, now: float) -> list[Action]:
        """More: those that drain are kept first, then new ones are made. Fewer: those that never started go first, then
        idle ones, then those with the least work, as soon as it is done."""
        actions: list[Action] = []
        more = size - self.size
        draining = [p for p in self.places.values() if p.draining]
        for place in sorted(draining, key=lambda p: (p.state != READY, p.index))[: max(0, more)]:
            place.draining = False
        for _ in range(max(0, size - self.size)):
            place = Place(self._next, since=now)
            self.places[place.index] = place
            self._next += 1
            actions.append(Action(Do.START, place.index, place.life))
        kept = [p for p in self.places.values() if not p.draining]
        kept.sort(key=lambda p: (p.state in (READY, SILENT), p.work, p.leases, -p.index))
        for place in kept[: max(0, len(kept) - size)]:
            place.draining = True
            actions += self._stop_if_idle(place)
        return actions

    def _stop_if_idle(self, place: Place) -> list[Action]:
        if not place.draining or place.leases:
            return []
        del self.places[place.index]
        return [] if place.state == WAITING else [Action(Do.STOP, place.index, place.life)]

    # What happens to actors

    def started(self, index: int, life: int, now: float, node: str = "") -> None:
        place = self._present(index, life)
        if place is not None and place.state == STARTING:
            self._enter(place, READY, now)
            place.node = node
            self._heard(place, now)

    def answered(self, index: int, life: int, now: float) -> None:
        """The open probe was answered: all is well."""
        place = self._present(index, life)
        if place is None or place.state not in (READY, SILENT):
            return
        self._heard(place, now)
        if place.state == SILENT:
            self._enter(place, READY, now)

    def _heard(self, place: Place, now: float) -> None:
        place.asked = place.quiet = None
        place.heard = now
        place.probe_at = now + self.limits.probe_interval

    def unavailable(self, index: int, life: int, now: float) -> None:
        """It cannot be reached at present: no new work. It is asked again until `hang_timeout` has passed."""
        place = self._present(index, life)
        if place is not None and place.state in (READY, SILENT):
            place.asked, place.probe_at = None, now + self.limits.probe_interval
            place.quiet = now if place.quiet is None else place.quiet
            if place.state == READY:
                self._enter(place, SILENT, now)

    def doubt(self, index: int, life: int, now: float) -> None:
        """Somebody could not work with it: no new work until it has answered, which it is asked to at the next tick."""
        self.unavailable(index, life, now)
        if (place := self._present(index, life)) is not None:
            place.probe_at = now

    def hurry(self, now: float) -> None:
        """All are asked at the next tick."""
        for place in self.places.values():
            place.probe_at = now

    def restarting(self, index: int, life: int, now: float, cause: str = "") -> list[Action]:
        """It died, and Ray starts it again under the same handle: one of the place's restarts."""
        place = self._present(index, life)
        if place is None or place.state not in (READY, SILENT):
            return []
        place.cause = cause
        place.restarted.append(now)
        self._enter(place, STARTING, now)
        return [Action(Do.AWAIT, index, life)]

    def crashed(self, index: int, life: int, now: float, cause: str = "") -> list[Action]:
        """It is dead, and nobody else starts it again."""
        place = self._present(index, life)
        if place is None or place.state == WAITING:
            return []
        return self._replace(place, now, cause)

    def useless(self, index: int, life: int, now: float, cause: str = "") -> list[Action]:
        """It lives and says that it cannot work any more."""
        place = self._present(index, life)
        if place is None or place.state == WAITING:
            return []
        return [Action(Do.KILL, index, life), *self._replace(place, now, cause)]

    def tick(self, now: float) -> list[Action]:
        """What is due by now."""
        actions: list[Action] = []
        limits = self.limits
        for place in list(self.places.values()):
            life = place.life
            if place.state == STARTING and now - place.since > limits.start_timeout:
                actions.append(Action(Do.KILL, place.index, life))
                actions += self._replace(place, now, f"it did not start within {limits.start_timeout:g} s")
            elif place.state == WAITING and now >= place.start_at and not place.draining:
                place.restarted = [t for t in place.restarted if now - t < limits.window] + [now]
                place.life += 1
                self._enter(place, STARTING, now)
                actions.append(Action(Do.START, place.index, place.life))
            elif place.state in (READY, SILENT):
                actions += self._look(place, now)
        return actions

    def _look(self, place: Place, now: float) -> list[Action]:
        limits = self.limits
        quiet = 0.0 if place.quiet is None else now - place.quiet
        if place.state == SILENT and quiet > limits.hang_timeout:
            kill = Action(Do.KILL, place.index, place.life)
            return [kill, *self._replace(place, now, f"it did not answer for {quiet:.1f} s")]
        if place.state == READY and quiet > limits.silent_after:
            self._enter(place, SILENT, now)
        if place.asked is None and now >= place.probe_at:
            place.asked = now
            place.quiet = now if place.quiet is None else place.quiet
            return [Action(Do.PROBE, place.index, place.life)]
        return []

    def _replace(self, place: Place, now: float, cause: str) -> list[Action]:
        """The present life is over."""
        limits = self.limits
        place.cause, place.node, place.asked, place.quiet = cause, "", None, None
        self._enter(place, WAITING, now)
        recent = [t for t in place.restarted if now - t < limits.window]
        pause = limits.backoff * 2 ** (len(recent) - 1) if recent else 0.0
        if len(recent) >= limits.restarts:
            oldest = recent[-limits.restarts] if limits.restarts else math.inf
            pause = max(pause, oldest + limits.window - now)
        place.start_at = now + pause
        return self._stop_if_idle(place)

    def _enter(self, place: Place, state: str, now: float) -> None:
        place.state, place.since = state, now

    def _present(self, index: int, life: int) -> Place | None:
        place = self.places.get(index)
        return place if place is not None and place.life == life else None

    # What is known

    def exhausted(self, now: float) -> bool:
        """Whether no actor can work, and none will within the window: every place has used up its restarts."""
        kept = [p for p in self.places.values() if not p.draining]
        return all(p.state == WAITING and self._over_budget(p, now) for p in kept)

    def _over_budget(self, place: Place, now: float) -> bool:
        return sum(now - t < self.limits.window for t in place.restarted) >= self.limits.restarts

"""The health of a Ray cluster: calls that are tried again, a status, a monitor, and what is done about dead nodes.

What is an event is decided in `health_state`; here are Ray, sockets, a thread and the clock. Everything that is asked
of a node has a bound; asks Ray's head directly and needs no dashboard.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import json
import logging
import random
import socket
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from phalanx.cluster.actor_pool import RayActorPool
from phalanx.cluster.health_state import ActorSight, ClusterEvent, HealthLimits, HealthState, Look, NodeSight
from phalanx.errors import ConfigError, UserError
from phalanx.executor.ray_session import import_ray
from phalanx.executor.ray_view import RayView

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_REACH_S = 1.0
_PROBE_S = 3.0
_WEBHOOK_S = 3.0
_KEPT = 1000
"""Events that a monitor remembers."""
_UNSENT = 100
"""Events that may wait for a slow webhook; the oldest are dropped."""
_PURPOSE = ("ray.kill", "references to the actor were removed", "out of scope", "owner", "exit_actor")
"""What Ray says when an actor ended because somebody wanted it to."""


def _connected() -> ModuleType:
    ray = import_ray()
    if not ray.is_initialized():
        raise ConfigError("This process is not connected to Ray.", fix="Call setup_ray_resources first.")
    return ray


# Calls


def fault_tolerant_execute(actor: Any, method: str, *args: Any, max_retries: int = 3, **kwargs: Any) -> Any:
    """The result of `actor.method(*args, **kwargs)`, tried again up to `max_retries` times with growing pauses when the
    actor or the task fails.

    Raised at once: errors that are not Ray's, and a method's ValueError, TypeError or Phalanx user error, which would
    come again. Each try may run the method once more: it should bear that.
    """
    if isinstance(max_retries, bool) or not isinstance(max_retries, int) or max_retries < 0:
        raise ConfigError(f"`max_retries` must be 0 or more, got {max_retries!r}.")
    ray = _connected()
    call = getattr(actor, method, None)
    if call is None:
        raise ConfigError(f"The actor has no method '{method}'.")
    return execute(lambda: ray.get(call.remote(*args, **kwargs)), max_retries, worth_retrying, time.sleep)


def execute(
    attempt: Callable[[], Any],
    max_retries: int,
    again: Callable[[Exception], bool],
    sleep: Callable[[float], object],
    draw: Callable[[], float] = random.random,
) -> Any:
    """`attempt`, repeated while it raises what is worth it. Pauses double from 0.1 s to 5 s, each a random share from
    one half to the whole of that."""
    tries = 0
    while True:
        try:
            return attempt()
        except Exception as error:
            if tries == max_retries or not again(error):
                raise
            pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**tries) * (0.5 + draw() / 2)
            log.warning("Try %s of %s failed (%s); again in %.1f s.", tries + 1, max_retries + 1, _first(error), pause)
            sleep(pause)
            tries += 1


def worth_retrying(error: Exception) -> bool:
    """Whether the same call may succeed later."""
    from ray import exceptions

    if isinstance(error, exceptions.RayTaskError):
        cause = getattr(error, "cause", None)
        return not isinstance(cause, ValueError | TypeError | UserError)
    kinds = (exceptions.RayActorError, exceptions.WorkerCrashedError, exceptions.NodeDiedError)
    return isinstance(error, (*kinds, exceptions.OutOfMemoryError, exceptions.ObjectLostError))


def _first(error: Exception) -> str:
    return type(error).__name__.replace("RayTaskError", "the method raised")


# Status


def get_cluster_status() -> dict[str, Any]:
    """`resources` and `available_resources` of all nodes that live, `nodes` (those that do not live, too) and `actors`
    that live: plain data. Raises ConfigError without a connection to Ray."""
    ray = _connected()
    view = RayView(ray)
    free = {site.node: dict(site.free) for site in view.nodes()}
    nodes = [
        {
            "id": node["NodeID"],
            "host": node["NodeManagerHostname"],
            "address": node["NodeManagerAddress"],
            "alive": node["Alive"],
            "cause": "" if node["Alive"] else node.get("DeathReasonMessage", "") or "",
            "resources": dict(node["Resources"]),
            "available": free.get(node["NodeID"], {}),
            "labels": dict(node.get("Labels", {})),
        }
        for node in ray.nodes()
    ]
    hosts = {node["id"]: node["host"] for node in nodes}
    actors = [
        {
            "id": actor.actor_id.hex(),
            "class": actor.class_name.rpartition(".")[2],
            "name": actor.name,
            "pid": actor.pid,
            "node": actor.address.node_id.hex(),
            "host": hosts.get(actor.address.node_id.hex(), ""),
            "resources": dict(actor.required_resources),
            "restarts": actor.num_restarts,
        }
        for actor in view.living_actors()
    ]
    available: dict[str, float] = {}
    for amounts in free.values():
        for name, amount in amounts.items():
            available[name] = available.get(name, 0.0) + amount
    return {
        "resources": dict(ray.cluster_resources()),
        "available_resources": available,
        "nodes": nodes,
        "actors": actors,
    }


# Dead nodes


@dataclass(frozen=True)
class DeadNode:
    """A node that is gone, and what was done about it."""

    node: str
    host: str
    replaced: tuple[str, ...] = ()
    """Actors of pools that are made again elsewhere: class and index."""


def handle_dead_nodes(pools: Sequence[RayActorPool] = ()) -> list[DeadNode]:
    """Make actors of `pools` that were on dead nodes again on others at once, and remove groups of ours that nobody
    owns any more. One entry for each dead node that Ray remembers.

    Ranks on a dead node are replaced by their own engine, or its model is split over the others, without this call.
    """
    ray = _connected()
    view = RayView(ray)
    for orphan in view.orphans():
        ray.util.remove_placement_group(orphan)
    found = []
    for node in ray.nodes():
        if node["Alive"]:
            continue
        host = node["NodeManagerHostname"]
        gone = f"its node {host} is gone"
        replaced = [f"{pool.actor_name} {n}" for pool in pools for n in pool.lose_node(node["NodeID"], gone)]
        found.append(DeadNode(node["NodeID"], host, tuple(replaced)))
    return found


# The monitor


class ClusterMonitor:
    """Looks at the cluster every `interval` seconds, on a thread of its own, until `stop`. Made by
    `monitor_cluster_health`."""

    def __init__(
        self,
        interval: float,
        *,
        pools: Sequence[RayActorPool],
        webhook: str | None,
        limits: HealthLimits | None,
    ):
        self._ray = _connected()
        self._view = RayView(self._ray)
        self._interval, self._pools, self._webhook = interval, tuple(pools), webhook
        self._state = HealthState(limits)
        self._events: collections.deque[ClusterEvent] = collections.deque(maxlen=_KEPT)
        self._unsent: collections.deque[ClusterEvent] = collections.deque(maxlen=_UNSENT)
        self._actors: Mapping[str, ActorSight] = {}
        self._memory: dict[str, tuple[Any, float | None]] = {}
        """Of each node: the open question, and the last answer."""
        self._stop = threading.Event()
        self._send = threading.Event()
        self.registry = CollectorRegistry()
        """Counts of events by kind, and how many nodes and actors there are."""
        self._counted = Counter("phalanx:cluster_events", "Events by kind.", ("kind",), registry=self.registry)
        self._nodes = Gauge("phalanx:cluster_nodes", "Nodes that live.", registry=self.registry)
        self._living = Gauge("phalanx:cluster_actors", "Actors that live.", registry=self.registry)
        self._threads = [threading.Thread(target=self._watch, name="phalanx-cluster-monitor", daemon=True)]
        if webhook is not None:
            self._threads.append(threading.Thread(target=self._tell, name="phalanx-webhook", daemon=True))
        for thread in self._threads:
            thread.start()
        atexit.register(self.stop)

    @property
    def events(self) -> list[ClusterEvent]:
        """The latest, oldest first."""
        return list(self._events)

    def stop(self) -> None:
        """Idempotent. Returns when the monitor has ended, or after a few seconds when a node keeps it waiting."""
        atexit.unregister(self.stop)
        self._stop.set()
        self._send.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_PROBE_S + _REACH_S)

    def _watch(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                if not self._ray.is_initialized():
                    return
                self._once()
            except Exception as error:
                log.warning("The cluster could not be looked at: %s.", _first(error))
            self._stop.wait(max(0.05, self._interval - (time.monotonic() - began)))

    def _once(self) -> None:
        look = self._look()
        self._nodes.set(len(look.nodes))
        self._living.set(len(look.actors))
        events = self._state.look(look, time.time())
        for event in events:
            (log.info if event.over or event.kind == "node_joined" else log.warning)("%s", event.message)
            self._events.append(event)
            self._counted.labels(event.kind).inc()
            self._unsent.append(event)
        if events:
            self._send.set()
        if any(event.kind == "node_lost" for event in events):
            handle_dead_nodes(self._pools)

    def _look(self) -> Look:
        alive = self._view.alive()
        with ThreadPoolExecutor(max(1, min(32, len(alive)))) as threads:
            links = dict(zip(alive, threads.map(_connect, alive.values()), strict=True))
        memory = self._ask_for_memory(list(alive))
        actors = {
            actor.actor_id.hex(): ActorSight(
                f"{actor.class_name.rpartition('.')[2]} (pid {actor.pid})", actor.address.node_id.hex()
            )
            for actor in self._view.living_actors()
        }
        gone, self._actors = set(self._actors) - set(actors), actors
        ended = {actor_id: cause for actor_id in gone if (cause := self._why(actor_id))}
        nodes = {
            node_id: NodeSight(node["NodeManagerHostname"], links[node_id], memory.get(node_id))
            for node_id, node in alive.items()
        }
        return Look(nodes, actors, ended, self._waiting())

    def _why(self, actor_id: str) -> str:
        """Why an actor is gone; empty when somebody wanted it."""
        cause = self._view.cause_of_death(actor_id)
        return "" if any(purpose in cause for purpose in _PURPOSE) else cause

    def _waiting(self) -> frozenset[str]:
        groups = [
            f"placement group {group['name'] or key[:12]}"
            for key, group in self._ray.util.placement_group_table().items()
            if group["state"] in ("PENDING", "RESCHEDULING")
        ]
        pools = [
            f"actor {each['index']} of the pool of {pool.actor_name}, last lost because: {each['cause']}"
            for pool in self._pools
            for each in pool.describe()
            if each["state"] == "waiting"
        ]
        return frozenset([*groups, *pools])

    def _ask_for_memory(self, nodes: list[str]) -> dict[str, float]:
        """The share in use on each node, by a small task there; one at a time on each, and none is waited for long."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._memory = {node: self._memory.get(node, (None, None)) for node in nodes}
        task = self._ray.remote(num_cpus=0, max_retries=0)(memory_in_use)
        for node, (asked, known) in self._memory.items():
            if asked is None:
                there = NodeAffinitySchedulingStrategy(node, soft=False)
                self._memory[node] = (task.options(scheduling_strategy=there).remote(), known)
        asked_now = [asked for asked, _ in self._memory.values()]
        if asked_now:
            self._ray.wait(asked_now, num_returns=len(asked_now), timeout=min(_PROBE_S, self._interval))
        for node, (asked, _) in self._memory.items():
            with contextlib.suppress(self._ray.exceptions.GetTimeoutError):
                try:
                    self._memory[node] = (None, self._ray.get(asked, timeout=0))
                except self._ray.exceptions.GetTimeoutError:
                    raise
                except Exception:
                    self._memory[node] = (None, None)
        return {node: known for node, (_, known) in self._memory.items() if known is not None}

    def _tell(self) -> None:
        """Hand events to the webhook, one after the other; a failure is logged and the event is gone."""
        while not self._stop.is_set():
            self._send.wait()
            self._send.clear()
            while self._unsent and not self._stop.is_set():
                _post(str(self._webhook), self._unsent.popleft())


def _connect(node: Mapping[str, Any]) -> float:
    """Seconds until a node's raylet accepts a connection; infinite when it does not within a second."""
    began = time.monotonic()
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=_REACH_S).close()
    except OSError:
        return float("inf")
    return time.monotonic() - began


def memory_in_use() -> float:
    """Share of this machine's main memory that is in use. 0 where that cannot be seen."""
    try:
        with open("/proc/meminfo") as file:
            sizes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in file)}
        return 1.0 - sizes["MemAvailable"] / sizes["MemTotal"]
    except (OSError, KeyError, ValueError, IndexError):
        return 0.0


def _post(url: str, event: ClusterEvent) -> None:
    data = json.dumps(asdict(event)).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="POST")  # noqa: S310
    try:
        urllib.request.urlopen(request, timeout=_WEBHOOK_S).close()  # noqa: S310
    except (OSError, ValueError) as error:
        log.warning("The webhook did not take an event (%s).", type(error).__name__)


def monitor_cluster_health(
    interval: float = 10.0,
    *,
    pools: Sequence[RayActorPool] = (),
    webhook: str | None = None,
    limits: HealthLimits | None = None,
) -> ClusterMonitor:
    """Watch the cluster from now on; returns at once. `stop()` ends it, `events` are the latest.

    Events: a node lost or joined, an actor lost that nobody ended on purpose, a slow link, high memory, no capacity.
    Each goes to the log, to metrics, and as JSON to `webhook` (http or https). Dead nodes' actors of `pools` are made
    again elsewhere. Raises ConfigError.
    """
    if isinstance(interval, bool) or not isinstance(interval, int | float) or not 0.1 <= interval <= 3600:
        raise ConfigError(f"`interval` must be between 0.1 and 3600 seconds, got {interval!r}.")
    if webhook is not None:
        parts = urllib.parse.urlsplit(webhook)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("`webhook` must be an http or https address.")
    return ClusterMonitor(float(interval), pools=pools, webhook=webhook, limits=limits)

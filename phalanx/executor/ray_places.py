"""Places for ranks on a Ray cluster: a placement group with an actor for each rank, replaced when one is lost.

    join or start Ray ── look, arrange, reserve ── start actors ── hear who and where they are

Where this process runs inside a placement group, that group's bundles are used. An actor that died is replaced in its
bundle, or on another node in a group of its own; no group is removed while an actor in it lives. What the ranks in
these places do is the launcher's business (`ray`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from phalanx import env
from phalanx.config import EngineConfig, ParallelConfig
from phalanx.distributed.address import node_id
from phalanx.distributed.mesh import Mesh
from phalanx.errors import ConfigError
from phalanx.executor.base import WorkerDied
from phalanx.executor.interfaces import checked
from phalanx.executor.placement import Arrangement, Demand, NoRoom, Site, arrange, ray_strategy, refusal
from phalanx.executor.ray_death import death_in_words
from phalanx.executor.ray_rank import Introduction, RankActor, address_towards
from phalanx.executor.ray_session import RaySession
from phalanx.executor.ray_view import RayView
from phalanx.worker.capacity import Capacity

log = logging.getLogger(__name__)

PLACE_S = 5.0
"""Seconds to find a place while others are letting go of theirs."""
_TRY_S = 2.0
"""Seconds for Ray to reserve what was free when we looked."""
_ACTOR_S = 90.0
_KILL_S = 5.0
_GONE_S = 3.0
_PAUSE_S = 0.25
_SILENT_S = 5.0
"""For so long a node that was silent is not tried again; then it is if it can be reached."""
_REACH_S = 1.0
_KNOCK_S = 0.5
"""Seconds for a node to answer from which nothing was heard for long."""
_MUTE_S = 1.0
"""For so long one that did not is not asked again: its ranks are ended one after the other."""


@dataclass
class Place:
    """One rank's."""

    group: Any
    bundle: int
    site: Site
    actor: Any = None
    said: Introduction | None = None
    life: Any = None
    """Becomes what the rank died of."""
    dead: bool = False
    """The actor is, or has to be taken for it."""
    silent_since: float = -math.inf
    """When it did not answer, told to end its rank: it hangs, or its node cannot be reached."""

    @property
    def silent(self) -> bool:
        return time.monotonic() - self.silent_since < _SILENT_S


class RayPlaces:
    """`open` first; `close` gives everything back, and `open` may follow."""

    def __init__(self, mesh: Mesh, parallel: ParallelConfig, device: str, *, patience: float | None = None):
        """`parallel` is resolved; `device` is where the model runs. After `patience` seconds `open` goes on with fewer
        places than there are ranks; None refuses. Joins nothing yet."""
        self._mesh, self._strategy, self._device = mesh, parallel.placement_strategy, device
        self._patience = None if patience is None else max(PLACE_S, patience)
        self._span = parallel.nnodes
        self._demand = demand(parallel, device)
        self._session: RaySession | None = None
        self._groups: list[Any] = []
        """Made by us."""
        self.places: dict[int, Place] = {}
        """By seat, which is the rank it was reserved for. One that could not be reserved is dead."""
        self._mute: dict[str, float] = {}
        """Nodes that did not answer, and when."""

    @property
    def ray(self) -> Any:
        """The module, while Ray is joined. Raises WorkerDied before and after."""
        if self._session is None:
            raise WorkerDied(0, "it is closed or was never started")
        return self._session.ray

    @property
    def local(self) -> bool:
        """Whether the cluster is this process's own, so that nobody else mends it."""
        return self._session is not None and self._session.started

    @property
    def view(self) -> RayView:
        return RayView(self.ray)

    def open(self) -> None:
        """Join Ray and reserve the places, unless that is done. Raises ConfigError; nothing is left then."""
        if self._session is not None:
            return
        ranks, resources = self._mesh.world_size, self._demand.resources
        self._session = RaySession(
            cpus=max(os.cpu_count() or 1, ranks * resources.get("CPU", 0)), gpus=ranks * resources.get("GPU", 0)
        )
        try:
            self._reserve(self.view)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Idempotent."""
        session = self._session
        if session is None:
            return
        if session.ray.is_initialized():
            for place in self.places.values():
                self.end(place)
            for group in self._groups:
                with contextlib.suppress(Exception):  # the head may be gone
                    session.ray.util.remove_placement_group(group)
        self.places, self._groups, self._session = {}, [], None
        session.close()

    def introduce(self, ranks: Sequence[int], config: EngineConfig) -> None:
        """Start the actors of `ranks` that have none, and hear what they say of themselves and of the model.

        Raises ConfigError, WorkerDied."""
        if not ranks:
            return
        towards, told = self.own_address(), msgspec.msgpack.encode(config)
        asked, measured = {}, self._measured()
        for rank in ranks:
            place = self.places[rank]
            place.actor = place.actor or self._actor(place)
            asked[rank] = place.actor.introduce.remote(told, towards, place.site.node not in measured)
        self.ray.wait(list(asked.values()), num_returns=len(asked), timeout=_ACTOR_S)
        for rank, reference in asked.items():
            place = self.places[rank]
            try:
                said = msgspec.msgpack.decode(self.ray.get(reference, timeout=0), type=Introduction)
                capacity = measured.get(place.site.node, said.capacity)
                place.said = msgspec.structs.replace(said, capacity=capacity)
            except self.ray.exceptions.GetTimeoutError:
                raise WorkerDied(rank, f"its actor did not start within {_ACTOR_S:g} s", node=place.site.name) from None
            except self.ray.exceptions.RayError as error:
                place.dead = True
                raise _did_not_start(rank, place, error) from error

    def _measured(self) -> dict[str, Capacity]:
        """Of nodes whose ranks share one device: it has been measured once."""
        known = {place.site.node: place.said.capacity for place in self.places.values() if place.said is not None}
        return {node: capacity for node, capacity in known.items() if capacity is not None and capacity.shared}

    def own_address(self) -> str:
        """This node's address on the way to the other nodes."""
        own = env.host_ip()
        if own:
            return checked(own, "PHALANX_HOST_IP")
        view = self.view
        alive = view.alive()
        ours = str(alive[view.home]["NodeManagerAddress"])
        for place in self.places.values():
            other = str(alive.get(place.site.node, {}).get("NodeManagerAddress", ours))
            if other != ours and (found := address_towards(other)):
                return found
        return ours

    def replace(self, seat: int) -> None:
        """A new place after the actor's death: its bundle if the node lives, otherwise any node that has room. A node
        that was silent does not count, whatever Ray still thinks of it.

        Raises WorkerDied when there is none."""
        deadline = time.monotonic() + PLACE_S
        while not self.try_replace(seat):
            if time.monotonic() > deadline:
                place = self.places[seat]
                why = "does not answer" if place.silent else "is gone"
                raise WorkerDied(seat, f"its node {place.site.name} {why}, and no other node has room for it")
            time.sleep(_PAUSE_S)

    def try_replace(self, seat: int) -> bool:
        """As `replace`, without waiting for room; whether there was any."""
        place, view = self.places[seat], self.view
        self.end(place)
        there = view.alive().get(place.site.node)
        if there is not None and not place.silent and (place.silent_since == -math.inf or _answers(there)):
            self.places[seat] = Place(place.group, place.bundle, place.site)
            return True
        others = [site for site in view.nodes() if site.node != place.site.node]
        found = self._elsewhere(seat, view, others)
        if found is not None:
            self.places[seat] = found
        return found is not None

    def available(self, alive: Container[str]) -> set[int]:
        """Seats with a place on a node that lives. Takes room for those without, where there is some."""
        for place in self.places.values():
            place.dead = place.dead or place.site.node not in alive
        return {
            seat for seat, place in list(self.places.items())
            if not (place.dead or place.silent) or self.try_replace(seat)
        }  # fmt: skip

    def _elsewhere(self, rank: int, view: RayView, sites: list[Site]) -> Place | None:
        allowed = self._allowed(rank, sites)
        with contextlib.suppress(NoRoom):
            while True:
                site = allowed[arrange(Mesh(), self._demand, allowed, "PACK", home=view.home).sites[0]]
                if _reached([site], view):
                    break
                allowed = [other for other in allowed if other.node != site.node]
            group = self._new_group(view, [site], "PACK")
            return Place(group, 0, site) if group is not None else None
        return None

    def reaches(self, place: Place) -> bool:
        """Whether its node answers. It may not, long before Ray gives it up."""
        node, now = place.site.node, time.monotonic()
        if now - self._mute.get(node, -math.inf) < _MUTE_S:
            return False
        there = self.view.alive().get(node)
        if there is not None and _answers(there, _KNOCK_S):
            return True
        self._mute[node] = now
        return False

    def end(self, place: Place, *, wait: bool = True) -> None:
        """End an actor and what is under it. Returns when it is gone, or cannot be reached; or at once, without
        `wait`."""
        if place.actor is None or place.dead:
            return
        ray = self.ray
        with contextlib.suppress(Exception):  # whatever Ray says, it is not ours any more
            asked = place.life if place.life is not None else place.actor.kill.remote(-1)
            ray.kill(place.actor, no_restart=True)
            ray.wait([asked], timeout=_KILL_S if wait else 0)
        place.dead = True
        if place.said is not None and place.said.node == node_id():
            deadline = time.monotonic() + _GONE_S
            while _running(place.said.pid) and time.monotonic() < deadline:
                time.sleep(0.02)

    # -- finding room

    def _reserve(self, view: RayView) -> None:
        """A place for every rank. Raises ConfigError when there is none."""
        for orphan in view.orphans():
            self.ray.util.remove_placement_group(orphan)
        current = self._current_group(view)
        deadline = time.monotonic() + (PLACE_S if self._patience is None else self._patience)
        while True:
            sites = view.nodes() if current is None else view.bundles(current)
            try:
                found = arrange(self._mesh, self._demand, sites, self._strategy, home=view.home, span=self._span)
                if self._take(view, current, found, sites):
                    _warn_of_split_groups(found, sites)
                    return
                why = "somebody else was faster"
            except NoRoom as error:
                why = str(error)
            if self._patience is not None:
                if time.monotonic() > deadline:
                    self._reserve_some(view, current, why)
                    return
            elif time.monotonic() > deadline or not self._would_fit(sites):
                within = "The Ray cluster" if current is None else f"The placement group {current.id.hex()[:12]}"
                raise refusal(self._mesh, self._demand, sites, self._strategy, view.takers(), why, within=within)
            time.sleep(_PAUSE_S)

    def _reserve_some(self, view: RayView, current: Any, why: str) -> None:
        """Places for as many ranks as there is room for on nodes that can be reached; for none, if it comes to that."""
        sites = _reached(view.nodes() if current is None else view.bundles(current), view)
        ranks = self._mesh.world_size - 1
        while ranks:
            with contextlib.suppress(NoRoom):
                found = arrange(Mesh(tp=ranks), self._demand, sites, self._strategy, home=view.home)
                if self._take(view, current, found, sites):
                    break
            ranks -= 1
        for seat in range(ranks, self._mesh.world_size):
            self.places[seat] = Place(None, 0, Site("", "a node that is missing", {}, {}), dead=True)
        log.warning("Going on with places for %d of %d ranks: %s.", ranks, self._mesh.world_size, why)

    def _would_fit(self, sites: list[Site]) -> bool:
        """If nothing else ran: then waiting may help."""
        try:
            arrange(self._mesh, self._demand, sites, self._strategy, span=self._span, when_empty=True)
        except NoRoom:
            return False
        return True

    def _current_group(self, view: RayView) -> Any:
        """The placement group in which this process runs, if it shall be used: Ray captures it for children, or all
        ranks find room in it."""
        group = self.ray.util.get_current_placement_group()
        if group is None:
            return None
        if getattr(self.ray._private.worker.global_worker, "should_capture_child_tasks_in_placement_group", False):
            return group
        room = sum(site.room(self._demand) for site in view.bundles(group))
        return group if room >= self._mesh.world_size else None

    def _take(self, view: RayView, current: Any, found: Arrangement, sites: list[Site]) -> bool:
        """Reserve it, unless it is in a group that is there. False when it cannot be had any more."""
        chosen = [sites[index] for index in found.sites]
        if current is not None:
            self.places = {rank: Place(current, site.bundle or 0, site) for rank, site in enumerate(chosen)}
            return True
        group = self._new_group(view, chosen, ray_strategy(self._strategy, found, sites))
        if group is not None:
            self.places = {rank: Place(group, rank, site) for rank, site in enumerate(chosen)}
        return group is not None

    def _new_group(self, view: RayView, chosen: list[Site], strategy: str) -> Any:
        """One bundle for each site, on its node; None when Ray does not give it."""
        bundles = [dict(self._demand.resources) for _ in chosen]
        tied = [view.tied_to(site.node, self._demand.labels) for site in chosen]
        group = self.ray.util.placement_group(
            bundles, strategy=strategy, name=view.new_name(), bundle_label_selector=tied
        )
        self._groups.append(group)
        if group.wait(_TRY_S):
            return group
        self.ray.util.remove_placement_group(group)
        self._groups.remove(group)
        return None

    def _allowed(self, rank: int, sites: list[Site]) -> list[Site]:
        """The nodes that the strategy leaves for one rank, given where the others are."""
        others = {place.site.node for r, place in self.places.items() if r != rank and not place.dead}
        match self._strategy:
            case "STRICT_PACK":
                return [site for site in sites if not others or site.node in others]
            case "STRICT_SPREAD":
                return [site for site in sites if site.node not in others]
        return sites

    def _actor(self, place: Place) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = dict(self._demand.resources)
        actor = self.ray.remote(RankActor).options(
            num_cpus=resources.pop("CPU", 0),
            num_gpus=resources.pop("GPU", 0),
            memory=int(resources.pop("memory", 0)) or None,
            resources=resources or None,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=3,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                place.group, placement_group_bundle_index=place.bundle, placement_group_capture_child_tasks=False
            ),
        )
        return actor.remote(env.for_ranks(), fork=self._device == "cpu")


def _warn_of_split_groups(found: Arrangement, sites: list[Site]) -> None:
    for ranks in found.split_groups:
        names = list(dict.fromkeys(sites[found.sites[rank]].name for rank in ranks))
        log.warning(
            "Ranks %s share every layer across nodes (%s): each token waits for the network twice a layer. With a "
            "tensor group inside each node and pipeline stages across them it would wait once a stage.",
            ", ".join(map(str, ranks)), ", ".join(names),
        )  # fmt: skip


def _did_not_start(rank: int, place: Place, error: Exception) -> Exception:
    text = str(error)
    for missing in ("No module named 'phalanx", "No module named phalanx", "No module named 'msgspec"):
        if missing in text:
            return ConfigError(
                f"Phalanx is not installed on {place.site.name}, in the Python that Ray uses there.",
                fix=f"Run `pip install 'phalanx[ray]'` on {place.site.name}, or use one image for all nodes.",
            )
    return WorkerDied(rank, death_in_words(error, place.site.name), node=place.site.name)


def _reached(sites: list[Site], view: RayView) -> list[Site]:
    """Those whose node can be: a while after it has gone, Ray still calls it alive."""
    alive = view.alive()
    there = {node for node in {site.node for site in sites} if node in alive and _answers(alive[node])}
    return [site for site in sites if site.node in there]


def _answers(node: Mapping[str, Any], seconds: float = _REACH_S) -> bool:
    """Whether its raylet can be reached."""
    try:
        with socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=seconds):
            return True
    except OSError:
        return False


def _running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def demand(parallel: ParallelConfig, device: str) -> Demand:
    """What one rank takes: one CPU, or one GPU where the model runs on GPUs, unless the flags say otherwise."""
    cpus, gpus = parallel.num_cpus_per_worker, parallel.num_gpus_per_worker
    cuda = device == "cuda"
    resources = {"CPU": (0.0 if cuda else 1.0) if cpus is None else cpus, "GPU": float(cuda) if gpus is None else gpus}
    for item in parallel.worker_resources:
        name, _, amount = item.partition("=")
        resources[name] = float(amount)
    labels = dict(item.split("=", 1) for item in parallel.worker_labels)
    taken = {name: amount for name, amount in resources.items() if amount > 0}
    return Demand(taken or {"memory": 1.0}, labels)  # Ray has no empty bundles; a byte of memory is next to nothing

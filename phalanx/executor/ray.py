"""Ranks on a Ray cluster: one actor per rank in a placement group. Ray places and watches, and carries no step.

    join or start Ray ── look, arrange, reserve ── actors introduce themselves ── compare ── hub ── ranks

The first half happens when the executor asks for `host`, since only then is it known whether ranks are on other nodes.
Where this process runs inside a placement group, that group's bundles are used. An actor that died is replaced in its
bundle, or on another node in a group of its own; no group is removed while a rank in it lives. Plans and results travel
as they do between any ranks (`hub`, `rank`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import platform
import secrets
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from phalanx import env
from phalanx.config import EngineConfig, ParallelConfig
from phalanx.distributed.address import node_id
from phalanx.distributed.mesh import Mesh
from phalanx.errors import ConfigError
from phalanx.executor.base import WorkerDied
from phalanx.executor.hub import HubExecutor, Layout
from phalanx.executor.interfaces import address_towards, checked
from phalanx.executor.messages import RankStart
from phalanx.executor.placement import Arrangement, Demand, NoRoom, Site, arrange, ray_strategy, refusal
from phalanx.executor.ray_rank import Introduction, RankActor
from phalanx.executor.ray_session import RaySession
from phalanx.executor.ray_view import RayView
from phalanx.executor.survey import difference, survey, version_difference, versions

log = logging.getLogger(__name__)

PLACE_S = 8.0
"""Seconds to find a place while others are letting go of theirs."""
_TRY_S = 2.0
"""Seconds for Ray to reserve what was free when we looked."""
_ACTOR_S = 90.0
_KILL_S = 5.0
_GONE_S = 3.0


@dataclass
class _Rank:
    """One rank's place, and who is there."""

    group: Any
    bundle: int
    site: Site
    actor: Any = None
    said: Introduction | None = None
    life: Any = None
    """Becomes what the rank died of."""
    dead: bool = False
    """The actor is."""


class RayLauncher:
    def __init__(self, config: EngineConfig, layout: Layout):
        """`config` is resolved. Joins nothing yet."""
        self._config, self._layout = config, layout
        self._demand = demand(config.parallel, config.model.device)
        self._session: RaySession | None = None
        self._view: RayView | None = None
        self._ranks: dict[int, _Rank] = {}
        self._groups: list[Any] = []
        """Made by us."""
        self._here = ""
        """This node's address for the others."""

    @property
    def host(self) -> str | None:
        """This node's address when ranks are on other nodes. Joins Ray and reserves the ranks' places, the first time.

        Raises ConfigError, WorkerDied; nothing is left then."""
        if self._session is None:
            try:
                self._prepare()
            except BaseException:
                self.close()
                raise
        return self._here or None

    def launch(self, starts: list[RankStart]) -> None:
        """Raises WorkerDied when a lost rank finds no place."""
        fresh = [start.rank for start in starts if self._ranks[start.rank].dead]
        for rank in fresh:
            self._replace(rank)
        self._introduce(fresh)
        for start in starts:
            place = self._ranks[start.rank]
            if place.said is None:
                continue
            same = [r for r, other in sorted(self._ranks.items()) if other.said and other.said.node == place.said.node]
            told = msgspec.structs.replace(start, host=place.said.address if self._here else None)
            place.life = place.actor.live.remote(
                msgspec.msgpack.encode(told), same.index(start.rank), len(same), _threads(self._config.parallel)
            )

    def kill(self, rank: int) -> None:
        place = self._ranks[rank]
        if place.life is None or place.dead:
            return
        with contextlib.suppress(self._ray.exceptions.RayError):
            place.actor.kill.remote(rank)
            if self.cause(rank, _KILL_S) is None:
                self._end(place)

    def cause(self, rank: int, wait: float = 0.0) -> str | None:
        place = self._ranks.get(rank)
        if place is None or place.life is None:
            return None
        done, _ = self._ray.wait([place.life], timeout=wait)
        if not done:
            if wait and self._view is not None and place.site.node not in self._view.alive():
                place.dead = True
                return f"its node {place.site.name} is gone"
            return None
        try:
            return str(self._ray.get(place.life))
        except self._ray.exceptions.RayError as error:
            place.dead = True
            return death_in_words(error, place.site.name)

    def close(self) -> None:
        if self._session is None:
            return
        places = [place for place in self._ranks.values() if place.actor is not None]
        if self._session.ray.is_initialized():
            for place in places:
                self._end(place)
            for group in self._groups:
                with contextlib.suppress(Exception):
                    self._session.ray.util.remove_placement_group(group)
        self._ranks, self._groups, self._here = {}, [], ""
        session, self._session, self._view = self._session, None, None
        session.close()

    # -- before the ranks start

    @property
    def _ray(self) -> Any:
        if self._session is None:
            raise WorkerDied(0, "it is closed or was never started")
        return self._session.ray

    def _prepare(self) -> None:
        resources, ranks = self._demand.resources, self._layout.mesh.world_size
        self._session = RaySession(cpus=ranks * resources.get("CPU", 0), gpus=ranks * resources.get("GPU", 0))
        self._view = RayView(self._session.ray)
        self._reserve(self._view)
        self._introduce(list(self._ranks))
        self._compare()
        if len({rank.said.node for rank in self._ranks.values() if rank.said} | {node_id()}) > 1:
            self._here = self._own_address(self._view)
            if not self._here:
                raise ConfigError(
                    "This node has no address that the others could reach.", fix="Set PHALANX_HOST_IP to it."
                )

    def _reserve(self, view: RayView) -> None:
        """A place for every rank. Raises ConfigError when there is none."""
        mesh, parallel = self._layout.mesh, self._config.parallel
        current = self._current_group()
        deadline = time.monotonic() + PLACE_S
        while True:
            sites = view.nodes() if current is None else view.bundles(current)
            try:
                found = arrange(mesh, self._demand, sites, parallel.placement_strategy, home=view.home)
                if self._take(view, current, found, sites):
                    self._tell_placement(found, sites)
                    return
                why = "somebody else was faster"
            except NoRoom as error:
                why = str(error)
            if time.monotonic() > deadline or not self._would_fit(sites, view):
                within = "The Ray cluster" if current is None else f"The placement group {current.id.hex()[:12]}"
                raise refusal(mesh, self._demand, sites, parallel.placement_strategy, view.takers(), why, within=within)
            time.sleep(0.25)

    def _would_fit(self, sites: list[Site], view: RayView) -> bool:
        """If nothing else ran: then waiting may help."""
        mesh, strategy = self._layout.mesh, self._config.parallel.placement_strategy
        try:
            arrange(mesh, self._demand, sites, strategy, home=view.home, when_empty=True)
        except NoRoom:
            return False
        return True

    def _current_group(self) -> Any:
        """The placement group in which this process runs, if it shall be used: Ray captures it for children, or all
        ranks find room in it."""
        group = self._ray.util.get_current_placement_group()
        if group is None or self._view is None:
            return None
        if getattr(self._ray._private.worker.global_worker, "should_capture_child_tasks_in_placement_group", False):
            return group
        room = sum(site.room(self._demand) for site in self._view.bundles(group))
        return group if room >= self._layout.mesh.world_size else None

    def _take(self, view: RayView, current: Any, found: Arrangement, sites: list[Site]) -> bool:
        """Reserve it, unless it is in a group that is there. False when it cannot be had any more."""
        chosen = [sites[index] for index in found.sites]
        if current is not None:
            self._ranks = {r: _Rank(current, site.bundle or 0, site) for r, site in enumerate(chosen)}
            return True
        strategy = ray_strategy(self._config.parallel.placement_strategy, found, sites)
        group = self._new_group(view, chosen, strategy)
        if group is None:
            return False
        self._ranks = {r: _Rank(group, r, site) for r, site in enumerate(chosen)}
        return True

    def _new_group(self, view: RayView, chosen: list[Site], strategy: str) -> Any:
        """One bundle for each site, on its node; None when Ray does not give it."""
        bundles = [dict(self._demand.resources) for _ in chosen]
        tied = [view.tied_to(site.node, self._demand.labels) for site in chosen]
        name = f"phalanx-{platform.node()}-{os.getpid()}-{secrets.token_hex(2)}"
        group = self._ray.util.placement_group(bundles, strategy=strategy, name=name, bundle_label_selector=tied)
        self._groups.append(group)
        if group.wait(_TRY_S):
            return group
        self._ray.util.remove_placement_group(group)
        self._groups.remove(group)
        return None

    def _tell_placement(self, found: Arrangement, sites: list[Site]) -> None:
        for ranks in found.split_groups:
            names = list(dict.fromkeys(sites[found.sites[rank]].name for rank in ranks))
            log.warning(
                "Ranks %s share every layer across nodes (%s): each token waits for the network twice a layer. With a "
                "tensor group inside each node and pipeline stages across them it would wait once a stage.",
                ", ".join(map(str, ranks)), ", ".join(names),
            )  # fmt: skip

    def _introduce(self, ranks: list[int]) -> None:
        """Start the actors of `ranks` and hear who they are. Raises ConfigError, WorkerDied."""
        if not ranks or self._view is None:
            return
        towards = self._own_address(self._view)
        config = msgspec.msgpack.encode(self._for_ranks())
        asked = {}
        for rank in ranks:
            place = self._ranks[rank]
            place.actor = self._actor(place)
            asked[rank] = place.actor.introduce.remote(config, towards)
        self._ray.wait(list(asked.values()), num_returns=len(asked), timeout=_ACTOR_S)
        for rank, reference in asked.items():
            place = self._ranks[rank]
            try:
                place.said = msgspec.msgpack.decode(self._ray.get(reference, timeout=0), type=Introduction)
            except self._ray.exceptions.GetTimeoutError:
                raise WorkerDied(rank, f"its actor did not start within {_ACTOR_S:g} s", node=place.site.name) from None
            except self._ray.exceptions.RayError as error:
                place.dead = True
                raise self._did_not_start(rank, place, error) from error

    def _for_ranks(self) -> EngineConfig:
        parallel = dataclasses.replace(self._config.parallel, transport_key=None)
        return dataclasses.replace(self._config, parallel=parallel)

    def _actor(self, place: _Rank) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = dict(self._demand.resources)
        options = self._ray.remote(RankActor).options(
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
        return options.remote(env.for_ranks(), fork=self._config.model.device == "cpu")

    def _did_not_start(self, rank: int, place: _Rank, error: Exception) -> Exception:
        text = str(error)
        for missing in ("No module named 'phalanx", "No module named phalanx", "No module named 'msgspec"):
            if missing in text:
                return ConfigError(
                    f"Phalanx is not installed on {place.site.name}, in the Python that Ray uses there.",
                    fix=f"Run `pip install 'phalanx[ray]'` on {place.site.name}, or use one image for all nodes.",
                )
        return WorkerDied(rank, death_in_words(error, place.site.name), node=place.site.name)

    def _compare(self) -> None:
        """Raises ConfigError when a node has another version or model than this one."""
        own = {"Ray": self._ray.__version__, **versions()}
        here = platform.node()
        ours = survey(self._for_ranks())
        for place in self._ranks.values():
            if place.said is None:
                continue
            error = version_difference(own, place.said.versions, here, place.said.name)
            if error is None and place.said.survey is None:
                error = ConfigError(
                    f"{place.said.name} cannot use the model: {place.said.failure}",
                    fix=f"Put the model on {place.said.name}, at the same path as on {here}.",
                )
            if error is None and place.said.survey is not None:
                error = difference(ours, place.said.survey, here, place.said.name)
            if error is not None:
                raise error

    def _own_address(self, view: RayView) -> str:
        """Of this node, on the way to the other nodes; empty when there is none but this."""
        own = env.host_ip()
        if own:
            return checked(own, "PHALANX_HOST_IP")
        alive = view.alive()
        others = [alive[p.site.node]["NodeManagerAddress"] for p in self._ranks.values() if p.site.node in alive]
        ours = alive[view.home]["NodeManagerAddress"]
        for other in others:
            if other != ours:
                with contextlib.suppress(OSError):
                    return address_towards(other, 9)
        return str(ours)

    # -- when ranks die

    def _replace(self, rank: int) -> None:
        """A new actor's place: the bundle if its node lives, otherwise any node that has room."""
        if self._view is None:
            return
        place = self._ranks[rank]
        self._end(place)
        alive = self._view.alive()
        if place.site.node in alive:
            self._ranks[rank] = _Rank(place.group, place.bundle, place.site)
            return
        deadline = time.monotonic() + PLACE_S
        while time.monotonic() < deadline:
            sites = self._allowed(rank, self._view.nodes())
            with contextlib.suppress(NoRoom):
                found = arrange(Mesh(), self._demand, sites, "PACK", home=self._view.home)
                site = sites[found.sites[0]]
                group = self._new_group(self._view, [site], "PACK")
                if group is not None:
                    self._ranks[rank] = _Rank(group, 0, site)
                    return
            time.sleep(0.25)
        raise WorkerDied(rank, f"its node {place.site.name} is gone, and no other node has room for it")

    def _allowed(self, rank: int, sites: list[Site]) -> list[Site]:
        """The nodes that the strategy leaves for one rank, given where the others are."""
        others = {place.site.node for r, place in self._ranks.items() if r != rank and not place.dead}
        match self._config.parallel.placement_strategy:
            case "STRICT_PACK":
                return [site for site in sites if not others or site.node in others]
            case "STRICT_SPREAD":
                return [site for site in sites if site.node not in others]
        return sites

    def _end(self, place: _Rank) -> None:
        """End an actor and what is under it; returns when it is gone, or its node is."""
        if place.actor is None:
            return
        ray = self._ray
        with contextlib.suppress(Exception):
            ray.kill(place.actor, no_restart=True)
            asked = place.life if place.life is not None else place.actor.kill.remote(-1)
            ray.wait([asked], timeout=_KILL_S)
        place.dead = True
        if place.said is not None and place.said.node == node_id():
            deadline = time.monotonic() + _GONE_S
            while _running(place.said.pid) and time.monotonic() < deadline:
                time.sleep(0.02)


def _running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _threads(parallel: ParallelConfig) -> int | None:
    """A number of CPUs that was asked for is a number of threads too."""
    return None if parallel.num_cpus_per_worker is None else max(1, int(parallel.num_cpus_per_worker))


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


def death_in_words(error: Exception, node: str) -> str:
    """Why Ray says that an actor is gone."""
    text = " ".join(str(error).split())
    if type(error).__name__ == "OutOfMemoryError" or "running low on memory" in text:
        detail = next((part for part in text.split(". ") if "memory" in part), "")
        return f"Ray's memory monitor ended it, because {node} was running out of memory ({detail[:200]})"
    if "node has died" in text or "NODE_DIED" in text:
        reason = text.partition("the actor's node was ")[2] or text.partition("Node Id:")[2]
        return f"its node {node} is gone: {reason[:160].rstrip('.') or 'Ray lost it'}"
    if "killed by `ray.kill`" in text:
        return "its actor was ended by ray.kill"
    if "worker process has died" in text or "connection error" in text:
        return f"its actor's process on {node} was killed or crashed; Ray saw its connection end"
    first = text.partition("Actor")[0] if len(text) > 400 else text
    return f"its actor is gone: {first[:300].rstrip('.')}"


def ray_executor(config: EngineConfig, layout: Layout) -> HubExecutor:
    """`config` is resolved."""
    return HubExecutor(RayLauncher(config, layout), layout, encrypt=config.parallel.encrypt_transport)

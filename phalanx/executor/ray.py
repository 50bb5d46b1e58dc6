"""Ranks on a Ray cluster. Ray places and watches, and carries no step.

The actors that hold the ranks' places (`ray_places`, `ray_rank`) start, end and watch them; plans and results travel as
they do between any ranks (`hub`, `rank`). Places are reserved, and nodes compared, when the executor asks for `host`:
only then is it known whether ranks are on other nodes.
"""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Iterable, Sequence

import msgspec

from phalanx.config import EngineConfig, ParallelConfig
from phalanx.distributed.address import node_id
from phalanx.errors import ConfigError
from phalanx.executor.base import ExecutorLost
from phalanx.executor.death import kind_of
from phalanx.executor.hub import HubExecutor
from phalanx.executor.launcher import Layout
from phalanx.executor.messages import RankStart
from phalanx.executor.ray_death import death_in_words, last_word
from phalanx.executor.ray_places import Place, RayPlaces
from phalanx.executor.seating import Choose, Share
from phalanx.executor.survey import difference, survey, version_difference, versions
from phalanx.worker.capacity import Capacity

_KILL_S = 2.0


class RayLauncher:
    """`hub.Launcher`."""

    def __init__(
        self, config: EngineConfig, layout: Layout, *, places: RayPlaces | None = None, patience: float | None = None
    ):
        """`config` is resolved. Joins nothing yet. `places` that are given stay when this is closed; nobody else may
        use them in the meantime. `patience` is for those that are not, as there."""
        parallel = dataclasses.replace(config.parallel, transport_key=None)
        self._config = dataclasses.replace(config, parallel=parallel)
        self._places = places or RayPlaces(layout.mesh, parallel, config.model.device, patience=patience)
        self._owned = places is None
        self._here: str | None = None
        """This node's address when there are ranks on others, or may come to be."""
        self._seats: tuple[int, ...] = tuple(range(layout.mesh.world_size))
        """Of each rank."""

    @property
    def host(self) -> str | None:
        """As in `hub.Launcher`. Joins Ray and reserves the ranks' places, and sees that the nodes fit."""
        try:
            self._places.open()
            ranks = self._places.places
            if not self._owned:
                for rank in [rank for rank, place in ranks.items() if place.dead]:
                    self._places.replace(rank)
            self._places.introduce([rank for rank, place in ranks.items() if not place.dead], self._config)
            self._compare()
        except BaseException:
            self.close()
            raise
        spans = any(place.dead or (place.said is not None and place.said.node != node_id()) for place in ranks.values())
        self._here = self._places.own_address() if spans else None
        return self._here

    def _compare(self) -> None:
        """Raises ConfigError when a node has another version or model than this one."""
        own = {"Ray": self._places.ray.__version__, **versions()}
        here, ours = platform.node(), survey(self._config)
        for place in self._places.places.values():
            said = place.said
            if said is None:
                continue
            error = version_difference(own, said.versions, here, said.name)
            if error is None and said.survey is None:
                error = ConfigError(
                    f"{said.name} cannot use the model: {said.failure}",
                    fix=f"Put the model on {said.name}, at the same path as on {here}.",
                )
            if error is None and said.survey is not None:
                error = difference(ours, said.survey, here, said.name)
            if error is not None:
                raise error

    def launch(self, starts: list[RankStart]) -> None:
        """Raises ConfigError, and WorkerDied when a lost rank finds no place."""
        for seat in [self._seats[start.rank] for start in starts]:
            if self._places.places[seat].dead:
                self._places.replace(seat)
        places = {rank: self._places.places[seat] for rank, seat in enumerate(self._seats)}
        fresh = [start.rank for start in starts if places[start.rank].said is None]
        self._places.introduce([self._seats[rank] for rank in fresh], self._config)
        nodes = {rank: place.said.node for rank, place in places.items() if place.said is not None}
        for start in starts:
            place = places[start.rank]
            same = [rank for rank, node in nodes.items() if node == nodes[start.rank]]
            host = place.said.address if self._here and place.said is not None else None
            told = msgspec.msgpack.encode(msgspec.structs.replace(start, host=host))
            place.life = place.actor.live.remote(
                told, same.index(start.rank), len(same), _threads(self._config.parallel)
            )

    def kill(self, rank: int) -> None:
        place = self._place(rank)
        if place is None or place.life is None or self.cause(rank) is not None:
            return
        reached = self._places.reaches(place)
        if reached:
            done, _ = self._places.ray.wait([place.actor.kill.remote(rank)], timeout=_KILL_S)
            if done and self.cause(rank, _KILL_S) is not None:
                return
        self._give_up(place, wait=reached)

    def _give_up(self, place: Place, *, wait: bool) -> None:
        """It cannot be told anything."""
        place.silent_since = time.monotonic()
        self._places.end(place, wait=wait)

    def cause(self, rank: int, wait: float = 0.0) -> str | None:
        place = self._place(rank)
        if place is None or place.life is None:
            return None
        ray, deadline = self._places.ray, time.monotonic() + wait
        done, _ = ray.wait([place.life], timeout=wait)
        if done:
            try:
                cause = str(ray.get(place.life))
            except ray.exceptions.RayError as error:
                place.dead = True
                error = last_word(ray, place.actor, error, deadline - time.monotonic())
                return death_in_words(error, place.site.name)
            if kind_of(cause) == "network" and not place.dead:  # one direction is open, and not the one to its actor
                self._give_up(place, wait=False)
            return cause
        if wait and place.site.node not in self._places.view.alive():
            place.dead = True
            return f"its node {place.site.name} is gone"
        return None

    def available(self) -> set[int]:
        """As in `hub.Launcher`. Reserves what there is room for. Raises ExecutorLost."""
        for rank in range(len(self._seats)):
            self.cause(rank)  # which notes who is dead
        alive = self._places.view.alive()
        if not alive and self._places.local:
            raise ExecutorLost(0, "the local Ray cluster has ended", kind="ended")
        return self._places.available(alive)

    def arriving(self) -> set[int]:
        return set()

    def assign(self, seats: Sequence[int]) -> None:
        self._seats = tuple(seats)
        self._let_go(set(self._places.places) - set(seats))

    def _let_go(self, seats: Iterable[int]) -> None:
        """Of what ranks have left there."""
        for place in (self._places.places[seat] for seat in seats):
            if place.actor is not None and not (place.dead or place.silent):
                place.actor.let_go.remote()

    def node(self, seat: int) -> str:
        return self._places.places[seat].site.name

    def capacity(self, seat: int) -> Capacity | None:
        """As in `hub.Launcher`. Where a rank has fewer threads than its part of the node's cores, it is as fast as
        these."""
        said = self._places.places[seat].said
        found = None if said is None else said.capacity
        if said is None or found is None or not found.is_plausible:
            return None
        threads, cores = _threads(self._config.parallel), found.cores
        if threads is None or found.speed is None or not cores:
            return found
        places = self._places.places.values()
        sharers = sum(place.said is not None and place.said.node == said.node for place in places)
        return msgspec.structs.replace(found, speed=found.speed * min(1.0, threads * sharers / cores))

    def _place(self, rank: int) -> Place | None:
        return self._places.places.get(self._seats[rank]) if rank < len(self._seats) else None

    def close(self) -> None:
        if self._owned:
            self._places.close()
            return
        for rank in range(len(self._seats)):
            self.kill(rank)
        self._let_go(self._places.places)


def _threads(parallel: ParallelConfig) -> int | None:
    """A number of CPUs that was asked for is a number of threads too."""
    return None if parallel.num_cpus_per_worker is None else max(1, int(parallel.num_cpus_per_worker))


def ray_executor(
    config: EngineConfig, layout: Layout, *,
    choose: Choose | None = None, share: Share | None = None, patience: float | None = None,
) -> HubExecutor:  # fmt: skip
    """`config` is resolved; `patience` as for its places."""
    launcher = RayLauncher(config, layout, patience=patience)
    return HubExecutor(launcher, layout, encrypt=config.parallel.encrypt_transport, choose=choose, share=share)

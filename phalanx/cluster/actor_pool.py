"""`RayActorPool`: actors of one class, made beforehand and handed out by load, watched and replaced.

    pool = RayActorPool(Embedder, 4, size=256)
    actor, index = pool.get_actor()
    try:
        vectors = ray.get(actor.embed.remote(texts))
    finally:
        pool.release_actor(index)

What is decided, and when, is in `pool_state`; here are Ray, a thread and the clock. Guarantees: no method waits for an
actor without a bound; a dead or hung actor delays nobody; after `close` no actor of the pool is left. For use by
several threads. Does not call the actors' own methods and does not repeat work.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from dataclasses import dataclass
from typing import Any, Self

from phalanx.cluster import ray_calls
from phalanx.cluster.pool_state import READY, SILENT, STARTING, Action, Do, PoolLimits, PoolState
from phalanx.errors import ConfigError, EngineDead, InvalidRequest
from phalanx.executor.placement import Demand, shortage
from phalanx.executor.ray_session import import_ray
from phalanx.executor.ray_view import RayView

log = logging.getLogger(__name__)

_TICK_S = 0.1
_LOAD_S = 2.0
"""Between two looks at what others do on the nodes."""
_PLACE_S = 6.0
"""For so long an actor may be without a node."""
_CLOSING_S = 5.0
"""Seconds that an actor's own `close` may take."""
_GONE_S = 5.0
GET_S = 30.0


@dataclass
class _Actor:
    handle: Any
    life: int
    since: float
    node: str = ""
    host: str = ""
    placed: bool = False


@dataclass
class _Asked:
    """An open question to an actor."""

    do: Do
    index: int
    life: int
    handle: Any
    until: float = float("inf")


class RayActorPool:
    """`num_actors` actors of `actor_cls` (a class, plain or decorated with `@ray.remote`), each made with
    `actor_kwargs`.

    A method `health_check` of theirs is used as probe: an actor for which it raises or returns False is replaced. A
    method `close` is called before an actor is ended that has no work. `max_restarts` of the decoration (or of
    `actor_options`, which go to Ray) is the restart budget of each place, unless `pool_limits` names one.
    """

    def __init__(
        self,
        actor_cls: Any,
        num_actors: int,
        *,
        actor_options: dict[str, Any] | None = None,
        pool_limits: PoolLimits | None = None,
        **actor_kwargs: Any,
    ):
        """Returns when all actors are there. Raises ConfigError, with none left: the process is not connected to Ray,
        there is no room (in some 10 s), or a constructor raises (at once)."""
        self._cls, options = ray_calls.plain_class(actor_cls)
        options = {"max_restarts": 3, "scheduling_strategy": "SPREAD", **options, **(actor_options or {})}
        self._ray = import_ray()
        if not self._ray.is_initialized():
            raise ConfigError("This process is not connected to Ray.", fix="Call setup_ray_resources first.")
        self._class = ray_calls.actor_class(self._ray, self._cls, options)
        self._demand = _demand(options)
        self._probe = "health_check" if ray_calls.has_method(self._cls, "health_check") else None
        self._kwargs = actor_kwargs
        self._view = RayView(self._ray)
        self._home = self._view.home
        budget = max(0, int(options["max_restarts"]))
        self._state = PoolState(pool_limits or PoolLimits(restarts=budget))
        self._actors: dict[int, _Actor] = {}
        self._asked: dict[Any, _Asked] = {}
        self._node_load: dict[str, float] = {}
        self._load_at = 0.0
        self._error: Exception | None = None
        """Why an actor could not be made, last."""
        self._changed = threading.Condition(threading.RLock())
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="phalanx-actor-pool", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # runs before Ray's own, which was registered earlier
        try:
            self.scale(num_actors)
        except BaseException:
            self.close()
            raise

    @property
    def actor_name(self) -> str:
        """Of the class, for people."""
        return self._cls.__name__

    @property
    def num_actors(self) -> int:
        """The size asked for and reached."""
        with self._changed:
            return self._state.size

    # What is handed out

    def get_actor(self, *, work: float = 1.0, timeout: float = GET_S) -> tuple[Any, int]:
        """The least loaded healthy actor and its index, for `release_actor`. `work` is how much will be asked of it, in
        any unit.

        Waits up to `timeout` seconds while there is none. Raises EngineDead when none is to be had.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                if self._closed:
                    raise EngineDead("The actor pool is closed.")
                index = self._state.get(time.monotonic(), work, home=self._home, node_load=self._node_load)
                if index is not None:
                    return self._actors[index].handle, index
                now = time.monotonic()
                if self._state.exhausted(now) or now >= deadline:
                    raise EngineDead(self._hopeless(now))
                self._changed.wait(min(1.0, deadline - now))

    def _hopeless(self, now: float) -> str:
        causes = [place.cause for place in self._state.places.values() if place.cause]
        last = f" The last loss: {causes[-1]}." if causes else ""
        if self._state.size == 0:
            return "The actor pool has no actors: it was scaled to 0."
        if self._state.exhausted(now):
            return f"No actor of {self._cls.__name__} is left, and the restarts are used up.{last}"
        return f"No actor of {self._cls.__name__} is healthy.{last}"

    def release_actor(self, index: int, *, work: float = 1.0) -> None:
        """`index` and `work` as with `get_actor`. Raises InvalidRequest when nothing of it is handed out."""
        with self._changed:
            try:
                self._do(self._state.release(index, time.monotonic(), work))
            except KeyError:
                raise InvalidRequest(f"Actor {index} of the pool is not handed out.") from None
            self._changed.notify_all()

    def suspect(self, index: int, handle: Any) -> None:
        """Its caller could not work with it: nobody gets it until it has answered."""
        with self._changed:
            actor = self._actors.get(index)
            if actor is not None and actor.handle is handle:
                self._state.doubt(index, actor.life, time.monotonic())

    def lose_node(self, node: str, cause: str) -> list[int]:
        """A node is gone: its actors are made again elsewhere at once. Their indices."""
        with self._changed:
            lost = [index for index, actor in self._actors.items() if actor.node == node]
            for index in lost:
                actor = self._actors[index]
                actor.node = ""
                ray_calls.end(self._ray, actor.handle)
                self._do(self._state.crashed(index, actor.life, time.monotonic(), cause))
            return lost

    # Size

    def scale(self, new_size: int) -> None:
        """Returns when new actors are there; those too many get no more work, and end when they have none.

        Raises ConfigError when new ones cannot be had; then the size is as before.
        """
        if isinstance(new_size, bool) or not isinstance(new_size, int) or new_size < 0:
            raise ConfigError(f"An actor pool's size must be 0 or more, got {new_size!r}.")
        with self._changed:
            if self._closed:
                raise EngineDead("The actor pool is closed.")
            before, self._error = self._state.size, None
            actions = self._state.scale(new_size, time.monotonic())
            new = {action.index for action in actions if action.do is Do.START}
            self._do(actions)
            while not self._closed and self._error is None and any(self._is_new(index) for index in new):
                self._changed.wait(0.5)
            error, self._error = self._error, None
            if error is not None and new:
                self._do(self._state.scale(before, time.monotonic()))
                raise error

    def _is_new(self, index: int) -> bool:
        place = self._state.places.get(index)
        return place is not None and place.life == 1 and place.state == STARTING

    # Health

    def health_check(self, timeout: float | None = None) -> dict[int, str]:
        """Ask all actors, at the same time; what is known of each, by index: ready, silent, starting, waiting (for
        its restart). Waits at most `timeout` seconds (default: as long as an actor may be silent) for those who do not
        answer."""
        with self._changed:
            began = time.monotonic()
            deadline = began + (self._state.limits.silent_after if timeout is None else timeout)
            self._state.hurry(began)
            while time.monotonic() < deadline and any(
                place.state in (READY, SILENT) and place.heard < began for place in self._state.places.values()
            ):
                self._changed.wait(deadline - time.monotonic())
            return {
                place.index: SILENT if place.state == READY and place.heard < began else place.state
                for place in self._state.places.values()
            }

    def describe(self) -> list[dict[str, Any]]:
        """Each actor: index, state, node, work handed out, restarts, and what its last loss was."""
        with self._changed:
            hosts = {index: actor.host for index, actor in self._actors.items()}
            return [
                {
                    "index": place.index,
                    "state": "draining" if place.draining else place.state,
                    "node": place.node,
                    "host": hosts.get(place.index, ""),
                    "work": place.work,
                    "restarts": len(place.restarted),
                    "cause": place.cause,
                }
                for place in self._state.places.values()
            ]

    def ask_all(self, method: str, timeout: float = 5.0) -> list[dict[str, Any]]:
        """`describe`, with what each actor's `method` returns as `answer`, or why there is none as `error`. Waits at
        most `timeout` seconds for all together."""
        with self._changed:
            described = self.describe()
            asked = {
                index: getattr(actor.handle, method).options(concurrency_group=ray_calls.CONTROL).remote()
                for index, actor in self._actors.items()
            }
        if asked:
            self._ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout)
        for each in described:
            reference = asked.get(each["index"])
            try:
                each["answer"] = None if reference is None else self._ray.get(reference, timeout=0)
            except Exception as error:
                silent = isinstance(error, self._ray.exceptions.GetTimeoutError)
                each["error"] = f"no answer within {timeout:g} s" if silent else ray_calls.one_line(error)
        return described

    # The thread

    def _watch(self) -> None:
        while not self._closed:
            with self._changed:
                references = list(self._asked)
            done: list[Any] = []
            try:
                if references:
                    done, _ = self._ray.wait(references, num_returns=len(references), timeout=_TICK_S)
                else:
                    time.sleep(_TICK_S)
                self._look_at_nodes()
            except Exception as error:
                if not self._ray.is_initialized():
                    return self._lose_ray()
                log.debug("the pool could not look: %s", error)
                time.sleep(_TICK_S)
            with self._changed:
                if self._closed:
                    return None
                for reference in done:
                    asked = self._asked.pop(reference, None)
                    if asked is not None:
                        self._hear(reference, asked)
                now = time.monotonic()
                self._find_homeless(now)
                for reference, asked in list(self._asked.items()):
                    if now > asked.until:
                        del self._asked[reference]
                        ray_calls.end(self._ray, asked.handle)
                self._do(self._state.tick(now))
                self._changed.notify_all()
        return None

    def _lose_ray(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _hear(self, reference: Any, asked: _Asked) -> None:
        """An answer, or what came instead of one."""
        now, index, life = time.monotonic(), asked.index, asked.life
        if asked.do is Do.STOP:
            ray_calls.end(self._ray, asked.handle)
            return
        error: Exception | None = None
        try:
            well = self._ray.get(reference, timeout=0) is not False
        except Exception as caught:
            well, error = False, caught
        if well and asked.do is Do.PROBE:
            self._state.answered(index, life, now)
        elif well:
            self._arrive(asked, now)
        elif isinstance(error, self._ray.exceptions.ActorUnavailableError):
            self._lose_touch(asked, now)
        elif isinstance(error, self._ray.exceptions.ActorDiedError):
            self._bury(asked, now, error)
        else:
            cause = self._words(error, asked) if error is not None else f"{self._cls.__name__} says that it is not well"
            log.warning("An actor is replaced: %s.", cause)
            self._do(self._state.useless(index, life, now, cause))

    def _words(self, error: Exception, asked: _Asked) -> str:
        facts = self._view.actor(asked.handle)
        return ray_calls.why_it_failed(error, self._cls, facts.host if facts is not None else "")

    def _arrive(self, asked: _Asked, now: float) -> None:
        facts, actor = self._view.actor(asked.handle), self._actors.get(asked.index)
        if actor is None or actor.life != asked.life:
            return
        if facts is not None:
            actor.node, actor.host = facts.node, facts.host
        self._state.started(asked.index, asked.life, now, actor.node)

    def _lose_touch(self, asked: _Asked, now: float) -> None:
        facts = self._view.actor(asked.handle)
        if facts is not None and facts.state in ("RESTARTING", "PENDING_CREATION", "DEPENDENCIES_UNREADY"):
            if asked.do is Do.PROBE:
                self._do(self._state.restarting(asked.index, asked.life, now, f"its process on {facts.host} died"))
            else:
                self._ask(asked.do, asked.index, asked.life, asked.handle)
        elif facts is not None and facts.state == "ALIVE" and asked.do is not Do.PROBE:
            self._ask(asked.do, asked.index, asked.life, asked.handle)
        else:
            self._state.unavailable(asked.index, asked.life, now)

    def _bury(self, asked: _Asked, now: float, error: Exception) -> None:
        cause = self._words(error, asked)
        first = asked.do is Do.START and asked.life == 1
        if first and self._error is None:
            self._error = ConfigError(f"The actors cannot be made: {cause}.")
        else:
            log.warning("An actor is lost: %s.", cause)
        self._do(self._state.crashed(asked.index, asked.life, now, cause))

    def _find_homeless(self, now: float) -> None:
        """Actors for which there is no room are not waited for for ever."""
        for index, actor in list(self._actors.items()):
            place = self._state.places.get(index)
            if actor.placed or place is None or place.state != STARTING or now - actor.since < _PLACE_S:
                continue
            facts = self._view.actor(actor.handle)
            actor.placed = facts is not None and bool(facts.node)
            if actor.placed:
                continue
            sites = self._view.nodes()
            asked = f"{self._state.size} × {self._demand}"
            self._error = ConfigError(
                f"The Ray cluster has no place for an actor of {self._cls.__name__}. "
                f"{shortage(asked, self._demand, sites, self._view.takers())}",
                fix="End what holds them, add nodes with `ray start --address=…`, or ask for less.",
            )
            ray_calls.end(self._ray, actor.handle)
            self._do(self._state.crashed(index, actor.life, now, "no node has room for it"))

    def _look_at_nodes(self) -> None:
        """What share of each node's CPUs is taken, by whomever."""
        now = time.monotonic()
        if now - self._load_at < _LOAD_S:
            return
        self._load_at = now
        self._node_load = {
            site.node: 1.0 - site.free.get("CPU", 0.0) / total
            for site in self._view.nodes()
            if (total := site.total.get("CPU", 0.0)) > 0
        }

    # What the state asks for

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            actor = self._actors.get(action.index)
            if action.do is Do.START:
                handle = self._class.remote(**self._kwargs)
                self._actors[action.index] = _Actor(handle, action.life, time.monotonic())
                self._ask(Do.START, action.index, action.life, handle)
            elif actor is None or actor.life != action.life:
                continue
            elif action.do in (Do.PROBE, Do.AWAIT):
                self._ask(action.do, action.index, action.life, actor.handle)
            elif action.do is Do.KILL:
                ray_calls.end(self._ray, actor.handle)
            else:
                del self._actors[action.index]
                self._say_good_bye(actor.handle, action)

    def _ask(self, do: Do, index: int, life: int, handle: Any) -> None:
        reference = ray_calls.probe(handle, self._probe)
        self._asked[reference] = _Asked(do, index, life, handle)

    def _say_good_bye(self, handle: Any, action: Action) -> None:
        if not ray_calls.has_method(self._cls, "close"):
            ray_calls.end(self._ray, handle)
            return
        reference = handle.close.options(concurrency_group=ray_calls.CONTROL, max_task_retries=0).remote()
        until = time.monotonic() + _CLOSING_S
        self._asked[reference] = _Asked(Do.STOP, action.index, action.life, handle, until)

    # The end

    def close(self) -> None:
        """End all actors, with work in hand or not. Idempotent. Returns when they are gone, or after some seconds."""
        with self._changed:
            self._closed = True
            handles = {id(actor.handle): actor.handle for actor in self._actors.values()}
            closing = {id(asked.handle): asked.handle for asked in self._asked.values() if asked.do is Do.STOP}
            self._actors, self._asked = {}, {}
            self._changed.notify_all()
        atexit.unregister(self.close)
        self._thread.join(_GONE_S)
        if self._ray.is_initialized():
            self._end_all(list({**handles, **closing}.values()))

    def _end_all(self, handles: list[Any]) -> None:
        if ray_calls.has_method(self._cls, "close"):
            asked = [h.close.options(concurrency_group=ray_calls.CONTROL, max_task_retries=0).remote() for h in handles]
            if asked:
                self._ray.wait(asked, num_returns=len(asked), timeout=_CLOSING_S)
        for handle in handles:
            ray_calls.end(self._ray, handle)
        deadline = time.monotonic() + _GONE_S
        while time.monotonic() < deadline and any(
            facts is not None and facts.state != "DEAD" for facts in map(self._view.actor, handles)
        ):
            time.sleep(0.05)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _demand(options: dict[str, Any]) -> Demand:
    """What one actor takes, as far as it can be told from its options. Ray's default is 1 CPU to place an actor and 0
    to run it."""
    cpus, gpus = options.get("num_cpus"), options.get("num_gpus")
    asked = {"CPU": 1.0 if cpus is None else cpus, "GPU": gpus or 0.0, "memory": options.get("memory") or 0.0}
    asked |= options.get("resources") or {}
    return Demand({name: amount for name, amount in asked.items() if amount}, options.get("label_selector") or {})

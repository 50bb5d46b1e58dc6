"""The actor pool on a real local Ray: load, crashes, hangs, scaling, refusals, and what is left."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from phalanx.cluster import RayActorPool, RayConfig, setup_ray_resources
from phalanx.cluster.pool_state import PoolLimits
from phalanx.errors import ConfigError, EngineDead, InvalidRequest
from phalanx.executor.ray_view import RayView
from tests.helpers.processes import alive, wait_until

pytestmark = pytest.mark.usefixtures("alone")

QUICK = PoolLimits(probe_interval=0.3, silent_after=0.6, hang_timeout=2.0, restarts=20, window=60, backoff=0.1)


class Echo:
    def __init__(self, word: str = "echo", well: bool = True):
        self.word, self.well = word, well

    def pid(self) -> int:
        return os.getpid()

    def say(self, text: str) -> str:
        return f"{self.word} {text}"

    def sleep(self, seconds: float) -> int:
        time.sleep(seconds)
        return os.getpid()

    def health_check(self) -> bool:
        return self.well

    def fall_ill(self) -> None:
        self.well = False


class Slow(Echo):
    def __init__(self) -> None:
        super().__init__()
        time.sleep(1.5)


class Broken:
    def __init__(self) -> None:
        raise ValueError("the spring is broken")


@pytest.fixture(scope="module")
def ray(alone) -> Iterator[Any]:
    with setup_ray_resources(RayConfig(address="local", num_cpus=4, use_placement_groups=False)) as resources:
        yield resources.ray


@pytest.fixture(autouse=True)
def nothing_left(ray) -> Iterator[None]:
    yield
    assert wait_until(lambda: not RayView(ray).living_actors(), 10), RayView(ray).living_actors()


def refused(call, *said: str) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    for each in said:
        assert each in text, text
    return text


def test_actors_are_made_beforehand_and_handed_out_by_load(ray) -> None:
    with RayActorPool(Echo, 2, actor_options={"num_cpus": 0}, word="hello") as pool:
        assert pool.num_actors == 2
        (a, i), (b, j), (c, k) = pool.get_actor(), pool.get_actor(), pool.get_actor()
        assert {i, j} == {0, 1} and k == i and c is a and b is not a
        assert ray.get(b.say.remote("you")) == "hello you"
        pool.release_actor(j)
        assert pool.get_actor()[1] == j
        with pytest.raises(InvalidRequest, match="Actor 7 of the pool is not handed out"):
            pool.release_actor(7)
        pid = ray.get(a.pid.remote())

        # a busy actor answers probes beside its work; an ill one is replaced
        busy = a.sleep.remote(4)
        assert pool.health_check() == {0: "ready", 1: "ready"} and not ray.wait([busy], timeout=0)[0]
        assert ray.get(busy) == pid
        b.fall_ill.remote()
        assert wait_until(lambda: any("not well" in each["cause"] for each in pool.describe()), 10)
        assert wait_until(lambda: pool.health_check() == {0: "ready", 1: "ready"}, 20)

        # killed: Ray starts it again under the same handle, as often as `max_restarts` says
        os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: answers(ray, a) not in (None, pid), 20)
        assert wait_until(lambda: pool.health_check()[i] == "ready", 20)
        pool.release_actor(i), pool.release_actor(i), pool.release_actor(j)
    with pytest.raises(EngineDead, match="closed"):
        pool.get_actor()


def answers(ray, actor) -> int | None:
    try:
        return ray.get(actor.pid.remote(), timeout=3)
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return None


@pytest.mark.slow
def test_who_restarts_an_actor(ray) -> None:
    """Ray, while the class allows it: meanwhile the others have its work. Then the pool, with another actor."""
    options = {"num_cpus": 0, "max_restarts": 1}
    with RayActorPool(Slow, 2, actor_options=options, pool_limits=QUICK) as pool:
        first, index = pool.get_actor()
        pid = ray.get(first.pid.remote())
        os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: pool.describe()[index]["state"] == "starting", 10), pool.describe()
        assert [pool.get_actor()[1] for _ in range(2)] == [1 - index] * 2
        assert wait_until(lambda: pool.health_check()[index] == "ready", 20)
        again = ray.get(first.pid.remote())
        assert again != pid and pool.describe()[index]["restarts"] == 1
        os.kill(again, signal.SIGKILL)
        assert wait_until(lambda: pool.describe()[index]["restarts"] == 2, 10)
        assert wait_until(lambda: pool.health_check()[index] == "ready", 20)
        second, chosen = pool.get_actor()
        assert chosen == index and second is not first and ray.get(second.pid.remote()) not in (pid, again)
        assert "process" in pool.describe()[index]["cause"]


@pytest.mark.slow
def test_refusals(ray) -> None:
    began = time.monotonic()
    refused(lambda: RayActorPool(Broken, 2), "constructor of Broken on ", "ValueError: the spring is broken")
    refused(
        lambda: RayActorPool(ray.remote(num_cpus=3)(Echo), 2),
        "no place for an actor of Echo",
        "Asked: 2 × CPU 3",
        "CPU 1 of 4 free",
        "actor Echo (pid ",
    )
    assert time.monotonic() - began < 25
    refused(lambda: RayActorPool(Echo, -1), "must be 0 or more, got -1")
    refused(lambda: RayActorPool("Echo", 1), "An actor's class is needed, got 'Echo'")
    refused(lambda: RayActorPool(Echo, 1, actor_options={"cpus": 1}), "options for Echo are no good", "cpus")
    with RayActorPool(Echo, 0) as pool, pytest.raises(EngineDead, match="scaled to 0"):
        pool.get_actor(timeout=0.5)


def test_a_hundred_operations_at_random(ray) -> None:
    """Gets, releases, crashes by kill, hangs by stop, scalings: whoever asks gets an actor that answers, work in hand
    is never cut off by scaling, and the pool returns to the size that was asked for."""
    draw = random.Random(5)
    with RayActorPool(Echo, 2, actor_options={"num_cpus": 0, "max_restarts": 0}, pool_limits=QUICK) as pool:
        held: list[tuple[int, Any, Any]] = []
        stopped: set[int] = set()
        hurt: dict[int, Any] = {}
        served = cut = 0
        for number in range(100):
            what = draw.choices(("get", "release", "kill", "stop", "scale"), (44, 44, 2, 2, 8))[0]
            what = {30: "kill", 60: "stop"}.get(number, what)
            if what == "get" and len(held) < 6:
                actor, index = pool.get_actor(timeout=20)
                held.append((index, actor, actor.sleep.remote(0.05)))
            elif what == "release" and held:
                index, actor, answer = held.pop(draw.randrange(len(held)))
                try:
                    ray.get(answer, timeout=10)
                    served += 1
                except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                    assert id(actor) in hurt, "only what was killed or stopped fails"
                    cut += 1
                pool.release_actor(index)
            elif what in ("kill", "stop"):
                actor, index = pool.get_actor(timeout=20)
                pool.release_actor(index)
                try:
                    pid = ray.get(actor.pid.remote(), timeout=3)
                except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                    continue
                hurt[id(actor)] = actor
                os.kill(pid, signal.SIGKILL if what == "kill" else signal.SIGSTOP)
                stopped |= {pid} if what == "stop" else set()
            elif what == "scale":
                size = draw.choice((1, 2, 3))
                pool.scale(size)
                assert pool.num_actors == size, number
        for index, actor, answer in held:
            served += id(actor) not in hurt and ray.get(answer, timeout=10) > 0
            pool.release_actor(index)
        assert served > 20 and len(hurt) > 1, (served, cut, len(hurt))
        pool.scale(2)
        assert wait_until(lambda: list(pool.health_check().values()) == ["ready"] * 2, 30), pool.describe()
        assert wait_until(lambda: not any(map(alive, stopped)), 10), "what hung is gone"
        assert wait_until(lambda: len(RayView(ray).living_actors()) == 2, 10)


@pytest.mark.slow
def test_a_hung_actor_delays_nobody(ray) -> None:
    with RayActorPool(Echo, 2, actor_options={"num_cpus": 0, "max_restarts": 0}, pool_limits=QUICK) as pool:
        actor, index = pool.get_actor()
        pid = ray.get(actor.pid.remote())
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        health = pool.health_check()
        assert time.monotonic() - began < 1.5 and health == {index: "silent", 1 - index: "ready"}
        assert wait_until(lambda: pool.health_check()[index] == "silent", 30)
        began = time.monotonic()
        assert [pool.get_actor()[1] for _ in range(3)] == [1 - index] * 3
        assert time.monotonic() - began < 0.5
        assert wait_until(lambda: not alive(pid), 15), "it is ended"
        assert wait_until(lambda: pool.health_check()[index] == "ready", 20)


@pytest.mark.slow
def test_scaling_down_lets_work_end_and_many_threads_share_a_pool(ray) -> None:
    with RayActorPool(Echo, 2, actor_options={"num_cpus": 0}) as pool:
        actor, index = pool.get_actor()
        answer = actor.sleep.remote(1.0)
        pool.scale(0)
        assert pool.num_actors == 0 and ray.get(answer, timeout=5) > 0
        pool.release_actor(index)
        assert wait_until(lambda: not RayView(ray).living_actors(), 10)
        pool.scale(1)
        answers: list[str] = []

        def work() -> None:
            for _ in range(5):
                mine, number = pool.get_actor()
                answers.append(ray.get(mine.say.remote("x")))
                pool.release_actor(number)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert answers == ["echo x"] * 20
        assert [each["work"] for each in pool.describe()] == [0]

"""What Ray really says when an actor ends, and what becomes of it in our words."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from phalanx.executor.ray_death import death_in_words, last_word
from tests.helpers.ray_cluster import RayCluster, ray_cluster

pytestmark = pytest.mark.slow


class Victim:
    def __init__(self, fails: bool = False):
        if fails:
            raise ValueError("no such thing")

    def pid(self) -> int:
        return os.getpid()

    def wait(self) -> None:
        time.sleep(60)

    def exits(self) -> None:
        sys.exit(3)

    def raises(self) -> None:
        raise ValueError("no such thing")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(h1={"num_cpus": 4}, h2={"num_cpus": 1, "resources": {"lost": 1}}) as made:
        yield made


def said(cluster: RayCluster, strike: Callable[[Any, int], Any], **options: Any) -> str:
    """What is said of an actor to which this is done while it works, by handle and process."""
    ray = cluster.ray
    actor = ray.remote(Victim).options(num_cpus=1, max_concurrency=2, **options).remote()
    pid = ray.get(actor.pid.remote(), timeout=30)
    working = actor.wait.remote()
    return dies_of(cluster, actor, strike(actor, pid) or working)


def dies_of(cluster: RayCluster, actor: Any, call: Any) -> str:
    with pytest.raises(cluster.ray.exceptions.RayError) as error:
        cluster.ray.get(call, timeout=30)
    return death_in_words(last_word(cluster.ray, actor, error.value, 15), "h1")


def signalled(number: signal.Signals) -> Callable[[Any, int], None]:
    return lambda _, pid: os.kill(pid, number)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_signal(cluster: RayCluster, number: signal.Signals) -> None:
    text = said(cluster, signalled(number))
    assert text == "its actor's process on h1 was killed or crashed; Ray saw its connection end"


def test_what_ends_an_actor(cluster: RayCluster) -> None:
    ray = cluster.ray
    assert said(cluster, lambda actor, _: ray.kill(actor)) == "its actor was ended by ray.kill"
    idle = ray.remote(Victim).options(num_cpus=1).remote()  # one that works would end its work first
    assert dies_of(cluster, idle, idle.raises.remote()) == "its actor failed: ValueError: no such thing"
    assert dies_of(cluster, idle, idle.exits.remote()) == "its actor's process on h1 ended with status 3"
    failing = ray.remote(Victim).options(num_cpus=1).remote(True)
    assert dies_of(cluster, failing, failing.pid.remote()) == "its actor failed: ValueError: no such thing"


def test_its_group_is_removed(cluster: RayCluster) -> None:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray = cluster.ray
    group = ray.util.placement_group([{"CPU": 1}])
    assert group.wait(10)
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    text = said(cluster, lambda *_: ray.util.remove_placement_group(group), scheduling_strategy=strategy)
    assert text == "its actor is gone: somebody removed its placement group"


def test_its_node_is_lost(cluster: RayCluster) -> None:
    text = said(cluster, lambda *_: cluster.kill("h2"), resources={"lost": 1})
    assert text.startswith("its node h1 is gone: terminated"), text

"""`RayDistributedEngine` on a Ray cluster of several nodes: leaders that hang, nodes that die, ranks that are killed,
all in mid-answer. Whatever happens, the answer is the one that an undisturbed model gives."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx import LLM, RayDistributedEngine, Response, SamplingConfig
from tests.helpers.pace import Pace, pace_of
from tests.helpers.processes import alive, wait_until
from tests.helpers.ray_cluster import RayCluster, ray_cluster

pytestmark = pytest.mark.slow

SAMPLING = SamplingConfig(seed=3, max_tokens=200, ignore_eos=True)
SMALL: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": "1M", "hang_timeout": 1.0}


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(a={"num_cpus": 2}, b={"num_cpus": 2}, c={"num_cpus": 2}) as made:
        yield made
        assert made.is_clean(), (made.actors(), made.groups(), made.taken())


@pytest.fixture(scope="module")
def want(model: str) -> list[tuple[str, list[int]]]:
    with LLM(model, dtype="float32", kv_cache_memory_bytes="1M") as llm:
        output = llm.generate("the world", SAMPLING, use_tqdm=False)[0].outputs[0]
        return [(output.text, output.token_ids)]


def joined(deltas: list[Response]) -> tuple[str, list[int]]:
    return "".join(d.text for d in deltas), [t for d in deltas for t in d.token_ids]


@pytest.fixture
def pace(tmp_path: Path) -> Iterator[Pace]:
    with pace_of(tmp_path) as pace:
        yield pace


def told_by(engine: RayDistributedEngine, pace: Pace, strike: Callable[[dict[str, Any]], object]) -> list[Response]:
    """A whole stream; in its midst something is done, which is given the leader that computes."""

    def busy() -> list[dict[str, Any]]:
        return [each for each in engine.get_stats(10) if each.get("answer", {}).get("running")]

    with pace.slow():
        stream = engine.generate_stream("the world", SAMPLING)
        told = [next(stream) for _ in range(5)]
        assert wait_until(lambda: len(busy()) == 1, 30)
        strike(busy()[0])
    return told + list(stream)


def test_a_leader_that_hangs(cluster, model, want, pace) -> None:
    """It is ended 5 seconds after its own engine would have been, and its answer goes on in the other one."""
    with RayDistributedEngine(model, data_parallel_size=2, **SMALL) as engine:
        stopped: list[int] = []

        def stop(leader: dict[str, Any]) -> None:
            stopped.append(leader["answer"]["pid"])
            os.kill(stopped[0], signal.SIGSTOP)

        assert [joined(told_by(engine, pace, stop))] == want
        assert wait_until(lambda: not alive(stopped[0]), 30)
        assert wait_until(lambda: set(engine.pool.health_check().values()) == {"ready"}, 60)


def test_nodes_that_die(cluster, model, want, pace) -> None:
    """The leader's; both leaders are there again afterwards, on what is left."""
    with RayDistributedEngine(model, data_parallel_size=2, **SMALL) as engine:
        names = {cluster.id(name): name for name in cluster.nodes}

        def kill(leader: dict[str, Any]) -> None:
            if leader["node"] in names:  # else it is the head, which cannot be lost here
                cluster.kill(names[leader["node"]])
            else:
                os.kill(leader["answer"]["pid"], signal.SIGKILL)

        assert [joined(told_by(engine, pace, kill))] == want
        assert wait_until(lambda: set(engine.pool.health_check().values()) == {"ready"}, 90), engine.pool.describe()
        again = engine.generate(["the world"] * 4, SAMPLING)
        assert [(r.text, r.token_ids) for r in again] == want * 4


def test_ranks_that_are_killed(cluster, model, want, pace) -> None:
    """Two tensor ranks on two nodes: the engine inside the leader mends that; the leader stays."""
    options = {"tensor_parallel_size": 2, "placement_strategy": "SPREAD"}
    with RayDistributedEngine(model, **options, **SMALL) as engine:
        leader = engine.get_stats(10)[0]["answer"]["pid"]
        strike = lambda leader: os.kill(leader["answer"]["workers"][1]["pid"], signal.SIGKILL)  # noqa: E731
        assert [joined(told_by(engine, pace, strike))] == want
        stats = engine.get_stats(10)[0]["answer"]
        assert stats["pid"] == leader and stats["epoch"] == 1

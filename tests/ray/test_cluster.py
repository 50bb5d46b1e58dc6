"""Ranks on a Ray cluster of several nodes: where they go, what they compute, how they die, and what is left.

The nodes share this machine and its address, so everything that tells them apart must be Ray's node id.
"""

from __future__ import annotations

import os
import platform
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from phalanx import env
from phalanx.config import EngineConfig
from phalanx.distributed.mesh import Mesh
from phalanx.engine.resolution import _with_ray, splitter
from phalanx.errors import ConfigError
from phalanx.executor.base import WorkerDied
from phalanx.executor.hub import HubExecutor
from phalanx.executor.launcher import Layout
from phalanx.executor.ray import RayLauncher
from phalanx.executor.ray_places import RayPlaces
from phalanx.executor.ray_session import is_running
from phalanx.executor.seating import Choose
from tests.helpers.one_request import PROMPT, generate
from tests.helpers.plans import GREEDY
from tests.helpers.processes import alive, gone_within, wait_until
from tests.helpers.ray_cluster import RayCluster, ray_cluster
from tests.helpers.worker_model import engine_config


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    h1 = {"num_cpus": 2, "labels": {"zone": "a"}, "num_gpus": 1}
    h2 = {"num_cpus": 2, "labels": {"zone": "b"}, "resources": {"fast": 2}}
    with ray_cluster(h1=h1, h2=h2) as made:
        yield made


@pytest.fixture
def clean(cluster: RayCluster) -> Iterator[None]:
    """Nothing is left before and after."""
    for when in ("before", "after"):
        assert cluster.is_clean(), (when, cluster.actors(), cluster.groups(), cluster.taken())
        if when == "before":
            yield


@pytest.fixture
def want(reference) -> list[int]:
    return reference.generate(PROMPT, 10, GREEDY)


class Started:
    def __init__(self, config: EngineConfig, mesh: Mesh, choose: Choose | None = None):
        layout = Layout(mesh, (), config.parallel.stage_layers)
        self.places = RayPlaces(mesh, config.parallel, config.model.device)
        self.executor = HubExecutor(RayLauncher(config, layout, places=self.places), layout, choose=choose)
        self.config = config

    def __enter__(self) -> Started:
        self.executor.start(self.config)
        return self

    def __exit__(self, *_: object) -> None:
        self.executor.close()
        self.places.close()

    @property
    def nodes(self) -> list[str]:
        return [self.places.places[rank].site.node for rank in sorted(self.places.places)]

    def actor_pid(self, rank: int) -> int:
        said = self.places.places[rank].said
        assert said is not None
        return said.pid

    def rank_pid(self, rank: int) -> int:
        return self.executor.check_health()[rank].pid


def until_it_breaks(ranks: Started, epoch: int) -> None:
    for _ in range(10000):
        generate(ranks.executor, epoch=epoch)


def start(model: Path, mesh: Mesh, **options: Any) -> Started:
    """To be entered."""
    sizes = {"tensor_parallel_size": mesh.tp, "pipeline_parallel_size": mesh.pp}
    return Started(engine_config(model, distributed_executor_backend="ray", **sizes, **options), mesh)


@pytest.fixture
def placed(model: Path, cluster: RayCluster, clean: None) -> Callable[..., list[str]]:
    """The node of each rank, without starting any."""

    def place(mesh: Mesh, *, wait: bool = True, **options: Any) -> list[str]:
        if wait:  # what the test before had; the head hears a little later that it is free
            assert wait_until(lambda: not cluster.taken(), 30)
        config = engine_config(model, distributed_executor_backend="ray", **options)
        places = RayPlaces(mesh, config.parallel, config.model.device)
        places.open()
        try:
            return [places.places[rank].site.node for rank in sorted(places.places)]
        finally:
            places.close()

    return place


class TestPlacement:
    def test_a_tensor_group_stays_on_one_node_and_stages_go_across(self, cluster, placed):
        a, b, c, d = placed(Mesh(tp=2, pp=2))
        assert a == b != c == d
        assert {a, c} == {cluster.id("h1"), cluster.id("h2")}

    def test_strategies(self, cluster, placed, caplog):
        assert len(set(placed(Mesh(tp=2), placement_strategy="PACK"))) == 1
        assert len(set(placed(Mesh(pp=2), placement_strategy="SPREAD"))) == 2
        assert len(set(placed(Mesh(tp=2), placement_strategy="STRICT_PACK"))) == 1
        assert len(set(placed(Mesh(pp=2), pipeline_parallel_size=2, nnodes=2))) == 2
        assert not caplog.records
        assert len(set(placed(Mesh(tp=2), placement_strategy="STRICT_SPREAD"))) == 2
        assert "Ranks 0, 1 share every layer across nodes" in caplog.text

    def test_labels_and_custom_resources_choose_the_node(self, cluster, placed):
        assert set(placed(Mesh(tp=2), worker_labels=("zone=a",))) == {cluster.id("h1")}
        assert set(placed(Mesh(tp=2), worker_labels=("zone=b",))) == {cluster.id("h2")}
        assert set(placed(Mesh(tp=2), worker_resources=("fast=1",))) == {cluster.id("h2")}

    def test_fractions_and_devices_that_the_driver_does_not_have(self, cluster, placed):
        ranks = placed(Mesh(tp=2), num_gpus_per_worker=0.5, num_cpus_per_worker=0.25)
        assert ranks == [cluster.id("h1")] * 2
        assert len(placed(Mesh(pp=8), num_cpus_per_worker=0.5)) == 8

    def test_ranks_that_take_nothing_may_go_anywhere(self, cluster, placed):
        assert set(placed(Mesh(tp=3), num_cpus_per_worker=0)) == {cluster.head}


@pytest.mark.parametrize(("address", "found"), [(None, True), ("127.0.0.1:9", False), ("ray://127.0.0.1:9", False)])
def test_ranks_on_several_nodes_are_rays_where_a_cluster_runs(cluster, address, found):
    config = EngineConfig.from_options(nnodes=2, tensor_parallel_size=2)
    with env.changed(RAY_ADDRESS=address or cluster.address):
        assert is_running() == found
        assert _with_ray(config).parallel.distributed_executor_backend == ("ray" if found else None)


class TestNoRoom:
    def refused(self, placed, mesh: Mesh, **options: Any) -> str:
        began = time.monotonic()
        with pytest.raises(ConfigError) as caught:
            placed(mesh, **options)
        assert time.monotonic() - began < 10
        return str(caught.value)

    def test_more_than_the_cluster_has_is_refused_at_once(self, cluster, placed):
        began = time.monotonic()
        text = self.refused(placed, Mesh(tp=5))
        assert time.monotonic() - began < 2
        assert "no place for 5 ranks: there is room for 4 of 5 ranks" in text
        assert "Asked: 5 × CPU 1, strategy PACK" in text
        assert f"({cluster.id('h1')[:8]}): CPU 2 of 2 free" in text and "Taken: nothing" in text

    def test_what_is_taken_is_named_with_its_holder(self, cluster, placed):
        class Trainer:
            def ready(self) -> int:
                return os.getpid()

        ray = cluster.ray
        trainer = ray.remote(Trainer).options(num_cpus=1, label_selector={"zone": "a"}).remote()
        pid = ray.get(trainer.ready.remote())
        group = ray.util.placement_group([{"CPU": 2}], name="experiment", bundle_label_selector=[{"zone": "b"}])
        assert group.wait(10)
        try:
            text = self.refused(placed, Mesh(tp=2), wait=False)
        finally:
            ray.kill(trainer)
            ray.util.remove_placement_group(group)
        assert "there is room for 1 of 2 ranks" in text
        assert f"actor Trainer (pid {pid}) holds CPU 1 on" in text
        assert "placement group experiment holds CPU 2 on" in text
        assert "End what holds them" in text

    def test_what_becomes_free_in_time_is_taken(self, cluster, placed):
        ray = cluster.ray
        group = ray.util.placement_group([{"CPU": 2}, {"CPU": 2}])
        assert group.wait(10)
        ray.util.remove_placement_group(group)
        assert len(placed(Mesh(tp=2, pp=2), wait=False)) == 4

    def test_strict_strategies_labels_and_resources_that_nobody_has(self, cluster, placed):
        assert "no single node has room for 3 ranks" in self.refused(
            placed, Mesh(tp=3), placement_strategy="STRICT_PACK"
        )
        assert "needs 3 nodes" in self.refused(placed, Mesh(pp=3), placement_strategy="STRICT_SPREAD")
        assert "no label zone" in self.refused(placed, Mesh(tp=1), worker_labels=("zone=c",))
        assert "zone=b" in self.refused(placed, Mesh(tp=1), worker_labels=("zone=c",))
        assert "huge 0 of 0 free" in self.refused(placed, Mesh(tp=1), worker_resources=("huge=1",))


@pytest.fixture(scope="class")
def ranks(cluster: RayCluster, model: Path) -> Iterator[Started]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PHALANX_SOMETHING", "1")
        environment.setenv("HF_HUB_OFFLINE", "1")
        environment.setenv("PHALANX_API_KEY", "secret")
        environment.setenv("GLOO_SOCKET_IFNAME", "eth7")
        environment.setenv("CUDA_VISIBLE_DEVICES", "3")
        with start(model, Mesh(tp=2), placement_strategy="STRICT_SPREAD") as ranks:
            yield ranks
    assert cluster.is_clean(), (cluster.actors(), cluster.groups(), cluster.taken())


class TestRanks:
    """Two tensor ranks on two nodes, through everything that can happen to them."""

    epoch = 0

    def again(self, ranks: Started) -> list[int]:
        """What a restart computes."""
        type(self).epoch += 1
        ranks.executor.restart(self.epoch)
        return generate(ranks.executor, epoch=self.epoch)

    def breaks(self, ranks: Started) -> WorkerDied:
        with pytest.raises(WorkerDied) as died:
            until_it_breaks(ranks, self.epoch)
        return died.value

    def test_they_equal_one(self, cluster, ranks, want):
        assert generate(ranks.executor, epoch=self.epoch) == want
        assert set(ranks.nodes) == {cluster.id("h1"), cluster.id("h2")}
        assert len(cluster.actors()) == 2 and len(cluster.groups()) == 1

    def test_health_shows_real_processes(self, ranks):
        for status in ranks.executor.check_health():
            assert psutil.Process(status.pid).name() == f"phalanx-rank-{status.rank}"
            assert (status.state, status.node) == ("ready", platform.node())

    def test_the_environment_of_ours_travels_and_that_of_a_host_does_not(self, ranks):
        seen = psutil.Process(ranks.rank_pid(0)).environ()
        assert seen["PHALANX_SOMETHING"] == seen["HF_HUB_OFFLINE"] == "1"
        assert not {"PHALANX_API_KEY", "GLOO_SOCKET_IFNAME"} & set(seen)
        assert seen.get("CUDA_VISIBLE_DEVICES") != "3"

    def test_a_killed_rank_says_by_what_and_is_forked_anew(self, ranks, want):
        actors = [ranks.actor_pid(0), ranks.actor_pid(1)]
        os.kill(ranks.rank_pid(1), signal.SIGKILL)
        died = self.breaks(ranks)
        assert died.rank == 1 and "killed by SIGKILL" in died.cause
        assert self.again(ranks) == want
        assert [ranks.actor_pid(0), ranks.actor_pid(1)] == actors

    def test_a_dead_actor_takes_its_rank_along_and_is_replaced_in_its_bundle(self, cluster, ranks, want):
        groups, nodes, rank = cluster.groups(), ranks.nodes, ranks.rank_pid(1)
        os.kill(ranks.actor_pid(1), signal.SIGKILL)
        died = self.breaks(ranks)
        assert died.rank == 1 and "its actor's process" in died.cause
        assert gone_within(rank, 2)
        assert self.again(ranks) == want
        assert (cluster.groups(), ranks.nodes) == (groups, nodes)

    def test_a_stopped_rank_is_replaced(self, ranks, want):
        stopped = ranks.rank_pid(0)
        os.kill(stopped, signal.SIGSTOP)
        assert self.again(ranks) == want
        assert not alive(stopped)

    @pytest.mark.slow
    def test_a_stopped_actor_is_replaced_with_its_rank(self, ranks, want):
        os.kill(ranks.actor_pid(0), signal.SIGSTOP)
        os.kill(ranks.rank_pid(0), signal.SIGKILL)
        assert self.breaks(ranks).rank == 0
        assert self.again(ranks) == want


@pytest.mark.slow
@pytest.mark.usefixtures("clean")
class TestMoreRanks:
    def test_stages_of_unequal_width_equal_one(self, cluster, model, want):
        with start(model, Mesh.of_widths((2, 1)), pipeline_tensor_sizes="2,1", pipeline_split="2,1") as ranks:
            assert generate(ranks.executor) == want
            assert ranks.nodes[0] == ranks.nodes[1] != ranks.nodes[2]

    def test_a_lost_node_is_named_and_its_rank_goes_elsewhere(self, cluster, model, want):
        cluster.add("h3", num_cpus=1)
        with start(model, Mesh(tp=3), placement_strategy="STRICT_SPREAD") as ranks:
            lost = ranks.nodes.index(cluster.id("h3"))
            assert generate(ranks.executor) == want
            cluster.kill("h3")
            with pytest.raises(WorkerDied) as died:
                until_it_breaks(ranks, 0)
            assert died.value.rank == lost
            with pytest.raises(WorkerDied, match=r"its node .* is gone, and no other node has room"):
                ranks.executor.restart(1)
            cluster.add("h4", num_cpus=1)
            ranks.executor.restart(2)
            assert generate(ranks.executor, epoch=2) == want
            assert ranks.nodes[lost] == cluster.id("h4") and len(cluster.groups()) == 2
        cluster.kill("h4")

    def test_without_room_for_a_lost_rank_the_model_is_split_over_the_others(self, cluster, model, want):
        """Until a node comes that has room."""
        cluster.add("h5", num_cpus=1)
        options = {"tensor_parallel_size": 3, "distributed_executor_backend": "ray", "replacement_timeout": 1.0}
        config = engine_config(model, placement_strategy="STRICT_SPREAD", **options)
        with Started(config, Mesh(tp=3), splitter(config)) as ranks:
            lost = ranks.nodes.index(cluster.id("h5"))
            cluster.kill("h5")
            with pytest.raises(WorkerDied):
                until_it_breaks(ranks, 0)
            began = time.monotonic()
            ranks.executor.restart(1)
            assert time.monotonic() - began < 6
            assert generate(ranks.executor, epoch=1) == want
            assert len(ranks.executor.check_health()) == 2 and ranks.executor.wants_restart is None
            cluster.add("h6", num_cpus=1)
            assert wait_until(lambda: ranks.executor.wants_restart is not None, 60)
            ranks.executor.restart(2)
            assert generate(ranks.executor, epoch=2) == want
            assert len(ranks.executor.check_health()) == 3 and ranks.nodes[lost] == cluster.id("h6")
        cluster.kill("h6")


@pytest.mark.usefixtures("clean")
class TestInsideRay:
    """The executor started by a task or an actor, as another library would."""

    def test_a_group_that_is_there_is_used(self, cluster, model, want):
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray = cluster.ray
        group = ray.util.placement_group([{"CPU": 1}, {"CPU": 2}], name="theirs", strategy="STRICT_SPREAD")
        assert group.wait(10)
        inside = ray.remote(run_inside).options(
            num_cpus=1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
            ),
        )
        tokens, bundles, groups = ray.get(inside.remote(str(model), 2), timeout=60)
        assert tokens == want and bundles == [1, 1] and groups == ["theirs"]
        refusal = ray.get(inside.remote(str(model), 3), timeout=60)
        assert re.match(r"The placement group \w+ has no place for 3 ranks.*bundle 1 on", refusal)
        assert cluster.groups() == ["theirs"]
        ray.util.remove_placement_group(group)

    @pytest.mark.slow
    def test_from_a_worker_node(self, cluster, model, want):
        ray = cluster.ray
        there = ray.remote(run_inside).options(num_cpus=0, label_selector={"zone": "b"})
        tokens, bundles, groups = ray.get(there.remote(str(model), 2), timeout=60)
        assert tokens == want and bundles == [0, 1] and len(groups) == 1

    @pytest.mark.slow
    def test_what_a_killed_owner_had_is_given_back(self, cluster, model, placed):
        ray = cluster.ray
        owner = ray.remote(Owner).options(num_cpus=0).remote(str(model))
        pids = ray.get(owner.start.remote(), timeout=60)
        assert len(cluster.actors()) == 3 and all(alive(pid) for pid in pids)
        ray.kill(owner)
        assert wait_until(lambda: not any(alive(pid) for pid in pids), 5)
        # Ray keeps the group of a dead actor until the job ends; the next engine takes it away.
        assert len(placed(Mesh(tp=2, pp=2), wait=False)) == 4


def run_inside(model: str, tp: int) -> Any:
    """Tokens, bundles and the cluster's groups, or the refusal."""
    import ray

    config = engine_config(Path(model), distributed_executor_backend="ray", tensor_parallel_size=tp)
    ranks = Started(config, Mesh(tp=tp))
    try:
        with ranks:
            table = ray.util.placement_group_table()
            groups = [group["name"] for group in table.values() if group["state"] != "REMOVED"]
            bundles = [ranks.places.places[rank].bundle for rank in range(tp)]
            return generate(ranks.executor), bundles, groups
    except ConfigError as error:
        return str(error)


class Owner:
    def __init__(self, model: str):
        config = engine_config(Path(model), distributed_executor_backend="ray", tensor_parallel_size=2)
        self.ranks = Started(config, Mesh(tp=2))

    def start(self) -> list[int]:
        self.ranks.__enter__()
        return [self.ranks.rank_pid(0), self.ranks.rank_pid(1), self.ranks.actor_pid(0), self.ranks.actor_pid(1)]

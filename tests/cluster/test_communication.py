"""`RayCommunicationController` between actors of a real Ray: every operation in every kind of group, what it says of
itself, and what it says when something is wrong."""

from __future__ import annotations

import os
import platform
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.cluster import RayCommunicationController, RayConfig, setup_ray_resources
from phalanx.errors import ConfigError, PhalanxError
from tests.helpers.processes import wait_until

pytestmark = pytest.mark.usefixtures("alone")


class Rank:
    """A user's actor: knows nothing of Phalanx but the attribute that it is given."""

    communication: RayCommunicationController

    def everything(self, rank: int) -> dict[str, Any]:
        comm, x = self.communication, torch.arange(6.0).view(2, 3) + 10 * rank
        same = x.clone()
        found = {
            f"{name} {kind}": getattr(comm, name)(x, kind)
            for name in ("all_gather", "reduce_scatter", "broadcast", "all_reduce")
            for kind in ("tensor", "pipeline_parallel", "context")
        }
        found["columns"] = comm.all_gather(x, "tensor", dim=-1)
        found["uneven"] = comm.all_gather(x[: comm.rank % 2 + 1], "tensor", lengths=[1, 2])
        found["from the second"] = comm.broadcast(x, "tensor", source=1)
        pending = comm.start("reduce_scatter", x, "tensor", dim=1, lengths=[1, 2])
        found["later"] = pending.wait()
        assert pending.done and torch.equal(x, same), "an exchange has changed its input"
        return found

    def wrong(self) -> list[str]:
        said = []
        for call in (
            lambda: self.communication.all_gather(torch.ones(2), "data"),
            lambda: self.communication.all_gather(torch.ones(2), dim=1),
            lambda: self.communication.all_gather(torch.ones(2), lengths=[1]),
            lambda: self.communication.reduce_scatter(torch.ones(2), lengths=[2, 1]),
            lambda: self.communication.broadcast(torch.ones(2), source=2),
            lambda: self.communication.start("gather", torch.ones(2)),
        ):
            with pytest.raises(ConfigError) as caught:
                call()
            said.append(caught.value.message)
        return said

    def tell(self, to: int) -> bool:
        self.communication.send_message(b"hello", to)
        return self.communication.receive_message(to) == b"hello"

    def wait(self, source: int) -> str:
        try:
            self.communication.receive_message(source)
        except PhalanxError as error:
            return error.message
        return "nothing"

    def pid(self) -> int:
        return os.getpid()

    def open_files(self) -> int:
        return len(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="module")
def ray(alone: Path) -> Iterator[Any]:
    resources = setup_ray_resources(RayConfig(num_cpus=2, use_placement_groups=False, address="local"))
    yield resources.ray
    resources.close()


@pytest.fixture(scope="module")
def actors(ray: Any) -> list[Any]:
    made = [ray.remote(num_cpus=0)(Rank).remote() for _ in range(4)]
    ray.get([each.pid.remote() for each in made], timeout=120)
    return made


def test_groups_are_those_of_the_mesh() -> None:
    controller = RayCommunicationController(tensor_parallel_size=2, pipeline_parallel_size=2, context_parallel_size=2)
    assert controller.tensor_parallel_groups == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert controller.context_parallel_groups == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert controller.pipeline_parallel_groups == [[0, 4], [1, 5], [2, 6], [3, 7]]
    with pytest.raises(ConfigError, match="`pipeline_parallel_size` is 0; it must be an integer of at least 1"):
        RayCommunicationController(2, 0)
    with pytest.raises(ConfigError, match="no rank of the mesh"):
        controller.all_gather(torch.ones(1))


def test_a_mesh_of_one_needs_nobody() -> None:
    with RayCommunicationController() as controller:
        x = torch.arange(4.0)
        assert torch.equal(controller.all_gather(x), x) and torch.equal(controller.reduce_scatter(x, "pipeline"), x)
        assert torch.equal(controller.start("broadcast", x, "context").wait(), x)


def test_every_operation_in_every_group(ray: Any, actors: list[Any]) -> None:
    files = ray.get([each.open_files.remote() for each in actors])
    with RayCommunicationController(2, 2) as controller:
        controller.connect(actors)
        found = ray.get([each.everything.remote(rank) for rank, each in enumerate(actors)], timeout=60)
        told = controller.describe()
        said = ray.get(actors[0].wrong.remote(), timeout=30)
        answers = [actors[a].tell.remote(b) for a, b in ((0, 3), (3, 0), (1, 2), (2, 1))]
        assert ray.get(answers, timeout=30) == [True] * 4
        with pytest.raises(ConfigError, match="connected already"):
            controller.connect(actors)
    x = [torch.arange(6.0).view(2, 3) + 10 * rank for rank in range(4)]
    groups = {"tensor": [[0, 1], [2, 3]], "pipeline_parallel": [[0, 2], [1, 3]], "context": [[0], [1], [2], [3]]}
    for kind, members in groups.items():
        for group in members:
            total = sum(x[r] for r in group)
            for place, rank in enumerate(group):
                assert torch.equal(found[rank][f"all_gather {kind}"], torch.cat([x[r] for r in group]))
                assert torch.equal(found[rank][f"broadcast {kind}"], x[group[0]])
                assert torch.equal(found[rank][f"all_reduce {kind}"], total)
                rows = total if len(group) == 1 else total[place : place + 1]
                assert torch.equal(found[rank][f"reduce_scatter {kind}"], rows)
    assert torch.equal(found[3]["columns"], torch.cat([x[2], x[3]], 1))
    assert torch.equal(found[2]["uneven"], torch.cat([x[2][:1], x[3]]))
    assert torch.equal(found[0]["from the second"], x[1])
    assert torch.equal(found[1]["later"], (x[0] + x[1])[:, 1:])
    assert told[3]["tensor"]["ranks"] == [2, 3] and told[3]["tensor"]["transport"] == "shared memory"
    assert told[0]["messages"] == {"transport": "sockets", "at_most_bytes": 65536, "encrypted": False}
    for text, word in zip(said, ("'data'", "`dim` is 1", "[1]", "[2, 1]", "`source` is 2", "'gather'"), strict=True):
        assert word in text

    def given_back() -> bool:
        now = ray.get([each.open_files.remote() for each in actors])
        return all(after <= before for before, after in zip(files, now, strict=True))

    assert wait_until(given_back, 30)


def test_an_actor_that_dies_is_named_with_its_node(ray: Any, actors: list[Any]) -> None:
    actors = actors[:3]
    with RayCommunicationController(3) as controller:
        controller.connect(actors)
        pid = ray.get(actors[1].pid.remote())
        waiting = [actors[rank].wait.remote(2 - rank) for rank in (0, 2)]
        time.sleep(0.3)
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        for text in ray.get(waiting, timeout=20):
            assert f"rank 1 on {platform.node()} is gone" in text
        assert time.monotonic() - began < 5
    with RayCommunicationController(3) as controller:
        began = time.monotonic()
        with pytest.raises(PhalanxError, match="Rank 1 cannot be connected") as caught:
            controller.connect(actors)
        assert time.monotonic() - began < 15 and "\n" not in str(caught.value)
        with pytest.raises(ConfigError, match="2 actors are given for a mesh of 3 ranks"):
            controller.connect(actors[:2])
    with RayCommunicationController(2) as controller:  # the others are free for another mesh
        controller.connect([actors[0], actors[2]])
        assert [each["tensor"]["ranks"] for each in controller.describe()] == [[0, 1], [0, 1]]

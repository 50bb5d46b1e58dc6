"""`setup_ray_resources` on a cluster of its own and on one that runs, groups and their refusals, and what is left."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from phalanx.cluster import RayConfig, create_placement_group, optimize_gpu_memory, setup_ray_resources
from phalanx.cluster.resources import close_current, current
from phalanx.errors import ConfigError
from phalanx.executor.ray_view import RayView
from tests.helpers.processes import descendants, wait_until

pytestmark = pytest.mark.usefixtures("alone")

SMALL = {"gpus_per_node": 0, "cpus_per_node": 1, "memory_per_node": 0.1}


def refused(call, *said: str) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        call()
    assert time.monotonic() - began < 12
    text = str(caught.value)
    assert "\n" not in text
    for each in said:
        assert each in text, text


def groups(resources) -> list[str]:
    table = resources.ray.util.placement_group_table()
    return [group["state"] for group in table.values() if group["state"] != "REMOVED"]


def test_one_local_cluster_from_start_to_end() -> None:
    before = descendants()
    with tempfile.TemporaryDirectory(prefix="phxr-", dir="/tmp") as folder:
        wanted = RayConfig(num_cpus=3, resources={"fast": 2}, temp_dir=folder, placement_strategy="SPREAD", **SMALL)
        resources = setup_ray_resources(wanted)
        try:
            assert resources.started and current() is resources
            has = resources.ray.cluster_resources()
            assert has["CPU"] == 3 and has["fast"] == 2 and "GPU" not in has
            assert list(Path(folder).glob("ray-*/session_*"))
            assert groups(resources) == ["CREATED"]
            listening = {
                c.laddr.ip.removeprefix("::ffff:")
                for pid in descendants() - before
                for c in psutil.Process(pid).net_connections("inet")
                if c.status == psutil.CONN_LISTEN
            }
            assert listening == {"127.0.0.1"}
            raylet = next(p for p in map(psutil.Process, descendants() - before) if p.name() == "raylet")
            assert raylet.environ()["RAY_AUTH_MODE"] == "token"

            # another group finds the room that is left, and a third one says who has it
            second = create_placement_group(RayConfig(num_nodes=2, **SMALL))
            name = resources.ray.util.placement_group_table(second)["name"]
            refused(
                lambda: create_placement_group(RayConfig(**SMALL)),
                "no place for a placement group of 1 bundle. Asked: 1 × CPU 1, memory 0.1 GB, strategy PACK.",
                "CPU 0 of 3 free",
                f"placement group {name} holds CPU 2",
                "End what holds them",
            )
            resources.ray.util.remove_placement_group(second)
            began = time.monotonic()
            refused(lambda: create_placement_group(RayConfig()), "CPU 8, GPU 1, memory 64 GB,", "GPU 0 of 0")
            assert time.monotonic() - began < 1.5, "what the cluster can never have needs no waiting"
            refused(
                lambda: create_placement_group(RayConfig(placement_strategy="STRICT_SPREAD", num_nodes=2, **SMALL)),
                "2 bundles",
                "strategy STRICT_SPREAD",
            )
            resources.give_back()
            assert wait_until(lambda: groups(resources) == [], 30)
            assert wait_until(lambda: all(s.free.get("CPU") == 3 for s in RayView(resources.ray).nodes()), 30)

            # a program that is connected already: its connection is used, and stays
            head = resources.address
            other = setup_again(head)
            assert other.address == head and not other.started
        finally:
            resources.close()
            close_current()
        resources.close()
        assert current() is None
        assert wait_until(lambda: descendants() <= before, 10)
        assert not list(Path(folder).glob("ray-*"))
    refused(lambda: create_placement_group(RayConfig(**SMALL)), "not connected to Ray", "setup_ray_resources")


def setup_again(head: str):
    """As another part of the same program would, which does not know of the first call."""
    from phalanx.cluster.resources import RayResources

    refused(lambda: RayResources(RayConfig(address=head, num_cpus=64, **SMALL)), "is running already", "CPU 64 asked")
    other = RayResources(RayConfig(address=head, use_placement_groups=False))
    other.close()
    assert other.closed
    return RayResources(RayConfig(address=head, use_placement_groups=False))


def test_what_cannot_be_joined_or_started() -> None:
    before = descendants()
    refused(lambda: setup_ray_resources(RayConfig(address="127.0.0.1:9")), "127.0.0.1:9, where nothing answers")
    refused(lambda: setup_ray_resources(RayConfig(temp_dir="/tmp/" + "x" * 40)), "more than 30 characters")
    refused(lambda: setup_ray_resources(RayConfig(temp_dir="/proc/nothing")), "/proc/nothing, cannot be used")
    assert current() is None and descendants() <= before


@pytest.mark.parametrize(
    ("asked", "handed_out"),
    [
        ({"gpu_ids": (3, 5)}, {"3", "5"}),
        pytest.param({"num_gpus": 2}, {"0", "1"}, marks=pytest.mark.slow),
        pytest.param({"num_gpus": 1, "gpu_ids": (3, 5)}, {"3"}, marks=pytest.mark.slow),
    ],
)
def test_gpus_of_a_local_cluster(asked: dict[str, Any], handed_out: set[str]) -> None:
    """As Ray counts them: no device is needed to hand one out."""
    seen, gpus = os.environ.get("CUDA_VISIBLE_DEVICES"), len(handed_out)
    wanted = RayConfig(address="local", num_cpus=2, **{**SMALL, "gpus_per_node": gpus}, **asked)
    with setup_ray_resources(wanted) as resources:
        ray = resources.ray
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == seen
        assert ray.cluster_resources()["GPU"] == gpus
        refused(lambda: create_placement_group(wanted), f"GPU {gpus},", f"GPU 0 of {gpus} free")
        resources.give_back()

        class Holder:
            def gpus(self) -> str:
                return os.environ["CUDA_VISIBLE_DEVICES"]

        holders = [ray.remote(num_cpus=0, num_gpus=1)(Holder).remote() for _ in range(gpus)]
        assert sorted(ray.get([holder.gpus.remote() for holder in holders], timeout=60)) == sorted(handed_out)


def test_devices_of_a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    switches = ["cudnn_benchmark", "cudnn_deterministic", "memory_fraction"]
    for config, names in (
        (RayConfig(memory_fraction=0.5), switches),
        (RayConfig(gpu_ids=(1,)), [*switches, "gpu_ids"]),
    ):
        found = optimize_gpu_memory(config)
        assert found.applied == ()
        assert [line.split()[0] for line in found.skipped] == names
        assert all("no CUDA device" in line for line in found.skipped)


class TestDevices:
    """PyTorch as if it had two GPUs; `tests/gpu` has the real calls."""

    @pytest.fixture(autouse=True)
    def shares(self, monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
        shares: dict[int, float] = {}
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        set_share = lambda share, gpu: shares.__setitem__(gpu, share)  # noqa: E731
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", set_share)
        return shares

    @pytest.fixture(autouse=True)
    def cudnn(self, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
        cudnn = SimpleNamespace(is_available=lambda: True, benchmark=None, deterministic=None)
        monkeypatch.setattr(torch.backends, "cudnn", cudnn)
        return cudnn

    def test_all_of_them(self, shares: dict[int, float], cudnn: SimpleNamespace) -> None:
        found = optimize_gpu_memory()
        assert shares == {0: 0.9, 1: 0.9} and (cudnn.benchmark, cudnn.deterministic) == (True, False)
        said = [
            "cudnn_benchmark True",
            "cudnn_deterministic False",
            *(f"memory_fraction 0.9 on GPU {n}" for n in (0, 1)),
        ]
        assert (list(found.applied), found.skipped) == (said, ())

    def test_one_of_them(self, shares: dict[int, float], cudnn: SimpleNamespace) -> None:
        optimize_gpu_memory(
            RayConfig(gpu_ids=(1,), memory_fraction=0.25, cudnn_benchmark=False, cudnn_deterministic=True)
        )
        assert shares == {1: 0.25} and (cudnn.benchmark, cudnn.deterministic) == (False, True)

    def test_without_cudnn(self, shares: dict[int, float], cudnn: SimpleNamespace) -> None:
        cudnn.is_available = lambda: False
        found = optimize_gpu_memory()
        assert cudnn.benchmark is None and len(shares) == len(found.applied) == 2
        assert [line.split()[0] for line in found.skipped] == ["cudnn_benchmark", "cudnn_deterministic"]
        assert all("no cuDNN" in line for line in found.skipped)

    def test_one_that_is_not_there(self, shares: dict[int, float], cudnn: SimpleNamespace) -> None:
        refused(lambda: optimize_gpu_memory(RayConfig(gpu_ids=(0, 2))), "names GPU 2", "sees 2, numbered from 0")
        assert not shares and cudnn.benchmark is None

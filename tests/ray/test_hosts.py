"""A Ray cluster whose nodes are hosts of their own: the driver on a head without CPUs, a rank on each of two others."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import phalanx
from tests.helpers.asks import wait_for_events
from tests.helpers.history import assemble, check_stream
from tests.helpers.hosts import can_limit, missing
from tests.helpers.one_rank import continuations
from tests.helpers.one_request import PROMPT
from tests.helpers.pace import Pace
from tests.helpers.plans import GREEDY
from tests.helpers.processes import name_of, wait_until
from tests.helpers.ray_hosts import RayHosts, ray_hosts
from tests.helpers.serving import Client, Serving
from tests.helpers.tiny_model import write_tiny_model
from tests.helpers.worker_model import HEADS

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "there are hosts")]

CPUS = (0, 2, 1)
LITTLE_MB = 1200
"""Ray's own processes need half of it."""


@pytest.fixture(scope="module")
def bed() -> Iterator[RayHosts]:
    with ray_hosts(CPUS) as made:
        yield made


@pytest.fixture
def want(reference) -> list[int]:
    return reference.generate(PROMPT, 10, GREEDY)


def test_a_tensor_group_across_nodes_works_and_warns(bed: RayHosts, model: Path, want: list[int]) -> None:
    with bed.executor(model, tensor_parallel_size=2, placement_strategy="SPREAD") as ranks:
        assert [status["node"] for status in ranks.ready()] == ["host1", "host2"]
        assert ranks.ask("generate") == want
        assert any("Ranks 0, 1 share every layer across nodes (host1, host2)" in line for line in ranks.noise)
        assert ranks.ask("close") == []


def test_stages_from_a_worker_node_encrypted(bed: RayHosts, model: Path, want: list[int]) -> None:
    options = {"pipeline_parallel_size": 2, "pipeline_split": "2,1", "encrypt_transport": True}
    options["placement_strategy"] = "SPREAD"
    with bed.executor(model, on=2, **options) as ranks:
        assert {status["node"] for status in ranks.ready()} == {"host1", "host2"}
        assert ranks.ask("generate") == want
        assert not ranks.noise
        ranks.ask("close")


def test_a_node_that_falls_silent(bed: RayHosts, model: Path, want: list[int]) -> None:
    """Its rank goes elsewhere long before Ray has given the node up."""
    try:
        with bed.executor(model, tensor_parallel_size=2, placement_strategy="SPREAD") as ranks:
            lost = [status["node"] for status in ranks.ready()].index("host2")
            assert ranks.ask("generate") == want
            bed.hosts[2].cut()
            began = time.monotonic()
            died = ranks.try_to("generate")
            assert died["error"] == "WorkerDied" and f"Worker {lost} on host2 died" in died["text"], died
            assert time.monotonic() - began < 6
            assert [status["node"] for status in ranks.ask("restart 1")] == ["host1", "host1"]
            assert time.monotonic() - began < 25
            assert ranks.ask("generate") == want
    finally:
        bed.bring_back(2, CPUS[2])


@pytest.fixture(scope="module")
def pace(tmp_path_factory: pytest.TempPathFactory) -> Pace:
    return Pace(tmp_path_factory.mktemp("pace"))


@pytest.fixture
def served(bed: RayHosts, pace: Pace, tmp_path: Path) -> Iterator[Serving]:
    """It takes all places, which other tests need."""
    arguments = [str(write_tiny_model(tmp_path / "tiny")), "-tp", "3", "--placement-strategy", "SPREAD"]
    arguments += ["--distributed-executor-backend", "ray", "--dtype", "float32", "--replacement-timeout", "2"]
    own = {"PHALANX_HOST_IP": bed.hosts[0].address, "PHALANX_FAULT": pace.fault}
    head, variables = bed.hosts[0], {**bed.env, **own}
    serving = Serving(arguments, tmp_path / "log", env=variables, start=head.start, network=head.network)
    try:
        serving.ready()
        yield serving
    finally:
        serving.kill()


def nodes(serving: Serving) -> list[str]:
    return [worker["node"] for worker in serving.status()["workers"]]


@pytest.mark.recovery
@pytest.mark.parametrize("lost", [2, 1])
def test_an_engine_and_a_node_lost_together(bed: RayHosts, served: Serving, pace: Pace, lost: int) -> None:
    """The next engine goes on with the places that are left, and takes the node in again when it is back."""
    ask = {"prompt": "hello there", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    left = ["host1", "host1"] if lost == 2 else ["host2"]
    assert sorted(nodes(served)) == ["host1", "host1", "host2"]
    undisturbed = Client(served, "undisturbed", ask)
    undisturbed.join(60)
    with pace.slow():
        client = Client(served, "disturbed", ask)
        assert wait_for_events([client], 20)
        os.kill(served.engine(), signal.SIGKILL)
        bed.end(lost)
    try:
        client.join(90)
        assert not client.is_alive(), served.output
        assert check_stream(client.saw, assemble(undisturbed.saw)) == [], served.output
        assert nodes(served) == left
    finally:
        bed.bring_back(lost, CPUS[lost])
    assert wait_until(lambda: served.at_rest(1) and len(nodes(served)) == 3, 40), served.output


def test_a_killed_driver_gives_everything_back(bed: RayHosts, model: Path) -> None:
    with bed.executor(model, tensor_parallel_size=2) as ranks:
        pids = [status["pid"] for status in ranks.ready()]
        ranks.process.kill()
        assert wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), 5)
    with bed.executor(model, tensor_parallel_size=2) as ranks:
        assert len(ranks.ready()) == 2


@pytest.mark.skipif(not can_limit("cpu"), reason="processor time cannot be limited here")
def test_a_slow_node_gets_a_smaller_share(bed: RayHosts, model: Path, want: list[int]) -> None:
    """Half a core's time, against all of this machine's."""
    options = {"tensor_parallel_size": 2, "placement_strategy": "SPREAD", "splits": True}
    with bed.executor(model, **options) as ranks:
        assert [(status["node"], status["heads"]) for status in ranks.ready()] == [("host1", 3), ("host2", 3)]
        assert any("Shares are equal, because measured speed" in line for line in ranks.noise)
    bed.end(2)
    bed.node(2, cpus=CPUS[2], quota=0.5)
    with bed.executor(model, **options) as ranks:
        heads = {status["node"]: status["heads"] for status in ranks.ready()}
        assert heads["host1"] + heads["host2"] == HEADS and heads["host1"] > heads["host2"], ranks.noise
        assert any(re.search(r"Shares are by measured speed .*\b0\.\d\d\b", line) for line in ranks.noise), ranks.noise
        assert ranks.ask("generate") == want
        assert ranks.ask("close") == []
    bed.end(2)
    bed.node(2, cpus=CPUS[2])


@pytest.fixture
def little(bed: RayHosts) -> Iterator[None]:
    """Host 2 has less memory than the others."""
    if not can_limit("memory"):
        pytest.skip("no control group with a memory limit can be made here")
    bed.end(2)
    bed.node(2, cpus=CPUS[2], memory_mb=LITTLE_MB)
    yield
    bed.end(2)
    bed.node(2, cpus=CPUS[2])


def serve(bed: RayHosts, tmp_path: Path, *options: str) -> Serving:
    """Two ranks, on hosts 1 and 2."""
    arguments = [str(write_tiny_model(tmp_path / "tiny")), "-tp", "2", "--placement-strategy", "SPREAD", *options]
    arguments += ["--distributed-executor-backend", "ray", "--dtype", "float32"]
    head, variables = bed.hosts[0], {**bed.env, "PHALANX_HOST_IP": bed.hosts[0].address}
    return Serving(arguments, tmp_path / "log", env=variables, start=head.start, network=head.network)


@pytest.mark.usefixtures("little")
def test_a_host_with_less_memory(bed: RayHosts, tmp_path: Path) -> None:
    """It serves, within what that host has."""
    serving = serve(bed, tmp_path)
    try:
        serving.ready()
        free = {worker["node"]: worker["memory"]["free"] for worker in serving.status()["workers"]}
        assert free["host2"] < LITTLE_MB << 20 < free["host1"]
        client = Client(serving, "", {"prompt": "hello there", "max_tokens": 20, "temperature": 0, "ignore_eos": True})
        client.join(60)
        assert [assemble(client.saw).choices[0].text] == continuations(str(tmp_path / "tiny"), ["hello there"], 20)
    finally:
        serving.kill()


@pytest.mark.usefixtures("little")
def test_what_does_not_fit_a_host_with_less_memory(bed: RayHosts, tmp_path: Path) -> None:
    """The last line says where and why, before or after the kernel had to step in, and nothing is left."""
    serving = serve(bed, tmp_path, "--kv-cache-memory-bytes", "3G")
    try:
        assert serving.ends(90) == 1, serving.output
        last = serving.output.strip().splitlines()[-1]
        assert re.match(r"error: The model does not fit 2 workers .* Rank 1 \(cpu of host2\) needs ", last), (
            serving.output
        )
        pids = lambda: [pid for host in bed.hosts for pid in host.pids()]  # noqa: E731
        assert wait_until(lambda: not any(name_of(pid).startswith("phalanx") for pid in pids()), 5)
    finally:
        serving.kill()


def refused(bed: RayHosts, model: Path, *, kind: str = "ConfigError", **options: Any) -> str:
    with bed.executor(model, tensor_parallel_size=2, placement_strategy="SPREAD", **options) as ranks:
        answer = ranks.answer()
        assert answer.get("error") == kind, answer
        return str(answer["text"])


def test_a_model_that_one_node_lacks(bed: RayHosts, model: Path) -> None:
    bed.end(2)
    bed.node(2, cpus=CPUS[2], hide=[model])
    assert f"host2 lacks {model}" in refused(bed, model) or "host2 cannot use the model" in refused(bed, model)
    bed.end(2)
    bed.node(2, cpus=CPUS[2])


def test_a_node_with_another_phalanx(bed: RayHosts, model: Path, tmp_path: Path) -> None:
    package = tmp_path / "phalanx"
    shutil.copytree(Path(phalanx.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    init = (package / "__init__.py").read_text()
    (package / "__init__.py").write_text(f'{init}\n__version__ = "0.0.9"\n')
    bed.end(2)
    bed.node(2, cpus=CPUS[2], env={"PYTHONPATH": str(tmp_path)})
    text = refused(bed, model)
    assert f"Phalanx is {phalanx.__version__} on host0 and 0.0.9 on host2" in text
    bed.end(2)
    bed.node(2, cpus=CPUS[2])


def test_a_wrong_token(bed: RayHosts, model: Path) -> None:
    text = refused(bed, model, env={"RAY_AUTH_TOKEN": "wrong" * 8})
    assert f"The Ray cluster at {bed.env['RAY_ADDRESS']}" in text and "RAY_AUTH_TOKEN" in text


def test_a_cluster_without_a_token_is_warned_of(model: Path) -> None:
    """SEC-28. Where there is a token, nothing is said (`test_stages_from_a_worker_node_encrypted`)."""
    with ray_hosts((1,), RAY_AUTH_MODE="disabled") as open_bed, open_bed.executor(model) as ranks:
        assert len(ranks.ready()) == 1
        said = f"The Ray cluster at {open_bed.env['RAY_ADDRESS']} asks for no token: ANYBODY who can reach it"
        assert [line for line in ranks.noise if said in line and " WARNING " in line], ranks.noise


def test_a_machine_that_is_no_node(bed: RayHosts, model: Path) -> None:
    text = refused(bed, model, kind="ClusterMissing", on=1, on_its_own=True)
    assert "no Ray node of it runs on this machine" in text and "ray start --address" in text

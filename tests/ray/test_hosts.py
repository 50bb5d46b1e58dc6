"""A Ray cluster whose nodes are hosts of their own: the driver on a head without CPUs, a rank on each of two others."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import phalanx
from tests.helpers.asks import wait_for_events
from tests.helpers.executor_process import ExecutorProcess
from tests.helpers.history import assemble, check_stream
from tests.helpers.hosts import Host, missing, test_bed
from tests.helpers.one_request import PROMPT
from tests.helpers.plans import GREEDY
from tests.helpers.processes import wait_until
from tests.helpers.serving import Client, Serving
from tests.helpers.tiny_model import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "there are hosts")]

SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_enable_metrics_collection": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "OMP_NUM_THREADS": "1",
}


CPUS = (0, 2, 1)


class RayHosts:
    def __init__(self, hosts: list[Host], folder: str):
        self.hosts, self.folder = hosts, folder
        self.env = {**SETTINGS, "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_ADDRESS": f"{hosts[0].address}:6379"}
        self.nodes: dict[int, Any] = {}
        self._started = 0

    def node(self, index: int, cpus: int, **options: Any) -> None:
        host, self._started = self.hosts[index], self._started + 1
        command = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--node-ip-address", host.address]
        command += ["--head", "--port", "6379", "--include-dashboard", "false", "--no-monitor"] if index == 0 else []
        command += [] if index == 0 else ["--address", self.env["RAY_ADDRESS"]]
        command += ["--num-cpus", str(cpus), "--num-gpus", "0", "--object-store-memory", "80000000"]
        command += ["--temp-dir", f"{self.folder}/{self._started}", "--include-log-monitor", "false"]
        command += ["--disable-usage-stats"]
        own = {key: value for key, value in self.env.items() if key != "RAY_ADDRESS"}
        environment = {**own, **options.pop("env", {})}
        log = (Path(self.folder) / f"{self._started}.log").open("wb")
        self.nodes[index] = host.start(command, env=environment, shm_mb=200, stdout=log, stderr=log, **options)
        output = Path(log.name)
        assert wait_until(lambda: b"Ray runtime started" in output.read_bytes(), 60), output.read_text()

    def end(self, index: int) -> None:
        self.nodes.pop(index).kill()
        self.hosts[index].kill()

    def executor(
        self, model: Path, *, on: int = 0, on_its_own: bool = False, env: dict[str, str] | None = None, **options: Any
    ) -> ExecutorProcess:
        host = self.hosts[on]
        wanted = {"model": str(model), "distributed_executor_backend": "ray", **options}

        def start(command: list[str], **details: Any) -> subprocess.Popen[bytes]:  # sees its own processes only
            return host.start(["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *command], **details)

        variables = {**self.env, "PHALANX_HOST_IP": host.address, **(env or {})}
        return ExecutorProcess(wanted, start=start if on_its_own else host.start, env=variables)


@pytest.fixture(scope="module")
def bed() -> Iterator[RayHosts]:
    folder = tempfile.mkdtemp(prefix="phxray-", dir="/tmp")
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        hosts = RayHosts(stack.enter_context(test_bed(3)), folder)
        for index in range(3):
            hosts.node(index, cpus=CPUS[index])
        yield hosts


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
    bed.hosts[2].heal()
    bed.end(2)
    bed.node(2, cpus=CPUS[2])


@pytest.fixture(scope="module")
def served(bed: RayHosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("served")
    arguments = [str(write_tiny_model(folder / "tiny")), "-tp", "3", "--placement-strategy", "SPREAD"]
    arguments += ["--distributed-executor-backend", "ray", "--dtype", "float32", "--replacement-timeout", "2"]
    head, variables = bed.hosts[0], {**bed.env, "PHALANX_HOST_IP": bed.hosts[0].address}
    serving = Serving(arguments, folder / "log", env=variables, start=head.start, network=head.network)
    try:
        serving.ready()
        yield serving
    finally:
        serving.kill()


def nodes(serving: Serving) -> list[str]:
    return [worker["node"] for worker in serving.status()["workers"]]


@pytest.mark.parametrize("lost", [2, 1])
def test_an_engine_and_a_node_lost_together(bed: RayHosts, served: Serving, lost: int) -> None:
    """The next engine goes on with the places that are left, and takes the node in again when it is back."""
    ask = {"prompt": "hello there", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    left = ["host1", "host1"] if lost == 2 else ["host2"]
    assert sorted(nodes(served)) == ["host1", "host1", "host2"]
    undisturbed = Client(served, "undisturbed", ask)
    undisturbed.join(60)
    client = Client(served, "disturbed", ask)
    assert wait_for_events([client], 20)
    os.kill(served.engine(), signal.SIGKILL)
    bed.end(lost)
    client.join(90)
    assert not client.is_alive(), served.output
    assert check_stream(client.saw, assemble(undisturbed.saw)) == [], served.output
    assert nodes(served) == left
    bed.node(lost, cpus=CPUS[lost])
    assert wait_until(lambda: served.at_rest(1) and len(nodes(served)) == 3, 40), served.output


def test_a_killed_driver_gives_everything_back(bed: RayHosts, model: Path) -> None:
    with bed.executor(model, tensor_parallel_size=2) as ranks:
        pids = [status["pid"] for status in ranks.ready()]
        ranks.process.kill()
        assert wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), 5)
    with bed.executor(model, tensor_parallel_size=2) as ranks:
        assert len(ranks.ready()) == 2


def refused(bed: RayHosts, model: Path, **options: Any) -> str:
    with bed.executor(model, tensor_parallel_size=2, placement_strategy="SPREAD", **options) as ranks:
        answer = ranks.answer()
        assert answer.get("error") == "ConfigError", answer
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


def test_a_machine_that_is_no_node(bed: RayHosts, model: Path) -> None:
    text = refused(bed, model, on=1, on_its_own=True)
    assert "no Ray node runs on this machine" in text and "ray start --address" in text

"""A Ray cluster whose nodes are hosts of a test bed (`tests.helpers.hosts`): the first is the head, all want a token.

with ray_hosts((0, 2, 1)) as bed:       # CPUs of each
    bed.end(2)                          # its processes at once
    bed.node(2, cpus=1)
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.helpers.executor_process import ExecutorProcess
from tests.helpers.hosts import Host, test_bed
from tests.helpers.processes import wait_until

SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_enable_metrics_collection": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_prestart_worker_first_driver": "0",
    "OMP_NUM_THREADS": "1",
}
ALERT = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
"""Ray notices the loss of a node within seconds, so that tests need not wait for it."""


class RayHosts:
    def __init__(self, hosts: list[Host], folder: str):
        self.hosts, self.folder = hosts, folder
        self.env = {**SETTINGS, "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_ADDRESS": f"{hosts[0].address}:6379"}
        self.nodes: dict[int, Any] = {}
        self._started = 0

    def node(self, index: int, cpus: int, quota: float | None = None, **options: Any) -> None:
        """With `cpus` for ranks, and `quota` cores' worth of time."""
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
        self.nodes[index] = host.start(
            command, env=environment, shm_mb=200, cpus=quota, stdout=log, stderr=log, **options
        )  # fmt: skip
        output = Path(log.name)
        assert wait_until(lambda: b"Ray runtime started" in output.read_bytes(), 60), output.read_text()

    def end(self, index: int) -> None:
        self.nodes.pop(index).kill()
        self.hosts[index].kill()

    def bring_back(self, index: int, cpus: int) -> None:
        """Whatever was done to the host. As its operator would: nothing of before, and `ray start` again."""
        self.hosts[index].heal()
        self.hosts[index].signal_all(signal.SIGCONT)
        if index in self.nodes:
            self.end(index)
        self.node(index, cpus=cpus)

    def executor(
        self, model: Path, *, on: int = 0, on_its_own: bool = False, env: dict[str, str] | None = None, **options: Any
    ) -> ExecutorProcess:
        host = self.hosts[on]
        wanted = {"model": str(model), "distributed_executor_backend": "ray", **options}

        def start(command: list[str], **details: Any) -> subprocess.Popen[bytes]:  # sees its own processes only
            return host.start(["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *command], **details)

        variables = {**self.env, "PHALANX_HOST_IP": host.address, **(env or {})}
        return ExecutorProcess(wanted, start=start if on_its_own else host.start, env=variables)


@contextlib.contextmanager
def ray_hosts(cpus: Sequence[int], *, alert: bool = True, **env: str) -> Iterator[RayHosts]:
    """A node on each host, with so many CPUs; `env` is for all of them. Hosts have the addresses 10.77.0.10 and on.
    Without `alert`, Ray looks after its nodes as it does by default."""
    folder = tempfile.mkdtemp(prefix="phxray-", dir="/tmp")
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        bed = RayHosts(stack.enter_context(test_bed(len(cpus))), folder)
        bed.env |= (ALERT if alert else {}) | env
        for index, count in enumerate(cpus):
            bed.node(index, cpus=count)
        yield bed

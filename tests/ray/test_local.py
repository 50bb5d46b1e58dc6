"""The Ray that is started when there is none: quiet, closed to others, and gone afterwards. And what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest
from ray._private.authentication import authentication_utils

from phalanx import env
from phalanx.errors import ConfigError
from phalanx.executor.ray_reaper import MARK
from phalanx.executor.ray_session import RaySession, warn_of_open_cluster
from tests.helpers.executor_process import ExecutorProcess
from tests.helpers.one_request import PROMPT
from tests.helpers.plans import GREEDY
from tests.helpers.processes import alive, wait_until
from tests.helpers.server import demo_checkpoint


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No Ray of this machine is found, and no token of its user."""
    (tmp_path / "ray").mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)


def tree(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def left(processes: list[psutil.Process]) -> list[str]:
    return [f"{p.name()} {' '.join(p.cmdline())[:200]}" for p in processes if alive(p.pid)]


def listening(processes: list[psutil.Process]) -> set[str]:
    """Addresses."""
    found = {c.laddr.ip for p in processes for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    return {address.removeprefix("::ffff:") for address in found}


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_a_killed_owner_leaves_nothing(model: Path, reference, tmp_path: Path) -> None:
    options = {"model": str(model), "distributed_executor_backend": "ray", "tensor_parallel_size": 2}
    with ExecutorProcess(options) as process:
        process.ready()
        assert process.ask("generate") == reference.generate(PROMPT, 10, GREEDY)
        processes = [psutil.Process(process.process.pid), *tree(process.process.pid)]
        assert {"raylet", "gcs_server", "phalanx-rank-0", "phalanx-rank-1"} <= {p.name() for p in processes}
        assert listening(processes) == {"127.0.0.1"}
        mode = next(p.environ()["RAY_AUTH_MODE"] for p in processes if p.name() == "raylet")
        assert mode == "token" and (tmp_path / ".ray/auth_token").exists()
        assert not [line for line in process.noise if " INFO " not in line]
        mark = next(p.environ()[MARK] for p in processes if p.name() == "raylet")
        folder = next(a for p in processes for a in p.cmdline() if a.startswith("/tmp/phalanx-ray-"))
        process.process.kill()
        assert wait_until(lambda: not any(alive(p.pid) for p in processes), 5), left(processes)
        assert wait_until(lambda: not Path(folder).exists(), 5)
        assert mark


class TestRefusals:
    def refused(self, **variables: str) -> str:
        began = time.monotonic()
        with env.changed(**variables), pytest.raises(ConfigError) as caught:
            RaySession(cpus=1, gpus=0)
        assert time.monotonic() - began < 5
        return str(caught.value)

    def test_an_address_where_nobody_is(self) -> None:
        text = self.refused(RAY_ADDRESS="127.0.0.1:9")
        assert "RAY_ADDRESS is 127.0.0.1:9, where nothing answers" in text

    def test_a_ray_client(self) -> None:
        assert "cannot be started through a Ray client" in self.refused(RAY_ADDRESS="ray://10.0.0.1:10001")

    def test_no_ray(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "ray", None)
        assert "pip install 'phalanx[ray]'" in self.refused()

    def test_an_old_ray(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import ray

        monkeypatch.setattr(ray, "__version__", "2.58.1")
        assert "Ray 2.58.1 is too old: Phalanx needs 2.59" in self.refused()


@pytest.mark.parametrize(
    ("token", "address", "warned"),
    [
        (False, "10.0.0.1:6379", True),
        (False, "[fd00::1]:6379", True),
        (False, "127.0.0.1:6379", False),
        (False, "[::1]:6379", False),
        (True, "10.0.0.1:6379", False),
    ],
)
def test_an_open_cluster_is_warned_of(
    token: bool, address: str, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`test_hosts` joins one."""
    monkeypatch.setattr(authentication_utils, "is_token_auth_enabled", lambda: token)
    warn_of_open_cluster(address)
    said = f"The Ray cluster at {address} asks for no token: ANYBODY who can reach it can run programs on its nodes."
    assert [(r.levelname, said in r.getMessage()) for r in caplog.records] == [("WARNING", True)] * warned


@pytest.mark.usefixtures("alone")
def test_serve_from_the_first_to_the_last_process() -> None:
    checkpoint = demo_checkpoint()
    command = [sys.executable, "-m", "phalanx.cli.main", "serve", str(checkpoint.weight_files[0]), "-tp", "2"]
    command += ["--distributed-executor-backend", "ray", "--port", "0", "--dtype", "float32"]
    command += ["--kv-cache-memory-bytes", "64M", "--max-model-len", "1024"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    lines: list[str] = []
    assert server.stdout is not None
    output = server.stdout
    reader = threading.Thread(target=lambda: lines.extend(output), daemon=True)
    reader.start()
    try:
        assert wait_until(lambda: any(line.startswith("Ready: ") for line in lines), 90), lines
        base = next(line.split()[1] for line in lines if line.startswith("Ready: "))
        assert any("executor ray" in line for line in lines)
        asked = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{base}/v1/completions", json=asked, timeout=60).json()
        assert answer["choices"][0]["text"].startswith(" Paris")
        status = httpx.get(f"{base}/status").json()
        assert status["executor"] == "ray" and status["mesh"]["tp"] == 2
        ranks = [psutil.Process(worker["pid"]) for worker in status["workers"]]
        assert [rank.name() for rank in ranks] == ["phalanx-rank-0", "phalanx-rank-1"]
        assert [rank.nice() for rank in ranks] == 2 * [psutil.Process(server.pid).nice()]
        processes = tree(server.pid)
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
        assert wait_until(lambda: not any(alive(p.pid) for p in processes), 5)
    finally:
        server.kill()
        server.wait()
    reader.join(5)
    assert not any("ray" in line.lower() and "executor ray" not in line for line in lines), json.dumps(lines)

"""Whatever ends, and whenever: nothing of it is left after five seconds."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.helpers.processes import alive, wait_until

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ["--dtype", "float32", "--kv-cache-memory-bytes", "8M", "--port", "0", "-tp", "2"]


class Run:
    """A program and everything it starts, which carries a mark."""

    def __init__(self, *command: str, fault: str = ""):
        self._mark = secrets.token_hex(8)
        self.process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
            env={**os.environ, "PHALANX_TEST_MARK": self._mark, "OMP_NUM_THREADS": "1", "PHALANX_FAULT": fault},
        )  # fmt: skip
        self.text = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._seen: set[int] = set()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.text += line

    def says(self, pattern: str, seconds: float = 60) -> re.Match[str]:
        assert wait_until(lambda: bool(re.search(pattern, self.text)) or not alive(self.process.pid), seconds), (
            self.text
        )
        found = re.search(pattern, self.text)
        assert found, self.text
        return found

    def members(self) -> dict[str, list[int]]:
        """Processes by what they are: front, engine, supervisor, rank, and other."""
        found: dict[str, list[int]] = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                marked = f"PHALANX_TEST_MARK={self._mark}".encode() in Path(f"/proc/{process.pid}/environ").read_bytes()
                if marked or process.pid in self._seen:
                    found.setdefault(self._role(process), []).append(process.pid)
        with contextlib.suppress(psutil.NoSuchProcess):  # helpers have an environment of their own
            self._seen |= {child.pid for child in psutil.Process(self.process.pid).children(recursive=True)}
        return found

    def _role(self, process: psutil.Process) -> str:
        words, name = " ".join(process.cmdline()), process.name()
        if process.pid == self.process.pid:
            return "front"
        if name.startswith("phalanx-rank"):
            return "rank"
        return next((role for role in ("supervisor", "engine") if f".{role}" in words), "other")

    def one(self, role: str, seconds: float = 30) -> int:
        """The process of this role, once there is one."""
        found: list[int] = []
        assert wait_until(lambda: bool(found.extend(self.members().get(role, ())) or found), seconds), self.text
        return found[0]

    def nothing_left(self, seconds: float = 5) -> None:
        self.members()
        assert wait_until(lambda: not any(map(alive, [p for v in self.members().values() for p in v])), seconds), (
            self.members()
        )


@pytest.fixture
def run_of() -> Iterator[type]:
    runs: list[Run] = []

    def start(*command: str, fault: str = "") -> Run:
        runs.append(Run(*command, fault=fault))
        return runs[-1]

    yield start
    for run in runs:
        for pid in [pid for pids in run.members().values() for pid in pids]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.process.wait()


def be_busy(run: Run) -> None:
    """A stream that goes on and on, and is under way."""
    url = run.says(r"Ready: (http://\S+)")[1]
    body = json.dumps({"prompt": "hello", "max_tokens": 240, "stream": True, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    stream = urllib.request.urlopen(request, timeout=30)
    assert stream.readline().startswith(b"data:")

    def read() -> None:
        with contextlib.suppress(OSError, ValueError):
            while stream.readline():
                time.sleep(0.05)

    threading.Thread(target=read, daemon=True).start()


def bring_to(run: Run, phase: str) -> None:
    match phase:
        case "import":
            run.one("supervisor")
        case "load":
            run.one("rank")
        case "idle":
            run.says("Ready: ")
        case "busy":
            be_busy(run)
    run.members()


LONG_LOAD = {"load": "at=load,do=sleep=20"}
"""By phase: the fault that keeps it from being over when something is done in it."""
QUICK = {
    ("load", "front", "SIGKILL"),
    ("busy", "front", "SIGKILL"),
    ("busy", "engine", "SIGKILL"),
    ("load", "front", "SIGINT"),
}
CASES = [
    pytest.param(phase, who, name, marks=() if (phase, who, name) in QUICK else pytest.mark.slow)
    for phase in ("import", "load", "idle", "busy")
    for who, name in (
        ("front", "SIGINT"), ("front", "SIGTERM"), ("front", "SIGKILL"), ("engine", "SIGKILL"),
        ("supervisor", "SIGKILL"), ("rank", "SIGKILL"),
    )
    if not (phase == "import" and who == "rank")
]  # fmt: skip


@pytest.mark.parametrize(("phase", "who", "name"), CASES)
def test_serve(run_of, tiny_model, phase, who, name):
    run = run_of("-m", "phalanx", "serve", tiny_model, *OPTIONS, fault=LONG_LOAD.get(phase, ""))
    bring_to(run, phase)
    os.kill(run.one(who), getattr(signal, name))
    survives = (who, phase) == ("supervisor", "import") or (
        who in ("supervisor", "rank", "engine") and phase in ("idle", "busy")
    )
    if survives:
        be_busy(run)
        os.kill(run.process.pid, signal.SIGTERM)
    run.nothing_left(5 if not survives and (phase != "busy" or name != "SIGTERM") else 15)  # a drain takes its time
    run.process.wait()
    run._reader.join(5)
    if who != "front" and phase in ("import", "load") and not survives:
        assert run.process.returncode == 1
        last = run.text.strip().splitlines()[-1]
        assert "SIGKILL" in last and last.startswith("error: "), run.text
    assert "Traceback" not in run.text


PROGRAM = """
import sys
from phalanx import LLM, SamplingParams
with LLM(sys.argv[1], tensor_parallel_size=2, dtype="float32", kv_cache_memory_bytes="8M") as llm:
    print("loaded", flush=True)
    while sys.argv[2] == "busy":
        llm.generate("hello", SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)
        print("answered", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        pytest.param("load", signal.SIGINT),
        pytest.param("busy", signal.SIGKILL),
        pytest.param("load", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("busy", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("busy", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_program_of_ones_own(run_of, tiny_model, phase, number):
    run = run_of("-c", PROGRAM, tiny_model, phase, fault=LONG_LOAD.get(phase, ""))
    run.one("rank") if phase == "load" else run.says("answered")
    run.members()
    os.kill(run.process.pid, number)
    run.nothing_left()
    assert run.process.wait() != 0


def test_an_llm_outlives_the_thread_that_made_it(run_of, tiny_model):
    """Linux ties "end with my parent" to the thread that forked; a thread that ends must not take the ranks along."""
    program = """
import sys, threading
from phalanx import LLM, SamplingParams
made = []
thread = threading.Thread(target=lambda: made.append(
    LLM(sys.argv[1], tensor_parallel_size=2, dtype="float32", kv_cache_memory_bytes="8M")))
thread.start()
thread.join()
import time; time.sleep(0.5)
print("tokens", len(made[0].generate("hello", SamplingParams(max_tokens=9, ignore_eos=True))[0].outputs[0].token_ids))
print("epoch", made[0]._engine.status().epoch)
made[0].close()
"""
    run = run_of("-c", program, tiny_model)
    run.says("tokens 9")
    run.says("epoch 0")
    assert run.process.wait(60) == 0
    run.nothing_left()


@pytest.mark.slow
def test_four_servers_at_once(run_of, tiny_model):
    runs = [run_of("-m", "phalanx", "serve", tiny_model, *OPTIONS) for _ in range(4)]
    urls = {run.says(r"Ready: (http://\S+)", 120)[1] for run in runs}
    assert len(urls) == 4
    answers = set()
    for url in urls:
        body = json.dumps({"prompt": "hello", "max_tokens": 8, "temperature": 0}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        answers.add(json.load(urllib.request.urlopen(request, timeout=30))["choices"][0]["text"])
    assert len(answers) == 1
    for run in runs:
        run.process.terminate()
    for run in runs:
        run.nothing_left(10)
        assert run.process.wait() == 0

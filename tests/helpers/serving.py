"""A real `phalanx serve` to do harm to: its processes by what they are, clients that write down what they see, and an
onlooker that asks for its health all the time.

Needs nothing but the standard library and psutil, so that the scripts that use it run without a test suite.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.helpers.history import Baseline, Event, Log, Sample
from tests.helpers.processes import alive, wait_until

SERVE = (sys.executable, "-P", "-m", "phalanx", "serve")
START_S = 90.0
MARK = "NEMESIS_MARK"
ROLES = ("front", "server", "engine", "supervisor", "rank")
Start = Callable[..., subprocess.Popen[bytes]]
Network = Callable[[], contextlib.AbstractContextManager[None]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Serving:
    """One server. `start` runs a command (on a host of a test bed, say), `network` enters where it listens."""

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        start: Start = subprocess.Popen,
        network: Network = contextlib.nullcontext,
        port: int | None = None,
        elsewhere: Callable[[], Iterable[psutil.Process]] = tuple,
    ):
        """`elsewhere` gives processes that are not below the server's own; those of ranks among them are its."""
        self.log = log
        self._elsewhere = elsewhere
        self.port = port or free_port()
        self.network = network
        self._mark = secrets.token_hex(8)
        environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", MARK: self._mark, **(env or {})}
        with log.open("ab") as output:
            command = [*SERVE, *arguments, "--port", str(self.port)]
            options: dict[str, Any] = {"stdout": output, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
            self.process = start(command, env={**os.environ, **environment}, **options)
        self._seen: set[psutil.Process] = set()
        self._began = time.monotonic()
        self.start_s = 0.0
        """From the command until it was ready."""

    # What it says

    def ready(self) -> None:
        """Wait until it is. AssertionError with all that it said."""
        self.says("Ready: ")
        self.start_s = time.monotonic() - self._began

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def says(self, pattern: str, seconds: float = START_S) -> re.Match[str]:
        """Wait for a line. AssertionError with all that it said."""
        wait_until(lambda: bool(re.search(pattern, self.output)) or not alive(self.process.pid), seconds)
        found = re.search(pattern, self.output)
        assert found, f"the server did not say {pattern!r}:\n{self.output}"
        return found

    def get(self, path: str, timeout: float = 5.0) -> tuple[int, bytes]:
        """Raises OSError."""
        with self.network():
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
            try:
                connection.request("GET", path)
                answer = connection.getresponse()
                return answer.status, answer.read()
            except http.client.HTTPException as error:
                raise ConnectionError(f"no answer: {error!r}") from error
            finally:
                connection.close()

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.get("/status")[1])
        return found

    def metrics(self) -> dict[str, float]:
        """By name with labels, as they are written."""
        lines = self.get("/metrics")[1].decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def counted(self, name: str, *labels: str) -> float:
        """The sum of a metric's values with these labels."""
        return sum(
            value
            for key, value in self.metrics().items()
            if key.partition("{")[0] == f"phalanx:{name}" and all(label in key for label in labels)
        )

    # What it is made of

    def engine(self) -> int:
        pid: int = self.status()["engine"]["pid"]
        return pid

    def ranks(self) -> dict[int, int]:
        return {worker["rank"]: worker["pid"] for worker in self.status()["workers"]}

    def members(self) -> dict[str, list[int]]:
        """Living processes by what they are."""
        found: dict[str, list[int]] = {}
        for process in self._elsewhere():
            with contextlib.suppress(psutil.Error):
                if process.name().startswith("phalanx-rank") and alive(process.pid):
                    found.setdefault("rank", []).append(process.pid)
        wanted = f"{MARK}={self._mark}".encode()
        with contextlib.suppress(psutil.Error):  # titles are written over environments: what is below us counts too
            self._seen |= set(psutil.Process(self.process.pid).children(recursive=True))
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                marked = process in self._seen or wanted in Path(f"/proc/{process.pid}/environ").read_bytes()
                if marked and alive(process.pid):
                    found.setdefault(self._role(process), []).append(process.pid)
        return found

    def _role(self, process: psutil.Process) -> str:
        words, name = " ".join(process.cmdline()), process.name()
        if process.pid == self.process.pid:
            return "front"
        if name.startswith("phalanx-rank") or name.startswith("phalanx-zygote"):
            return name.split("-")[1]
        return next((role for role in ("supervisor", "engine", "server") if f".{role}" in words), name)

    @property
    def shm(self) -> Path:
        """Its /dev/shm, wherever that is."""
        return Path(f"/proc/{self.process.pid}/root/dev/shm")

    def baseline(self) -> Baseline:
        status = self.status()
        members = self.members()
        pids = {pid for group in members.values() for pid in group}
        counts = {role: len(group) for role, group in members.items() if role in ROLES}
        return Baseline(
            free_blocks=status["kv"]["free"],
            blocks=status["kv"]["blocks"],
            processes=counts,
            shared=frozenset(name for name in os.listdir(self.shm) if "phalanx" in name),
            ports=len({c.laddr.port for pid in pids for c in _listening(pid)}),
            running=status["requests"]["running"],
            waiting=status["requests"]["waiting"],
        )

    def at_rest(self, seconds: float = 10.0) -> bool:
        """Whether it comes to be ready with nothing to do."""

        state = ""

        def settled() -> bool:
            nonlocal state
            try:
                status = self.status()
            except OSError:
                return self.process.poll() is not None
            busy = status["requests"]["running"] or status["requests"]["waiting"]
            at_rest = status["state"] == "ready" and not busy and status["kv"]["free"] == status["kv"]["blocks"]
            state = "at rest" if at_rest else status["state"]
            return state in ("at rest", "failed")

        wait_until(settled, seconds)
        return state == "at rest"

    # Its end

    def stop(self, seconds: float = 45.0) -> int:
        """Its exit code after SIGTERM. AssertionError when it does not end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.ends(seconds)

    def ends(self, seconds: float) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the server still runs after {seconds:g} s:\n{self.output}") from None

    def left(self, seconds: float = 5.0) -> dict[str, list[int]]:
        """What still lives of it, at most `seconds` later."""
        wait_until(lambda: not self.members(), seconds)
        return self.members()

    def kill(self) -> None:
        for pid in [pid for group in self.members().values() for pid in group]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()


def _listening(pid: int) -> list[Any]:
    with contextlib.suppress(psutil.Error):
        return [c for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return []


# --------------------------------------------------------------------------------------------------------- clients


class Client(threading.Thread):
    """Asks once, streaming, and writes down every event with its time."""

    def __init__(
        self, serving: Serving, name: str, body: Mapping[str, Any], *, timeout: float = 120.0, key: str | None = None
    ):
        super().__init__(daemon=True)
        self.saw = Log(name)
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._serving, self._timeout = serving, timeout
        self._body = json.dumps({"stream": True, "stream_options": {"include_usage": True}, **body})
        self.start()

    def run(self) -> None:
        log = self.saw
        log.sent = time.monotonic()
        try:
            with self._serving.network():
                connection = http.client.HTTPConnection("127.0.0.1", self._serving.port, timeout=self._timeout)
                connection.connect()
            connection.request("POST", "/v1/completions", self._body, self._headers)
            answer = connection.getresponse()
            log.status, log.retry_after = answer.status, answer.headers.get("Retry-After")
            if answer.status != 200:
                log.body = answer.read().decode(errors="replace")
            else:
                while line := answer.readline():
                    if line.startswith(b"data: "):
                        log.events.append(Event(time.monotonic(), line[6:].strip().decode()))
            connection.close()
        except (OSError, http.client.HTTPException) as error:
            log.broken = repr(error)
        log.closed = time.monotonic()


class Onlooker(threading.Thread):
    """Asks `/health/ready` and `/status` many times a second."""

    def __init__(self, serving: Serving, every: float = 0.05):
        super().__init__(daemon=True)
        self.samples: list[Sample] = []
        self.states: list[tuple[float, str]] = []
        self._serving, self._every = serving, every
        self._over = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._over.wait(self._every):
            at = time.monotonic()
            try:
                ready: bool | None = self._serving.get("/health/ready", 1.0)[0] == 200
                self.states.append((time.monotonic(), self._serving.status()["state"]))
            except TimeoutError:
                ready = None
            except OSError:
                continue  # it is not there
            self.samples.append(Sample(at, ready))

    def stop(self) -> None:
        self._over.set()
        self.join(5)

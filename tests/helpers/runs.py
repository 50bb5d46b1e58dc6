"""A program as its user starts it, everything that it starts in turn, and what is left of all that when it ends.

run = Run("-m", "phalanx", "serve", model, fault=LONG_LOAD)
bring_to(run, "load")
os.kill(run.process.pid, signal.SIGINT)
run.nothing_left()
"""

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
from collections.abc import Mapping
from pathlib import Path

import psutil

from tests.helpers.processes import alive, wait_until
from tests.helpers.source import ROOT

LONG_LOAD = {"load": "at=load,do=sleep=20"}
"""By phase: the fault that keeps it from being over when something is done in it."""


class Run:
    """A program and everything it starts, which carries a mark."""

    def __init__(self, *command: str, fault: str = "", env: Mapping[str, str] | None = None):
        self._mark = secrets.token_hex(8)
        self.process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
            env={
                **os.environ, "PHALANX_TEST_MARK": self._mark, "OMP_NUM_THREADS": "1", "PHALANX_FAULT": fault,
                **(env or {}),
            },
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

    def living(self) -> list[int]:
        return [pid for pids in self.members().values() for pid in pids if alive(pid)]

    def nothing_left(self, seconds: float = 5) -> None:
        self.members()
        assert wait_until(lambda: not self.living(), seconds), self.members()

    def clear_up(self) -> None:
        """Whatever is left of it, at once."""
        for pid in self.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


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

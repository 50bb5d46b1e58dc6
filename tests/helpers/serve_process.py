"""`phalanx serve` as a process, its output collected as it comes."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time

import psutil

SMALL = ("--kv-cache-memory-bytes", "100M", "--max-model-len", "2048")
"""Options for a server of the demo model that shares the machine with other tests."""


class Serve:
    def __init__(self, *arguments: str, environment: dict[str, str] | None = None):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "phalanx.cli.main", "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(environment or {})},
        )
        self.lines: list[str] = []
        self._reads, self._waits = threading.Event(), threading.Event()
        self._reads.set()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not self._reads.is_set():
                self._waits.set()
                self._reads.wait()
            self.lines.append(line.rstrip("\n"))

    def stop_reading(self) -> None:
        """The pipe of its output is full when this returns. `read_on` ends it."""
        assert self.process.stdout is not None
        self._waits.clear()
        self._reads.clear()
        writer = os.open(f"/proc/self/fd/{self.process.stdout.fileno()}", os.O_WRONLY | os.O_NONBLOCK)
        _fill(writer)  # of which the reader takes a part, if it was not waiting yet
        assert self._waits.wait(30)
        _fill(writer)
        os.close(writer)

    def read_on(self) -> None:
        self._reads.set()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def until(self, pattern: str, seconds: float = 90) -> re.Match[str]:
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, self.output)):
            assert self.process.poll() is None or self._reader.is_alive(), self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.02)
        return match

    def base(self) -> str:
        """The address, once it is ready."""
        return self.until(r"Ready: (https?://\S+)")[1]

    def ends(self, seconds: float) -> int:
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def _fill(writer: int) -> None:
    for size in (4096, 1):
        with contextlib.suppress(BlockingIOError):
            while os.write(writer, b"-" * (size - 1) + b"\n"):
                pass


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def all_gone(processes: list[psutil.Process], seconds: float = 5) -> bool:
    return not psutil.wait_procs(processes, timeout=seconds)[1]

"""Ranks as processes of this node, under one supervisor: the default executor of one machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from phalanx.executor.hub import HubExecutor, Layout
from phalanx.executor.rank import RankStart
from phalanx.executor.supervisor import Ended, Kill, Launch, Started, decode_from_supervisor, receive, send

_CAUSE_S = 0.5
"""How long to wait for the supervisor to say what a lost rank died of."""


@dataclass
class _Process:
    pid: int = 0
    cause: str | None = None


class SupervisorLauncher:
    """Starts ranks through a supervisor process. `device` decides whether they can be forked."""

    host: str | None = None

    def __init__(self, world_size: int, device: str):
        self._fork = device == "cpu"
        self._plan = core_plan(sorted(os.sched_getaffinity(0)), world_size)
        self._processes: dict[int, _Process] = {}
        self._heard = threading.Condition()
        self._sock: socket.socket | None = None
        self._supervisor: subprocess.Popen[bytes] | None = None

    def launch(self, starts: list[RankStart]) -> None:
        if not starts:
            return
        sock = self._start_supervisor()
        with self._heard:
            for start in starts:
                self._processes[start.rank] = _Process()
        placed = [
            msgspec.structs.replace(start, cores=self._plan[start.rank][0], threads=self._plan[start.rank][1])
            for start in starts
        ]
        send(sock, Launch(placed, self._fork))

    def kill(self, rank: int) -> None:
        if self._sock is None or self.cause(rank) is not None:
            return
        try:
            send(self._sock, Kill(rank))
        except OSError:
            return
        self._wait(rank, 5.0)

    def cause(self, rank: int) -> str | None:
        process = self._processes.get(rank)
        if process is None:
            return None
        if process.pid and process.cause is None and not _alive(process.pid):
            self._wait(rank, _CAUSE_S)
        if process.cause is None and self._supervisor is not None and self._supervisor.poll() is not None:
            return "its supervisor ended"
        return process.cause

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        if self._supervisor is None:
            return
        try:
            self._supervisor.wait(5.0)
        except subprocess.TimeoutExpired:
            self._supervisor.send_signal(signal.SIGKILL)
            self._supervisor.wait()

    def _start_supervisor(self) -> socket.socket:
        if self._sock is not None:
            return self._sock
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "phalanx.executor.supervisor"]
        command += ["--fd", str(theirs.fileno()), "--parent", str(os.getpid())]
        self._supervisor = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self._sock = ours
        threading.Thread(target=self._listen, args=(ours,), name="supervisor", daemon=True).start()
        return ours

    def _listen(self, sock: socket.socket) -> None:
        try:
            while (data := receive(sock)) is not None:
                message = decode_from_supervisor(data)
                with self._heard:
                    process = self._processes.setdefault(message.rank, _Process())
                    match message:
                        case Started(pid=pid):
                            process.pid = pid
                        case Ended(pid=pid, cause=cause) if process.pid == pid:
                            process.cause = cause
                    self._heard.notify_all()
        except OSError:
            return

    def _wait(self, rank: int, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        with self._heard:
            while self._processes[rank].cause is None and time.monotonic() < deadline:
                self._heard.wait(deadline - time.monotonic())


def core_plan(cores: list[int], ranks: int) -> list[tuple[tuple[int, ...], int]]:
    """For each rank the cores it is pinned to, and its number of threads. More ranks than cores are not pinned."""
    if ranks > len(cores):
        return [((), 1)] * ranks
    bounds = [len(cores) * r // ranks for r in range(ranks + 1)]
    shares = [tuple(cores[a:b]) for a, b in pairwise(bounds)]
    return [(share, len(share)) for share in shares]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def multiprocess_executor(layout: Layout, *, device: str) -> HubExecutor:
    return HubExecutor(SupervisorLauncher(layout.mesh.world_size, device), layout)

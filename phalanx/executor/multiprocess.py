"""Ranks as processes of this node, under one supervisor: the default executor of one machine."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec

from phalanx import env
from phalanx.executor.death import describe
from phalanx.executor.hub import HubExecutor
from phalanx.executor.launcher import Layout
from phalanx.executor.messages import RankStart
from phalanx.executor.seating import Choose, Share
from phalanx.executor.supervisor import (
    Awake,
    Ended,
    Kill,
    Launch,
    LetGo,
    Started,
    decode_from_supervisor,
    receive,
    send,
)
from phalanx.worker.capacity import Capacity, measure, of_place
from phalanx.worker.limits import number, usable_cores

log = logging.getLogger(__name__)

_END_S = 5.0
"""Seconds for a killed process to be gone, and for the supervisor to end by itself."""
_START_S = 10.0
"""Seconds for a supervisor that is awake to start a process, which takes it milliseconds."""


def start_supervisor(*, zygote: bool = True) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The process that starts ranks, and the socket to tell it so (`supervisor.send`, `receive`). `zygote` has it
    import what ranks need, so that it can fork them. It ends when the socket is closed, or with this process."""
    ours, theirs = socket.socketpair()
    # -P: the current folder is no place for modules. A process group of its own: Ctrl-C on a terminal reaches this
    # process alone. Standard output is the caller's.
    command = [sys.executable, "-P", "-m", "phalanx.executor.supervisor", "--fd", str(theirs.fileno())]
    command += ["--parent", str(os.getpid())]
    command += ["--zygote"] if zygote else []
    command += ["--thread-stays"] if threading.current_thread() is threading.main_thread() else []
    with theirs:
        process = subprocess.Popen(
            command,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=2,
            process_group=0,
            env=env.for_engine(),
        )
    return process, ours


@dataclass
class _Process:
    pid: int = 0
    cause: str | None = None
    due: float = 0.0
    """When its supervisor must have started it, or hangs."""


class SupervisorProcess:
    """A supervisor and the ranks under it, as seen from who started it. Thread-safe."""

    def __init__(self, *, zygote: bool):
        self._zygote = zygote
        self._ranks: dict[int, _Process] = {}
        self._heard = threading.Condition()
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._listener: threading.Thread | None = None
        self._awake = False

    def start(self) -> None:
        """Start it, unless it runs. It is quick: what it imports, it imports on its own."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._awake = False
        self._process, self._sock = start_supervisor(zygote=self._zygote)
        self._listener = threading.Thread(target=self._listen, args=(self._sock,), name="supervisor", daemon=True)
        self._listener.start()

    def await_awake(self, seconds: float) -> bool:
        """Until it has imported what it needs."""
        with self._heard:
            return self._heard.wait_for(lambda: self._awake, seconds)

    def launch(self, starts: list[RankStart], *, fork: bool | None = None) -> None:
        """Start these ranks, by default forked when the supervisor is a zygote. That one has failed to start is its
        cause of death."""
        self.start()
        with self._heard:
            self._ranks |= {start.rank: _Process(due=time.monotonic() + _START_S) for start in starts}
        self._tell(Launch(starts, self._zygote if fork is None else fork))

    def kill(self, rank: int) -> None:
        """Returns when it is gone."""
        with self._heard:
            process = self._ranks.get(rank)
        if process is not None and process.cause is None:
            self._tell(Kill(rank))
            if self.cause(rank, _END_S) is None:
                if process.pid:
                    with contextlib.suppress(ProcessLookupError):  # not reaped yet, so the number is still its own
                        os.kill(process.pid, signal.SIGKILL)
                elif self._process is not None:  # told to start it and to end it, it has done neither
                    self._process.kill()
                    self.cause(rank, _END_S)

    def cause(self, rank: int, wait: float = 0.0) -> str | None:
        """What it died of; None when it is not known to be dead. Waits up to `wait` seconds to get to know it. A
        supervisor that has not started it in time is ended, with all its ranks."""
        with self._heard:
            process = self._ranks.get(rank)
            if process is None:
                return None
            late = not process.pid and process.cause is None and time.monotonic() > process.due
            if late and self._awake and self._process is not None:
                log.warning("The process that starts ranks does not respond; it is replaced.")
                self._awake = False
                self._process.kill()
            self._heard.wait_for(lambda: process.cause is not None, wait)
            return process.cause

    def pid(self, rank: int) -> int:
        """0 while it is not known."""
        with self._heard:
            process = self._ranks.get(rank)
            return 0 if process is None else process.pid

    def clear(self) -> None:
        """End all ranks, and let go of what they have left; the supervisor stays."""
        with self._heard:
            running = [rank for rank, process in self._ranks.items() if process.cause is None]
        for rank in running:
            self._tell(Kill(rank))
        deadline = time.monotonic() + _END_S
        for rank in running:
            self.cause(rank, max(0.0, deadline - time.monotonic()))
        self.let_go()
        with self._heard:
            self._ranks.clear()

    def let_go(self) -> None:
        """Of the images of their weights that ranks have left: there will be none like them."""
        self._tell(LetGo())

    def close(self) -> None:
        """End it, and its ranks with it. Idempotent; `start` may follow."""
        if self._process is None or self._sock is None or self._listener is None:
            return
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if not self._awake:  # it imports, for seconds, and has no ranks to end
            self._process.kill()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join()
        self._sock.close()
        self._process = self._sock = self._listener = None
        with self._heard:
            self._ranks.clear()

    def _tell(self, message: Launch | Kill | LetGo) -> None:
        """That the supervisor is gone is noticed by the listener."""
        if self._sock is not None:
            try:
                send(self._sock, message)
            except OSError:
                return

    def _listen(self, sock: socket.socket) -> None:
        try:
            while (data := receive(sock)) is not None:
                self._hear(decode_from_supervisor(data))
        except (OSError, msgspec.DecodeError):
            pass
        with self._heard:
            for process in self._ranks.values():
                process.cause = process.cause or self._own_end()
            self._heard.notify_all()

    def _hear(self, message: Started | Ended | Awake) -> None:
        with self._heard:
            if isinstance(message, Awake):
                self._awake = True
                for process in self._ranks.values():
                    process.due = time.monotonic() + _START_S
                self._heard.notify_all()
                return
            process = self._ranks.setdefault(message.rank, _Process())
            if isinstance(message, Started):
                process.pid = message.pid
            elif message.pid in (0, process.pid):
                process.cause = message.cause
            self._heard.notify_all()

    def _own_end(self) -> str:
        """The supervisor's, in words. Its ranks have ended with it."""
        process = self._process
        try:
            code = process.wait(1.0) if process is not None else 0
        except subprocess.TimeoutExpired:
            return "its supervisor does not respond"
        words = describe(-code if code < 0 else code << 8)
        return f"it ended with its supervisor: {words}"


class SupervisorLauncher:
    """Starts the ranks of one node, which are numbered from 0; `hub.Launcher`."""

    host: str | None = None

    def __init__(
        self, world_size: int, device: str, *, supervisor: SupervisorProcess | None = None, keep: bool = False,
        measured: Sequence[Capacity] = (),
    ):  # fmt: skip
        """`device` decides whether ranks can be forked. A `supervisor` that is given is used by nobody else in the
        meantime; with `keep` it stays when this is closed. `measured` is what this node has, where that matters."""
        self._measured = measured
        self._fork = device == "cpu"
        self._supervisor = supervisor or SupervisorProcess(zygote=self._fork)
        self._keep = keep
        self._world_size = world_size
        self.assign(range(world_size))

    def launch(self, starts: list[RankStart]) -> None:
        self._supervisor.launch([self._placed(start) for start in starts], fork=self._fork)

    def _placed(self, start: RankStart) -> RankStart:
        cores, threads = self._plan[start.rank]
        return msgspec.structs.replace(start, cores=cores, threads=threads, device_index=self._seats[start.rank])

    def available(self) -> set[int]:
        """As in `hub.Launcher`. Whether a process can live in a seat, such as a GPU, only trying tells."""
        return set(range(self._world_size))

    def arriving(self) -> set[int]:
        return set()

    def assign(self, seats: Sequence[int]) -> None:
        self._seats = tuple(seats)
        self._plan = place_ranks(max(1, len(self._seats)))

    def node(self, seat: int) -> str:
        return platform.node()

    def capacity(self, seat: int) -> Capacity | None:
        """As in `hub.Launcher`."""
        return of_place(self._measured, seat)

    def kill(self, rank: int) -> None:
        self._supervisor.kill(rank)

    def cause(self, rank: int, wait: float = 0.0) -> str | None:
        return self._supervisor.cause(rank, wait)

    def close(self) -> None:
        if self._keep:
            self._supervisor.clear()
        else:
            self._supervisor.close()


def place_ranks(ranks: int, topology: Path = Path("/sys/devices/system/cpu")) -> list[tuple[tuple[int, ...], int]]:
    """Cores and threads of each rank on this machine, as `core_plan` shares them; logical cores that are one physical
    core stay together. Where a control group's quota allows less than the cores there are, nothing is pinned: others
    under such a quota would pin themselves to the same ones."""
    allowed = usable_cores()

    def place(core: int) -> tuple[int, int, int]:
        folder = topology / f"cpu{core}/topology"
        return number(folder / "physical_package_id") or 0, number(folder / "core_id") or 0, core

    cores = sorted(os.sched_getaffinity(0), key=place)
    if allowed < len(cores):
        return [((), max(1, allowed // ranks))] * ranks
    return core_plan(cores, ranks)


def core_plan(cores: Sequence[int], ranks: int) -> list[tuple[tuple[int, ...], int]]:
    """For each rank the cores it is pinned to, and its number of threads. More ranks than cores are not pinned."""
    if ranks > len(cores):
        return [((), 1)] * ranks
    bounds = [len(cores) * r // ranks for r in range(ranks + 1)]
    shares = [tuple(cores[a:b]) for a, b in pairwise(bounds)]
    return [(share, len(share)) for share in shares]


def multiprocess_executor(
    layout: Layout, *, device: str, supervisor: SupervisorProcess | None = None, choose: Choose | None = None,
    share: Share | None = None,
) -> HubExecutor:  # fmt: skip
    """A `supervisor` that was started early ends with the executor. Where shares are open, which they are only for one
    of several replicas, this node is measured."""
    measured = () if share is None else measure(device)
    launcher = SupervisorLauncher(layout.mesh.world_size, device, supervisor=supervisor, measured=measured)
    return HubExecutor(launcher, layout, choose=choose, share=share)

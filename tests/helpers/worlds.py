"""Servers to do harm to, by executor and layout, with everything that lets a fault off in them.

A world is one server and what it stands on: this machine (`mp`), a Ray cluster of raylets (`ray`), or hosts of a
test bed (`nodes`). Faults from inside wait in it for a file (`PHALANX_FAULT`).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.helpers import hosts
from tests.helpers.asks import Oracle
from tests.helpers.cases import LAYOUTS
from tests.helpers.pace import STEP_S, Pace
from tests.helpers.processes import alive, wait_until
from tests.helpers.serving import SERVE, Serving

RANK_POINTS = ("load", "step", "computed")
ENGINE_POINTS = ("before_commit", "after_commit", "after_send", "recover")
LOADING_S = 5.0
DEEDS = ("kill", "stop", "abort", "segfault", "exit", "hold", "raise")
OPTIONS = (
    "--dtype", "float32", "--kv-cache-memory-bytes", "8M", "--hang-timeout", "1", "--replacement-timeout", "2",
    "--recovery-timeout", "60", "--shutdown-timeout", "40",
)  # fmt: skip


class World:
    """`options` are more flags of `phalanx serve`. While its `pace` is held, each step of the engine takes `step_s`."""

    def __init__(self, executor: str, layout: str, model: str, *options: str, step_s: float = STEP_S):
        self.executor, self.layout = executor, layout
        self.size, flags = LAYOUTS[layout]
        self.arguments = [model, *flags, *OPTIONS, *options]
        self._things = contextlib.ExitStack()
        self.folder = Path(tempfile.mkdtemp(prefix="phxw-", dir="/tmp"))
        self._things.callback(shutil.rmtree, self.folder, ignore_errors=True)
        (self.folder / "faults").mkdir()
        self.pace = Pace(self.folder, step_s)
        self.serving: Serving | None = None
        self.oracle: Oracle | None = None
        self.hosts: list[hosts.Host] = []
        self.nodes: list[subprocess.Popen[bytes]] = []
        self.cluster: Any = None
        try:
            {"mp": self._mp, "ray": self._ray, "nodes": self._nodes}[executor]()
        except BaseException:
            self._things.close()
            raise

    def _mp(self) -> None:
        if os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], check=False).returncode == 0:
            script = 'mount -t tmpfs -o size=16m,mode=1777 tmpfs /dev/shm; exec "$@"'
            prefix = ["unshare", "-m", "sh", "-ec", script, "sh"]
        else:
            prefix = []
        self._start = lambda command, **rest: subprocess.Popen([*prefix, *command], **rest)
        self._network: Any = contextlib.nullcontext
        self._env: dict[str, str] = {}

    def _ray(self) -> None:
        from tests.helpers.ray_cluster import ray_cluster

        share = {"num_cpus": (self.size + 1) // 2}
        self.cluster = self._things.enter_context(ray_cluster(a=share, b=share, c=share))
        self.cluster.ray.shutdown()  # this process only starts and kills nodes, and need not hear of their ends
        self.arguments += ["--distributed-executor-backend", "ray", "--placement-strategy", "SPREAD"]
        self._start = subprocess.Popen
        self._network = contextlib.nullcontext
        self._env = {**self.cluster.settings, "RAY_ADDRESS": self.cluster.address}

    def _nodes(self) -> None:
        count = 3 if self.layout == "tp3" else 2
        self.hosts = self._things.enter_context(hosts.test_bed(count))
        self.arguments += ["--nnodes", str(count), "--master-addr", self.hosts[0].address]
        self._start = self.hosts[0].start  # type: ignore[assignment]
        self._network = self.hosts[0].network
        self._env = {"PHALANX_TRANSPORT_KEY": ""}

    # The server

    def open(self, *, ask: bool = True) -> Serving:
        """A server that serves, the one before or a new one; with `ask` the oracle is there too."""
        if self.serving is None:
            self.start()
            assert self.serving is not None
            self.serving.ready()
        if ask and self.oracle is None:
            self.oracle = Oracle(self.serving)
        return self.serving

    def start(self, port: int | None = None) -> Serving:
        """Returns before it is ready."""
        log = self.folder / f"{time.monotonic_ns()}.log"
        env = {**self._env, "PHALANX_FAULT": f"{self._faults()};{self.pace.fault}"}
        self.serving = Serving(
            self.arguments, log, env=env, start=self._start, network=self._network, port=port,
            elsewhere=self._below_raylets,
        )  # fmt: skip
        for rank in range(1, len(self.hosts)):
            self.start_node(rank)
        return self.serving

    def start_node(self, rank: int) -> None:
        """Another host's part."""
        env = {"OMP_NUM_THREADS": "1", **self._env, "PHALANX_FAULT": self._faults()}
        with (self.folder / f"node{rank}.log").open("ab") as output:
            command = [*SERVE, *self.arguments, "--node-rank", str(rank), "--headless"]
            self.nodes.append(self.hosts[rank].start(command, env=env, stdout=output, stderr=output))

    def _faults(self) -> str:
        faults = [f"at={at},rank={rank}" for at in RANK_POINTS for rank in range(self.size)]
        faults += [f"at={at}" for at in ENGINE_POINTS]
        armed = [f"{fault},do={do},file={self._file(fault, do)}" for fault in faults for do in DEEDS]
        return ";".join([*armed, f"at=load,do=sleep={LOADING_S},while={self.folder / 'long'}"])

    def _file(self, fault: str, do: str) -> Path:
        return self.folder / "faults" / f"{fault.replace('at=', '').replace(',rank=', '-')}-{do}"

    def arm(self, at: str, rank: int | None, do: str) -> None:
        """At the next `at` of this rank, or of the engine."""
        self._file(f"at={at}" if rank is None else f"at={at},rank={rank}", do).touch()

    def armed(self) -> list[str]:
        """Faults that wait still."""
        return sorted(os.listdir(self.folder / "faults"))

    @contextlib.contextmanager
    def long_loads(self) -> Iterator[None]:
        """Ranks that come to load in here take `LOADING_S` more."""
        (self.folder / "long").touch()
        try:
            yield
        finally:
            (self.folder / "long").unlink()

    def disarm(self) -> None:
        for name in self.armed():
            (self.folder / "faults" / name).unlink(missing_ok=True)

    # Its parts

    def pid(self, target: str) -> int:
        """Of a front end, an engine, a rank; of the actor or the raylet that rank 1 has."""
        assert self.serving is not None
        if target == "front":
            return self.serving.process.pid
        if target == "engine":
            return self.serving.engine()
        if target in ("actor", "raylet"):
            return self._above(self.pid("rank1"), target)
        serving, rank = self.serving, int(target.removeprefix("rank"))
        there = wait_until(lambda: rank in serving.ranks(), 15)  # a place may just be taken in again
        assert there, f"there is no {target}: {serving.status()}"
        return serving.ranks()[rank]

    def _above(self, pid: int, target: str) -> int:
        wanted = {"actor": "RankActor", "raylet": "raylet"}[target]
        for process in psutil.Process(pid).parents():
            if wanted in process.name() or (target == "actor" and wanted in " ".join(process.cmdline())):
                return process.pid
        raise AssertionError(f"rank 1 has no {target}: {[p.name() for p in psutil.Process(pid).parents()]}")

    def forget(self) -> None:
        """End the server at once; the next one is new."""
        if self.serving is not None:
            with contextlib.suppress(OSError, AssertionError, psutil.Error):
                self.serving.kill()
        self.serving = None
        self.disarm()
        self.pace.release()
        for host in self.hosts:
            host.heal()
            host.signal_all(signal.SIGCONT)
            host.kill()
        for node in self.nodes:
            node.wait()
        self.nodes.clear()
        if self.cluster is not None:
            self._mend_cluster()

    def _below_raylets(self) -> Iterator[psutil.Process]:
        for node in list(self.cluster.nodes.values()) if self.cluster is not None else ():
            for info in node.all_processes["raylet"]:
                with contextlib.suppress(psutil.Error):
                    yield from psutil.Process(info.process.pid).children(recursive=True)

    def reap(self, pid: int) -> None:
        """A raylet that was killed: as long as nobody has waited for it, its actors take it for alive."""
        for node in self.cluster.nodes.values():
            for info in node.all_processes["raylet"]:
                if info.process.pid == pid:
                    info.process.wait(10)

    def _mend_cluster(self) -> None:
        """Raylets that are gone are replaced."""
        for name, node in list(self.cluster.nodes.items()):
            if any(info.process.poll() is not None for info in node.all_processes["raylet"]):
                self.cluster.kill(name)
                self.cluster.add(name, num_cpus=(self.size + 1) // 2)

    def close(self) -> None:
        self.forget()
        self._things.close()


@contextlib.contextmanager
def world(executor: str, layout: str, model: str, *options: str) -> Iterator[World]:
    made = World(executor, layout, model, *options)
    try:
        yield made
    finally:
        made.close()


def missing(executor: str) -> str:
    """Why there is no such world here; empty when there is."""
    if executor == "nodes":
        return hosts.missing()
    if executor == "ray":
        import importlib.util

        return "" if importlib.util.find_spec("ray") else "Ray is not installed"
    return ""


class Groups:
    """Control groups that processes are put into; those of the first version."""

    ROOT = Path("/sys/fs/cgroup")

    def __init__(self) -> None:
        self._made: list[Path] = []

    def make(self, kind: str) -> Path:
        """Raises OSError where that cannot be."""
        folder = self.ROOT / kind / f"phalanx-nemesis-{os.getpid()}-{time.monotonic_ns()}"
        folder.mkdir()
        self._made.append(folder)
        return folder

    def freeze(self, pids: list[int]) -> Path:
        folder = self.make("freezer")
        for pid in pids:
            (folder / "cgroup.procs").write_text(str(pid))
        (folder / "freezer.state").write_text("FROZEN")
        return folder

    def starve(self, pid: int, limit: int) -> Path:
        """No page more than `limit` bytes, for a rank. It stands still until its supervisor has seen its new group, or
        nobody could tell what it died of: that looks when it wakes, every half a second, or later on a busy machine."""
        folder = self.make("memory")
        os.kill(pid, signal.SIGSTOP)
        (folder / "cgroup.procs").write_text(str(pid))
        with contextlib.suppress(psutil.NoSuchProcess):  # a first loss may take them along
            supervisor = psutil.Process(psutil.Process(pid).ppid())
            naps = 1 if supervisor.status() == psutil.STATUS_SLEEPING else 2
            naps += supervisor.num_ctx_switches().voluntary
            assert wait_until(lambda: supervisor.num_ctx_switches().voluntary >= naps, 60)
        (folder / "memory.limit_in_bytes").write_text(str(limit))
        os.kill(pid, signal.SIGCONT)
        return folder

    @property
    def killed(self) -> int:
        """How many processes the kernel has ended for want of memory; pages of files may be enough to take back."""
        states = [folder / "memory.oom_control" for folder in self._made]
        counts = [re.search(r"^oom_kill (\d+)", state.read_text(), re.M) for state in states if state.exists()]
        return sum(int(count[1]) for count in counts if count)

    def close(self) -> None:
        """Everybody goes on, in the group above."""
        for folder in self._made:
            with contextlib.suppress(OSError):
                if (folder / "freezer.state").exists():
                    (folder / "freezer.state").write_text("THAWED")
                for pid in (folder / "cgroup.procs").read_text().split():
                    with contextlib.suppress(OSError):
                        (folder.parent / "cgroup.procs").write_text(pid)

            def removed(folder: Path = folder) -> bool:
                with contextlib.suppress(OSError):
                    folder.rmdir()
                return not folder.exists()

            wait_until(removed, 2)
        self._made.clear()


def freezer_missing() -> str:
    return "" if os.access(Groups.ROOT / "freezer", os.W_OK) else "no control group for freezing can be made here"


def memory_missing() -> str:
    return "" if os.access(Groups.ROOT / "memory", os.W_OK) else "no control group for memory can be made here"


def gone(pids: list[int], seconds: float = 5.0) -> bool:
    return wait_until(lambda: not any(map(alive, pids)), seconds)

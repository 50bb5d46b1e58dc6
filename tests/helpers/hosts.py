"""Several "hosts" on one machine: network namespaces joined by a switch, each with its own name and `/dev/shm`.

    with test_bed(2) as (a, b):
        server = a.start(["phalanx", "serve", …])
        with a.network():           # sockets made on this thread now belong to host a
            httpx.get("http://10.77.0.10:8000/health")
        b.cut()                     # b's network falls silent: no end of stream, no refusal

Hosts share the machine's files, processes and cores, unless a process is started with `hide` (files it shall not see),
`memory_mb` or `cpus` (control groups) or `cores`. There is no way out of the bed. Needs root, iproute2 and util-linux;
`missing()` says what is not there.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

CLONE_NEWNET = 0x40000000
GROUPS = Path("/sys/fs/cgroup")
NAMESPACES = Path("/run/netns")
PREFIX = "phxbed"

_count = itertools.count()
_libc = ctypes.CDLL(None, use_errno=True)


@cache
def missing() -> str:
    """Why there can be no test bed here; empty when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "nsenter", "unshare"):
        if shutil.which(program) is None:
            return f"{program} is not installed (apt-get install iproute2 util-linux)"
    try:
        with test_bed(1) as (host,):
            host.start(["true"]).wait(10)
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        return f"network namespaces cannot be made here: {detail}"
    return ""


def ip(*arguments: str) -> None:
    """Raises CalledProcessError."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def _mac(index: int) -> str:
    return f"02:00:0a:4d:00:{10 + index:02x}"


@dataclass
class Host:
    name: str
    index: int
    namespace: str
    switch: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    groups: list[Path] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"10.77.0.{10 + self.index}"

    @property
    def address6(self) -> str:
        return f"fd77::{10 + self.index:x}"

    def start(
        self,
        command: Sequence[str],
        *,
        hide: Sequence[Path] = (),
        hosts_file: str = "",
        shm_mb: int = 64,
        memory_mb: int | None = None,
        cpus: float | None = None,
        cores: Sequence[int] = (),
        env: dict[str, str] | None = None,
        **options: object,
    ) -> subprocess.Popen[bytes]:
        """Run a command here. The process returned is the command itself: its signals and exit code are its own.

        `hosts_file` replaces /etc/hosts, `hide` makes folders empty; `memory_mb` and `cpus` (cores' worth of
        time) limit it and its descendants.
        """
        script = f"echo {self.name} > /proc/sys/kernel/hostname; "
        script += f"mount -t tmpfs -o size={shm_mb}m,mode=1777 tmpfs /dev/shm; "
        for folder in hide:
            script += f"mount -t tmpfs tmpfs {folder}; "
        if hosts_file:
            script += f"printf '{hosts_file}' > /dev/shm/hosts; mount --bind /dev/shm/hosts /etc/hosts; "
        groups = _limited(f"{self.namespace}-{next(_count)}", memory_mb, cpus)
        self.groups += groups
        for group in dict.fromkeys(groups):  # it is the root of what they see, as in a container
            script += f"mount --bind {group} {group.parent}; "
        enter = ["nsenter", f"--net={NAMESPACES / self.namespace}", "unshare", "--mount", "--uts"]
        wrapped = [*enter, "sh", "-ec", script + 'exec "$@"', "sh", *command]
        for group in groups:
            wrapped = ["sh", "-ec", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh", *wrapped]
        if cores:
            wrapped = ["taskset", "-c", ",".join(map(str, cores)), *wrapped]
        process = subprocess.Popen(wrapped, env={**os.environ, **(env or {})}, **options)  # type: ignore[call-overload]
        self.processes.append(process)
        return process

    def network(self) -> contextlib.AbstractContextManager[None]:
        """Sockets that this thread makes inside belong to this host; so do threads started inside."""
        return inside(self.namespace)

    def pids(self) -> list[int]:
        """Everything that runs here."""
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True)
        return [int(pid) for pid in listed.stdout.split()]

    def listening(self) -> list[tuple[str, int]]:
        """(address, port) of every listening TCP socket."""
        shown = subprocess.run(
            ["ip", "netns", "exec", self.namespace, "ss", "-Hltn"], capture_output=True, text=True, check=True
        )
        found = [line.split()[3].rpartition(":") for line in shown.stdout.splitlines()]
        return [(address.strip("[]"), int(port)) for address, _, port in found]

    def add_dead_end(self, name: str, address: str, *, up: bool = True) -> None:
        """An interface that leads nowhere, such as a container bridge or a port without a cable."""
        ip("-n", self.namespace, "link", "add", name, "type", "bridge")
        ip("-n", self.namespace, "addr", "add", address, "dev", name)
        if up:
            ip("-n", self.namespace, "link", "set", name, "up")

    def cut(self) -> None:
        """Silence: nothing that is sent arrives, and nobody is told."""
        ip("-n", self.switch, "link", "set", self.name, "nomaster")

    def heal(self) -> None:
        ip("-n", self.switch, "link", "set", self.name, "master", "br0")

    def cut_from(self, other: Host) -> None:
        """Silence between these two; others reach both."""
        self._neighbour(other, "02:00:0a:4d:ff:ff")
        other._neighbour(self, "02:00:0a:4d:ff:ff")

    def heal_to(self, other: Host) -> None:
        self._neighbour(other, _mac(other.index))
        other._neighbour(self, _mac(self.index))

    def _neighbour(self, other: Host, mac: str) -> None:
        for address in (other.address, other.address6):
            ip("-n", self.namespace, "neigh", "replace", address, "lladdr", mac, "dev", "eth0", "nud", "permanent")

    def signal_all(self, number: signal.Signals) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """Everything at once; the kernel closes the connections."""
        deadline = time.monotonic() + 10
        while self.pids() and time.monotonic() < deadline:
            self.signal_all(signal.SIGKILL)
            time.sleep(0.01)

    def close(self) -> None:
        self.kill()
        for process in self.processes:
            process.kill()
            process.wait()
        for group in self.groups:
            with contextlib.suppress(OSError):
                group.rmdir()
        ip("netns", "del", self.namespace)


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """This thread's network is another one inside."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(NAMESPACES / namespace, os.O_RDONLY)
    try:
        _enter(there)
        yield
    finally:
        _enter(before)
        os.close(there)
        os.close(before)


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns failed")


def can_limit(controller: str) -> bool:
    """Whether a host's `memory` or `cpu` can be limited here."""
    return os.access(GROUPS / controller / "cgroup.procs", os.W_OK) or os.access(
        GROUPS / "cgroup.subtree_control", os.W_OK
    )


def _limited(name: str, memory_mb: int | None, cpus: float | None) -> list[Path]:
    """Control groups with these limits."""
    limits: dict[str, dict[str, str]] = {}
    if memory_mb is not None:
        size = str(memory_mb << 20)
        limits["memory"] = {"memory.limit_in_bytes": size, "memory.max": size}
    if cpus is not None:
        quota = str(int(cpus * 100_000))
        limits["cpu"] = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": quota, "cpu.max": f"{quota} 100000"}
    groups = []
    for controller, files in limits.items():
        group = (GROUPS / controller if (GROUPS / controller).is_dir() else GROUPS) / name
        group.mkdir(exist_ok=True)
        groups.append(group)
        for file, value in files.items():  # of version 1 or of version 2
            if (group / file).exists():
                (group / file).write_text(value)
    return groups


@contextlib.contextmanager
def test_bed(count: int) -> Iterator[list[Host]]:
    """`count` hosts, 10.77.0.10 and on (fd77::a and on), that reach each other and nobody else."""
    _sweep()
    bed = f"{PREFIX}{os.getpid()}x{next(_count)}"
    switch = f"{bed}s"
    hosts: list[Host] = []
    ip("netns", "add", switch)
    try:
        ip("-n", switch, "link", "add", "br0", "up", "type", "bridge")
        for index in range(count):
            host = Host(f"host{index}", index, f"{bed}h{index}", switch)
            ip("netns", "add", host.namespace)
            hosts.append(host)
            _plug(host, count)
        yield hosts
    finally:
        for host in hosts:
            host.close()
        ip("netns", "del", switch)


test_bed.__test__ = False  # type: ignore[attr-defined]


def _plug(host: Host, count: int) -> None:
    ns, switch = host.namespace, host.switch
    ip("-n", switch, "link", "add", host.name, "type", "veth", "peer", "name", "eth0", "netns", ns)
    ip("-n", switch, "link", "set", host.name, "master", "br0", "up")
    ip("-n", ns, "link", "set", "lo", "up")
    ip("-n", ns, "link", "set", "eth0", "address", _mac(host.index), "up")
    ip("-n", ns, "addr", "add", f"{host.address}/24", "dev", "eth0")
    ip("-n", ns, "addr", "add", f"{host.address6}/64", "dev", "eth0", "nodad")
    for other in range(count):
        if other != host.index:
            # Fixed neighbours: a host that is cut off is a black hole then, as one behind a router is.
            for address in (f"10.77.0.{10 + other}", f"fd77::{10 + other:x}"):
                ip("-n", ns, "neigh", "add", address, "lladdr", _mac(other), "dev", "eth0", "nud", "permanent")


def _sweep() -> None:
    """Remove what a test process that was killed has left."""
    for path in NAMESPACES.glob(f"{PREFIX}*"):
        owner = path.name.removeprefix(PREFIX).partition("x")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            subprocess.run(["ip", "netns", "del", path.name], check=False, capture_output=True)

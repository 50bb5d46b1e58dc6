"""The process that starts a node's ranks: it has imported what they need, started no thread, and forks them.

Run as `python -m phalanx.executor.supervisor --fd N` by the multiprocess launcher, with which it speaks over an
inherited socket, or with `--join` on another node (`phalanx serve --headless`). A fork costs milliseconds where
importing torch costs seconds and 200 MB. Ranks on devices that forbid forking are spawned instead. The supervisor
ends with its executor, and its ranks with it (parent-death signal), so nothing is left behind.

Forks happen on the main thread only: the parent-death signal is tied to the thread that forked.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

import msgspec

from phalanx.executor.rank import RankStart

_PR_SET_PDEATHSIG = 1


class Launch(msgspec.Struct, frozen=True, tag="launch"):
    starts: list[RankStart]
    fork: bool


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    rank: int


class Started(msgspec.Struct, frozen=True, tag="started"):
    rank: int
    pid: int


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    rank: int
    pid: int
    cause: str


ToSupervisor = Launch | Kill
FromSupervisor = Started | Ended

_to = msgspec.msgpack.Decoder(ToSupervisor)
_from = msgspec.msgpack.Decoder(FromSupervisor)
_LENGTH = struct.Struct("<I")


def send(sock: socket.socket, message: ToSupervisor | FromSupervisor) -> None:
    """One frame over a blocking socket."""
    data = msgspec.msgpack.encode(message)
    sock.sendall(_LENGTH.pack(len(data)) + data)


def receive(sock: socket.socket) -> bytes | None:
    """One frame's content; None at the end of the stream."""
    header = _exactly(sock, _LENGTH.size)
    return None if header is None else _exactly(sock, _LENGTH.unpack(header)[0])


def _exactly(sock: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


def decode_from_supervisor(data: bytes) -> FromSupervisor:
    """Raises msgspec.DecodeError or msgspec.ValidationError."""
    return _from.decode(data)


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends; for the case that it already has, look once."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


class Supervisor:
    def __init__(self, sock: socket.socket):
        self._sock = sock
        self._ranks: dict[int, tuple[int, int]] = {}
        """pidfd -> (rank, pid)."""
        self._oom_kills = _oom_kills()

    def run(self) -> None:
        """Until the executor is gone; then every rank is killed and reaped."""
        try:
            while True:
                poll = select.poll()
                poll.register(self._sock, select.POLLIN)
                for pidfd in self._ranks:
                    poll.register(pidfd, select.POLLIN)
                for fd, _ in poll.poll():
                    if fd == self._sock.fileno():
                        data = receive(self._sock)
                        if data is None:
                            return
                        self._obey(_to.decode(data))
                    elif fd in self._ranks:
                        self._reap(fd)
        except (OSError, msgspec.DecodeError):
            return
        finally:
            self._kill_all()

    def _obey(self, message: ToSupervisor) -> None:
        match message:
            case Launch(starts=starts, fork=fork):
                for start in starts:
                    pid = self._fork(start) if fork else _spawn(start)
                    self._ranks[os.pidfd_open(pid)] = (start.rank, pid)
                    send(self._sock, Started(start.rank, pid))
            case Kill(rank=rank):
                for other, pid in self._ranks.values():
                    if other == rank:
                        os.kill(pid, signal.SIGKILL)

    def _fork(self, start: RankStart) -> int:
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            die_with_parent(parent)
            self._sock.close()
            for pidfd in self._ranks:
                os.close(pidfd)
            code = live(start)
        finally:
            os._exit(code)

    def _reap(self, pidfd: int) -> None:
        rank, pid = self._ranks.pop(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        before, self._oom_kills = self._oom_kills, _oom_kills()
        send(self._sock, Ended(rank, pid, describe(status, out_of_memory=self._oom_kills > before)))

    def _kill_all(self) -> None:
        for _, pid in self._ranks.values():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for _, pid in self._ranks.values():
            try:
                os.waitpid(pid, 0)
            except ChildProcessError:
                continue


def live(start: RankStart) -> int:
    """A rank's whole life in this process; its exit code."""
    from phalanx.distributed.transports.abort import GroupBroken
    from phalanx.executor.rank import run_rank

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        run_rank(start)
    except GroupBroken as error:
        print(f"phalanx rank {start.rank}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def _spawn(start: RankStart) -> int:
    """A fresh process, for devices whose drivers do not survive a fork."""
    command = [sys.executable, "-m", "phalanx.executor.supervisor", "--rank"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE)
    if child.stdin is not None:
        child.stdin.write(msgspec.json.encode(start) + b"\n")
        child.stdin.close()
    return child.pid


def describe(status: int, *, out_of_memory: bool) -> str:
    """A wait status in words."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name if number in signal.valid_signals() else str(number)
        if name == "SIGKILL" and out_of_memory:
            return "killed by SIGKILL: out of memory, the kernel ended it at a memory limit"
        return f"killed by {name}"
    return f"exited with status {os.waitstatus_to_exitcode(status)}"


def _oom_kills() -> int:
    """Processes that the kernel has ended for want of memory, machine-wide since its boot."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    except (OSError, ValueError):
        pass
    return 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int)
    parser.add_argument("--parent", type=int)
    parser.add_argument("--rank", action="store_true")
    arguments = parser.parse_args()
    if arguments.rank:
        return live(msgspec.convert(json.loads(sys.stdin.readline()), RankStart, strict=False))
    die_with_parent(arguments.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What every rank will need, imported once: forked ranks share these pages. None of it starts a thread.
    import phalanx.worker.worker  # noqa: F401

    Supervisor(socket.socket(fileno=arguments.fd)).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())

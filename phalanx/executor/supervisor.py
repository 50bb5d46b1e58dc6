"""The process that starts a node's ranks: it has imported what they need, started no thread, and forks them.

Run as `python -m phalanx.executor.supervisor --fd N --parent PID` by `multiprocess.start_supervisor`, and spoken to
over an inherited socket. A fork costs milliseconds where importing torch costs seconds and 200 MB. Ranks on
devices whose drivers do not survive a fork are spawned instead. The supervisor ends with the process that started it,
and its ranks with it (parent-death signal), so nothing is left behind.

Forks happen on the main thread only: the parent-death signal is tied to the thread that forked.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

import msgspec

from phalanx import env
from phalanx.errors import PhalanxError
from phalanx.executor.death import MemoryKills, describe
from phalanx.executor.kept_image import KeptImage, Line, socket_pair
from phalanx.executor.messages import RankStart
from phalanx.lossy_output import never_wait

_PR_SET_PDEATHSIG = 1

_LOOK_MS = 500


class Launch(msgspec.Struct, frozen=True, tag="launch"):
    starts: list[RankStart]
    fork: bool


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    rank: int


class LetGo(msgspec.Struct, frozen=True, tag="let_go"):
    """Of what ranks have left: there will be none like them."""


class Started(msgspec.Struct, frozen=True, tag="started"):
    rank: int
    pid: int


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    rank: int
    pid: int
    """0 when it could not even be started."""
    cause: str


class Awake(msgspec.Struct, frozen=True, tag="awake"):
    """All is imported; from now on ranks start at once."""


ToSupervisor = Launch | Kill | LetGo
FromSupervisor = Started | Ended | Awake

_to = msgspec.msgpack.Decoder(ToSupervisor)
_from = msgspec.msgpack.Decoder(FromSupervisor)
_LENGTH = struct.Struct("<I")


def send(sock: socket.socket, message: ToSupervisor | FromSupervisor) -> None:
    """One frame over a blocking socket. Raises OSError when the other side is gone."""
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
    """Ask the kernel to kill this process when the thread that started it ends; for the case that its process already
    has, look once."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


@dataclass(frozen=True)
class _Child:
    start: RankStart
    pid: int
    words: socket.socket
    """By which it leaves the image of its weights, and says why it ends, when it can."""

    @property
    def rank(self) -> int:
        return self.start.rank


class Supervisor:
    """Obeys who holds the other end of `sock`, until that is closed or process `parent` has ended."""

    def __init__(self, sock: socket.socket, parent: int):
        self._sock = sock
        self._parent = os.pidfd_open(parent)
        self._ranks: dict[int, _Child] = {}
        """By pidfd."""
        self._images: dict[int, KeptImage] = {}
        """By rank."""
        self._memory_kills = MemoryKills()
        self._looked = 0.0

    def run(self) -> None:
        """At its end every rank is killed and reaped."""
        try:
            send(self._sock, Awake())
            while True:
                poll = select.poll()
                for fd in (self._sock.fileno(), self._parent, *self._ranks):
                    poll.register(fd, select.POLLIN)
                for fd, _ in poll.poll(_LOOK_MS if self._ranks else None):
                    if fd == self._parent:
                        return
                    if fd in self._ranks:
                        self._reap(fd)
                    elif (data := receive(self._sock)) is not None:
                        self._obey(_to.decode(data))
                    else:
                        return
                self._look()
        except (OSError, msgspec.DecodeError):
            return
        finally:
            self._kill_all()

    def _look(self) -> None:
        """At how much memory has killed, once in a while."""
        if self._ranks and time.monotonic() - self._looked > _LOOK_MS / 1000:
            self._looked = time.monotonic()
            self._memory_kills.look(child.pid for child in self._ranks.values())

    def _obey(self, message: ToSupervisor) -> None:
        match message:
            case Launch(starts=starts, fork=fork):
                self._let_go(keep={start.share for start in starts})
                for start in starts:
                    self._launch(start, fork)
            case Kill(rank=rank):
                for child in self._ranks.values():
                    if child.rank == rank:
                        os.kill(child.pid, signal.SIGKILL)
            case LetGo():
                self._let_go()

    def _launch(self, start: RankStart, fork: bool) -> None:
        words, pen = socket_pair()
        try:
            pid = self._fork(start, words, pen) if fork else _spawn(start, pen)
        except OSError as error:
            words.close()
            send(self._sock, Ended(start.rank, 0, f"it could not be started ({error.strerror or error})"))
            return
        finally:
            pen.close()
        self._ranks[os.pidfd_open(pid)] = _Child(start, pid, words)
        self._memory_kills.look(child.pid for child in self._ranks.values())
        send(self._sock, Started(start.rank, pid))

    def _fork(self, start: RankStart, words: socket.socket, pen: socket.socket) -> int:
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
            left = self._images.pop(start.rank, None)
            self._let_go()
            words.close()
            for pidfd, child in self._ranks.items():
                os.close(pidfd)
                child.words.close()
            os.close(self._parent)
            code = live(start, pen, None if left is None else left.fd)
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _reap(self, pidfd: int) -> None:
        child = self._ranks.pop(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(child.pid, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL  # as the kernel does
        blame = self._memory_kills.blame(child.pid) if killed else None
        said = self._images.setdefault(child.rank, KeptImage()).take(child.words, child.start.share)
        send(self._sock, Ended(child.rank, child.pid, describe(status, blame or said or None)))

    def _let_go(self, keep: Container[str] = ()) -> None:
        """Of the images of all other shares."""
        for image in self._images.values():
            if image.share not in keep:
                image.let_go()

    def _kill_all(self) -> None:
        for child in self._ranks.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
        for child in self._ranks.values():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, 0)


def live(start: RankStart, words: socket.socket, left: int | None = None) -> int:
    """A rank's whole life in this process; its exit code. Why it failed, if it could not tell its executor, goes to
    `words`, and the image of its weights. `left` is the one that the rank before it has left."""
    from phalanx.executor.rank import run_rank

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(OSError):  # for `ps` and `top`
        Path("/proc/self/comm").write_text(f"phalanx-rank-{start.rank}"[:15])
    line = Line(start.share, left, words)
    try:
        run_rank(start, line)
    except Exception as error:
        if env.debug():
            traceback.print_exc()
        text = str(error) if isinstance(error, PhalanxError) else f"{type(error).__name__}: {error}"
        line.say(" ".join(text.split()).rstrip("."))
        return 1
    return 0


def _spawn(start: RankStart, words: socket.socket) -> int:
    """A fresh process, for devices whose drivers do not survive a fork."""
    command = [sys.executable, "-P", "-m", "phalanx.executor.supervisor", "--rank", str(words.fileno())]
    command += ["--parent", str(os.getpid())]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, pass_fds=(words.fileno(),))
    if child.stdin is not None:
        with contextlib.suppress(BrokenPipeError), child.stdin:
            child.stdin.write(msgspec.json.encode(start))
    child.returncode = 0  # it is reaped by its pid
    return child.pid


def main() -> int:
    parser = argparse.ArgumentParser(description="Starts the ranks of a Phalanx engine; not for use by hand.")
    parser.add_argument("--fd", type=int, help="the inherited socket")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--thread-stays", action="store_true", help="the starting thread lives as long as its process")
    parser.add_argument("--zygote", action="store_true", help="ranks will be forked")
    parser.add_argument("--rank", type=int, metavar="FD", help="be a rank, as told on standard input; last words to FD")
    arguments = parser.parse_args()
    never_wait()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if arguments.rank is not None or arguments.thread_stays:
        die_with_parent(arguments.parent)
    if arguments.rank is not None:
        os.set_inheritable(arguments.rank, False)
        words = socket.socket(fileno=arguments.rank)
        return live(msgspec.json.decode(sys.stdin.buffer.read(), type=RankStart), words)
    os.set_inheritable(arguments.fd, False)
    if arguments.zygote:
        _import_worker()
    try:
        Supervisor(socket.socket(fileno=arguments.fd), arguments.parent).run()
    except ProcessLookupError:  # the parent has ended already
        return 1
    return 0


def _import_worker() -> None:
    """What every rank will need, imported once: forked ranks share these pages. None of it may start a thread, but
    NumPy's matrix library would, unless told otherwise while it is loaded; PyTorch's is to decide for itself."""
    with env.changed(OPENBLAS_NUM_THREADS="1"):
        import numpy  # noqa: F401
    import phalanx.executor.rank
    import phalanx.worker.worker  # noqa: F401

    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    sys.exit(main())

"""Ranks as real processes: forked, connected to each other, given a function to run, and gone at the end.

    with Ranks(function, 3, args=(7,)) as ranks:      # each runs function(Member, 7)
        ranks.kill(2)
        outcomes = ranks.outcomes(timeout=10)

`run_ranks` is the same for tests that only want the values. Ranks on "nodes" of their own talk TCP.
"""

import ctypes
import os
import secrets
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import msgspec
import torch

from phalanx.distributed.bootstrap import Door, Meeting, close_groups, connect_groups
from phalanx.distributed.collectives import Group, Groups
from phalanx.distributed.mesh import Mesh
from phalanx.distributed.transports.abort import Abort, GroupBroken

TRANSPORTS = ("shm", "tcp", "tcp-encrypted")

_libc = ctypes.CDLL(None)


@dataclass
class Member:
    """What a rank's function gets."""

    rank: int
    groups: Groups
    abort: Abort
    pipe: Connection

    @property
    def tp(self) -> Group:
        return self.groups.tp

    def tell(self, message: Any) -> None:
        """To the test, which hears it with `Ranks.hear`."""
        self.pipe.send(("told", message))

    def ask(self) -> Any:
        """Waits for what the test says with `Ranks.tell`."""
        return self.pipe.recv()


@dataclass
class Outcome:
    """How a rank ended: with a value, an error (class name and text), or a signal."""

    value: Any = None
    error: str = ""
    message: str = ""
    signal: int = 0
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return not self.error and not self.signal


@dataclass
class Ranks:
    function: Callable[..., Any]
    size: int
    args: tuple[Any, ...] = ()
    transport: str = "shm"
    mesh: Mesh | None = None
    nodes: Sequence[str] = ()
    """A name a rank; equal names share memory. By default all equal for shm, all different for tcp."""
    crowded: bool | None = None
    exchange_timeout: float | None = 30.0
    processes: list[tuple[int, Connection]] = field(default_factory=list)
    _ended: dict[int, Outcome] = field(default_factory=dict)

    def __enter__(self) -> "Ranks":
        nodes = self.nodes or [f"node{r if self.transport != 'shm' else 0}" for r in range(self.size)]
        for rank in range(self.size):
            ours, theirs = Pipe()
            pid = os.fork()
            if pid == 0:
                ours.close()
                self._child(rank, nodes[rank], theirs)
            theirs.close()
            self.processes.append((pid, ours))
        try:
            roster = [pipe.recv() for _, pipe in self.processes]
            key = secrets.token_bytes(32)
            for _, pipe in self.processes:
                pipe.send((roster, key))
        except BaseException:
            self.__exit__()
            raise
        return self

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.processes[rank][0], number)

    def tell(self, rank: int, message: Any) -> None:
        self.processes[rank][1].send(message)

    def hear(self, rank: int, timeout: float = 20.0) -> Any:
        pipe = self.processes[rank][1]
        if not pipe.poll(timeout):
            raise TimeoutError(f"rank {rank} said nothing")
        kind, message = pipe.recv()
        if kind != "told":
            raise AssertionError(f"rank {rank} ended instead: {message}")
        return message

    def hear_outcome(self, rank: int, timeout: float = 60.0) -> Outcome:
        """How this rank ended. Raises TimeoutError when it does not."""
        return self._gather([rank], timeout)[rank]

    def outcomes(self, timeout: float = 60.0) -> list[Outcome]:
        """How they ended. Raises TimeoutError naming the ranks that did not end."""
        found = self._gather(range(self.size), timeout)
        return [found[rank] for rank in range(self.size)]

    def _gather(self, ranks: Iterable[int], timeout: float) -> dict[int, Outcome]:
        deadline = time.monotonic() + timeout
        pipes = {self.processes[rank][1]: rank for rank in ranks if rank not in self._ended}
        while pipes:
            ready = wait(list(pipes), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"ranks {sorted(pipes.values())} did not end")
            for pipe in ready:
                rank = pipes[pipe]
                try:
                    kind, content = pipe.recv()
                except (EOFError, ConnectionResetError):
                    _, status = os.waitpid(self.processes[rank][0], 0)
                    kind, content = "outcome", Outcome(signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else -1)
                    self.processes[rank] = (0, pipe)
                if kind == "outcome":
                    self._ended[rank] = content
                    del pipes[pipe]
        return self._ended

    def __exit__(self, *_: object) -> None:
        for pid, pipe in self.processes:
            if pid:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            pipe.close()
        self.processes.clear()

    def _child(self, rank: int, node: str, pipe: Connection) -> None:
        code = 1
        try:
            _libc.prctl(1, signal.SIGKILL)  # end with the tests
            torch.set_num_threads(1)
            pipe.send(("outcome", self._live(rank, node, pipe)))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _live(self, rank: int, node: str, pipe: Connection) -> Outcome:
        door = Door(rank, "127.0.0.1")
        door.address = msgspec.structs.replace(door.address, node=node)
        pipe.send(door.address)
        roster, key = pipe.recv()
        abort = Abort()
        meeting = Meeting(1, key, self.transport == "tcp-encrypted", 20.0, self.exchange_timeout)
        crowded = self.crowded if self.crowded is not None else self.size > len(os.sched_getaffinity(0))
        start = time.monotonic()
        try:
            groups = connect_groups(self.mesh or Mesh(tp=self.size), door, roster, meeting, abort, crowded=crowded)
            try:
                start = time.monotonic()
                value = self.function(Member(rank, groups, abort, pipe), *self.args)
            finally:
                close_groups(groups)
        except GroupBroken as error:
            return Outcome(error=type(error).__name__, message=str(error), seconds=time.monotonic() - start)
        except Exception as error:
            return Outcome(error=type(error).__name__, message=traceback.format_exc())
        return Outcome(value, seconds=time.monotonic() - start)


def run_ranks(function: Callable[..., Any], size: int, *args: Any, timeout: float = 60.0, **options: Any) -> list[Any]:
    """Every rank's value. Raises AssertionError when a rank failed."""
    with Ranks(function, size, args, **options) as ranks:
        outcomes = ranks.outcomes(timeout)
    failed = [(o.error == "PeerLost", rank, o) for rank, o in enumerate(outcomes) if not o]
    if failed:
        _, rank, outcome = min(failed, key=lambda f: f[:2])  # a cause before its consequences
        raise AssertionError(f"rank {rank} failed (signal {outcome.signal}): {outcome.message}")
    return [outcome.value for outcome in outcomes]

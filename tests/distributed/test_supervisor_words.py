"""What a supervisor says of a rank that has ended."""

from __future__ import annotations

import os
import socket
import subprocess

import pytest

from phalanx.distributed.address import Address, node_id
from phalanx.executor import supervisor
from phalanx.executor.messages import RankStart
from phalanx.executor.supervisor import Ended, Supervisor, decode_from_supervisor, receive

START = RankStart(2, Address(-1, node_id(), "nowhere"), b"")


@pytest.mark.parametrize(
    ("command", "cause"),
    [
        ("exit 3", "it ended with status 3"),
        ("kill -SEGV $$", "it was killed by SIGSEGV"),
        ("kill -KILL $$", "it was killed by SIGKILL (out of memory)"),
    ],
)
def test_memory_is_blamed_for_what_the_kernel_does_then(command: str, cause: str, monkeypatch) -> None:
    """It ran out somewhere on this machine at that time. Nothing else uses up what the kernel counted."""
    asked: list[int] = []
    monkeypatch.setattr(supervisor.MemoryKills, "blame", lambda self, process: asked.append(process) or "out of memory")
    ours, theirs = socket.socketpair()
    words, pen = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    pen.close()
    watcher = Supervisor(theirs, os.getpid())
    child = subprocess.Popen(["sh", "-c", command])
    pidfd = os.pidfd_open(child.pid)
    watcher._ranks[pidfd] = supervisor._Child(START, child.pid, words)
    with ours, theirs:
        watcher._reap(pidfd)
        child.returncode = 0  # it is reaped
        assert decode_from_supervisor(receive(ours) or b"") == Ended(2, child.pid, cause)
    assert asked == ([child.pid] if "KILL" in command else [])

"""Doors where nobody is kept out: by mute callers, or by a while without descriptors."""

import errno
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from phalanx.distributed.transports.abort import Abort
from phalanx.distributed.transports.secure_stream import SecureStream
from phalanx.executor.doorkeeper import Doorkeeper
from phalanx.executor.keys import derive
from phalanx.executor.node_messages import Target
from phalanx.executor.probing import ProbeDoor, probe_all
from tests.helpers.processes import wait_until

KEY = b"k" * 32


@pytest.fixture
def without_descriptors(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """When callers could not be accepted, three times."""
    times: list[float] = []
    accept = socket.socket.accept

    def exhausted(door: socket.socket) -> object:
        if len(times) < 3:
            times.append(time.monotonic())
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(door)

    monkeypatch.setattr(socket.socket, "accept", exhausted)
    yield times
    assert len(times) == 3


def test_a_door_without_descriptors_waits_for_some(without_descriptors):
    heard = threading.Event()
    keeper = Doorkeeper(socket.create_server(("127.0.0.1", 0)), lambda sock, address: heard.set(), "caller")
    with socket.create_connection(keeper._door.getsockname()):
        assert heard.wait(5)
    keeper.close()
    first, second, third = without_descriptors
    assert second - first >= 0.1 and third - second >= 0.1, "it does not spin"


def test_a_probe_is_answered_once_there_are_descriptors(without_descriptors):
    door = ProbeDoor(1, "127.0.0.1", KEY)
    assert probe_all(0, [Target(1, "127.0.0.1", door.port)], KEY) == []
    door.close()


def test_mute_callers_have_no_more_than_their_places():
    def hear(sock: socket.socket, address: str) -> None:
        sock.recv(1)

    keeper = Doorkeeper(socket.create_server(("127.0.0.1", 0)), hear, "caller", 2)
    mute = [socket.create_connection(keeper._door.getsockname()) for _ in range(3)]
    mute[0].settimeout(5)
    assert mute[0].recv(1) == b"", "it had to make room"
    assert len(keeper.callers) == 2
    keeper.close()
    for sock in mute:
        sock.close()
    assert wait_until(lambda: not keeper.callers, 5)


def test_mute_callers_at_a_probe_door():
    door = ProbeDoor(1, "127.0.0.1", KEY)
    mute = [socket.create_connection(("127.0.0.1", door.port)) for _ in range(300)]
    assert wait_until(lambda: len(door._doorkeeper.callers) == 256, 5)
    never = Abort()
    with socket.create_connection(("127.0.0.1", door.port)) as sock:
        key = derive(KEY, "probe", "1")
        SecureStream(sock, never, "the node").handshake(key, client=True, encrypt=False, timeout=5)
    door.close()
    for caller in mute:
        caller.close()

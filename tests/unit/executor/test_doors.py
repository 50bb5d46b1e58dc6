"""The doors for callers from elsewhere: nobody is kept out by mute callers, or by a while without descriptors."""

import contextlib
import errno
import itertools
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from phalanx.distributed.bootstrap import Door, Meeting, connect_groups
from phalanx.distributed.mesh import Mesh
from phalanx.distributed.transports.abort import Abort, GroupBroken
from phalanx.distributed.transports.secure_stream import SecureStream
from phalanx.executor.doorkeeper import Doorkeeper
from phalanx.executor.keys import derive
from phalanx.executor.members import Watch
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


def pauses(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def test_a_door_without_descriptors_waits_for_some(without_descriptors):
    heard = threading.Event()
    keeper = Doorkeeper(socket.create_server(("127.0.0.1", 0)), lambda sock, address: heard.set(), "caller")
    with socket.create_connection(keeper._door.getsockname()):
        assert heard.wait(5)
    keeper.close()
    assert min(pauses(without_descriptors)) >= 0.1, "it does not spin"


def test_a_door_without_threads_turns_callers_away_and_stays_open(monkeypatch):
    heard = threading.Event()
    keeper = Doorkeeper(socket.create_server(("127.0.0.1", 0)), lambda sock, address: heard.set(), "caller")

    def exhausted(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as scarce, socket.create_connection(keeper._door.getsockname()) as early:
        scarce.setattr(threading.Thread, "start", exhausted)
        early.settimeout(5)
        assert early.recv(1) == b""
    assert not keeper.callers
    with socket.create_connection(keeper._door.getsockname()):
        assert heard.wait(5)
    keeper.close()


def test_a_probe_is_answered_once_there_are_descriptors(without_descriptors):
    door = ProbeDoor(1, "127.0.0.1", KEY)
    assert probe_all([Target(1, "127.0.0.1", door.port)], KEY) == []
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


class Ranks:
    """Nobody that the executor waits for."""

    def joined(self, join, stream):
        return None

    def heard(self, member, kind, content):
        pass

    def lost(self, member):
        pass

    def tick(self, now):
        return None


@contextlib.contextmanager
def executors_door() -> Iterator[int]:
    """Its port."""
    watch = Watch(Ranks(), KEY, host="127.0.0.1")
    yield watch.address.port
    watch.close()


@contextlib.contextmanager
def ranks_door() -> Iterator[int]:
    """Of rank 0, which waits for rank 1."""
    doors, abort = [Door(rank, "127.0.0.1") for rank in range(2)], Abort()

    def meet() -> None:
        with contextlib.suppress(GroupBroken):
            connect_groups(Mesh(tp=2), doors[0], [door.address for door in doors], Meeting(1, KEY), abort, crowded=True)

    thread = threading.Thread(target=meet)
    thread.start()
    yield doors[0].address.port
    abort.set("enough")
    thread.join()
    for each in (*doors, abort):
        each.close()


@pytest.fixture(params=[executors_door, ranks_door])
def port(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    for module in ("phalanx.executor.members", "phalanx.distributed.bootstrap"):
        monkeypatch.setattr(f"{module}._KNOCK_S", 60.0)
    with request.param() as port:
        yield port


def prove(sock: socket.socket) -> None:
    never = Abort()
    SecureStream(sock, never, "it").handshake(KEY, client=True, encrypt=False, timeout=5)
    never.close()


def test_mute_callers_do_not_take_the_place_of_a_slow_one(port):
    """Of another address than theirs."""
    with contextlib.ExitStack() as stack:
        slow = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        mute = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.9", 0)))
            for _ in range(300)
        ]
        mute[0].settimeout(5)
        assert mute[0].recv(1) == b"", "all places are taken"
        prove(slow)


def test_who_listens_to_many_does_not_spin_without_descriptors(without_descriptors, port):
    with socket.create_connection(("127.0.0.1", port)) as sock:
        prove(sock)
    assert max(pauses(without_descriptors)) >= 0.02


def test_who_speaks_while_it_makes_room_is_no_door(monkeypatch):
    """What has come from it is looked at after its connection is closed."""
    monkeypatch.setattr("phalanx.executor.members._CALLERS", 1)
    watch, at_it, go_on = Watch(Ranks(), KEY, host="127.0.0.1"), threading.Event(), threading.Event()
    door = ("127.0.0.1", watch.address.port)
    with socket.create_connection(door) as early:
        assert wait_until(lambda: len(watch._talks) == 1, 5)
        watch._jobs.put(lambda: (at_it.set(), go_on.wait(5)))
        watch.wake()
        assert at_it.wait(5)
        with socket.create_connection(door):
            early.sendall(b"x")
            go_on.set()
            early.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                assert early.recv(1) == b""
    with socket.create_connection(door) as later:
        prove(later)
    watch.close()

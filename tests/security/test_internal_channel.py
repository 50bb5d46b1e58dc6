"""Callers of the ranks' own sockets: without the key, with an old one, with nonsense. Dropped, counted, nobody held up.

The ranks under test are real; the attackers connect to their doors while they meet, and to their streams.
"""

import contextlib
import os
import random
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable

import msgspec
import pytest
import torch

from phalanx.distributed.bootstrap import Address, Door, Meeting, close_groups, connect_groups
from phalanx.distributed.mesh import Mesh
from phalanx.distributed.transports.abort import Abort, GroupBroken
from phalanx.distributed.transports.secure_stream import CODE, HEADER, SecureStream, Unauthenticated, _prove

KEY = secrets.token_bytes(32)
MAGIC = b"PHLX1"


def dial(address: Address, kind: str) -> socket.socket:
    if kind == "tcp":
        return socket.create_connection((address.host, address.port), 5)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(f"\0{address.unix}")
    return sock


def hello(key: bytes, mode: bytes = b"A", magic: bytes = MAGIC) -> bytes:
    """A client's first words."""
    challenge = os.urandom(32)
    return magic + mode + challenge + _prove(key, b"client-hello", challenge)


def client(sock: socket.socket, key: bytes = KEY, encrypt: bool = False) -> SecureStream:
    stream = SecureStream(sock, Abort(), "the door")
    stream.handshake(key, client=True, encrypt=encrypt, timeout=5)
    return stream


def refused(sock: socket.socket, seconds: float = 5.0) -> bool:
    """The other side hangs up, and says nothing before."""
    sock.settimeout(seconds)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


class TwoRanks:
    """Rank 0 opens its door; rank 1 comes when `meet` is called. Attacks go in between."""

    def __init__(self, transport: str, encrypt: bool = False):
        nodes = ["a", "b"] if transport == "tcp" else ["a", "a"]
        self.transport, self.doors, self.aborts = transport, [Door(r, "127.0.0.1") for r in (0, 1)], [Abort(), Abort()]
        for door, node in zip(self.doors, nodes, strict=True):
            door.address = msgspec.structs.replace(door.address, node=node)
        self.roster = [door.address for door in self.doors]
        self.meeting = Meeting(3, KEY, encrypt, 20.0, 20.0)
        self.groups: dict[int, object] = {}
        self.errors: list[Exception] = []
        self.first = threading.Thread(target=self._connect, args=(0,))
        self.first.start()

    def _connect(self, rank: int) -> None:
        try:
            mesh = Mesh(tp=2)
            self.groups[rank] = connect_groups(
                mesh, self.doors[rank], self.roster, self.meeting, self.aborts[rank], crowded=True
            )
        except Exception as error:
            self.errors.append(error)

    @property
    def address(self) -> Address:
        return self.roster[0]

    def dial(self) -> socket.socket:
        return dial(self.address, self.transport)

    def meet(self) -> float:
        """The real peers find each other and add up a tensor; the seconds it took."""
        start = time.monotonic()
        second = threading.Thread(target=self._connect, args=(1,))
        second.start()
        for thread in (self.first, second):
            thread.join(20)
        assert not self.errors and len(self.groups) == 2
        took = time.monotonic() - start
        sums: list[torch.Tensor] = []
        threads = [
            threading.Thread(target=lambda g=g: sums.append(g.tp.all_reduce(torch.ones(3))))
            for g in self.groups.values()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert [s.tolist() for s in sums] == [[2.0] * 3] * 2
        return took

    @property
    def refused(self) -> int:
        return self.doors[0].refused

    def close(self) -> None:
        for abort in self.aborts:
            abort.set("the test is over")
        self.first.join(5)
        for groups in self.groups.values():
            close_groups(groups)
        for each in (*self.doors, *self.aborts):
            each.close()


@pytest.fixture(params=["tcp", "unix"])
def ranks(request):
    ranks = TwoRanks(request.param)
    yield ranks
    ranks.close()


def framed(key: bytes, kind: int, content: bytes) -> bytes:
    """The first frame as a holder of `key` would make it."""
    header = HEADER.pack(len(content), kind, 0, len(content))
    return header + content + _prove(key, b"", header + content)[:CODE]


NONSENSE: dict[str, Callable[[], bytes]] = {
    "random bytes": lambda: random.Random(1).randbytes(5000),
    "zeros": lambda: bytes(500),
    "an HTTP request": lambda: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b" " * 100,
    "a pickle": lambda: b"\x80\x04\x95cposix\nsystem\n(S'touch /tmp/phalanx-was-here'\ntR." + bytes(100),
    "the wrong key": lambda: hello(bytes(32)),
    "the right words, the wrong proof": lambda: hello(KEY)[:-1] + b"\0",
    "another version": lambda: hello(KEY, magic=b"PHLX0"),
    "a wish to encrypt": lambda: hello(KEY, mode=b"E"),
}


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_whoever_lacks_the_key_is_dropped_unanswered(ranks, nonsense):
    with ranks.dial() as sock:
        sock.sendall(NONSENSE[nonsense]())
        assert refused(sock)
    assert ranks.refused == 1
    ranks.meet()
    assert not os.path.exists("/tmp/phalanx-was-here")


def test_a_downgrade_from_encryption_is_dropped():
    ranks = TwoRanks("tcp", encrypt=True)
    try:
        with ranks.dial() as sock:
            sock.sendall(hello(KEY, mode=b"A"))
            assert refused(sock)
        assert ranks.refused == 1
        ranks.meet()
    finally:
        ranks.close()


def test_a_recorded_conversation_does_not_work_again(ranks):
    """All that a real client said, played back: the server's fresh challenge is not answered by it."""
    recorded = hello(KEY)
    with ranks.dial() as sock:
        sock.sendall(recorded)
        challenge = sock.recv(64, socket.MSG_WAITALL)[:32]
        answer = _prove(KEY, b"client", challenge + recorded[6:38])
        ranks_before = ranks.refused
    with ranks.dial() as sock:
        sock.sendall(recorded + answer)
        assert sock.recv(64, socket.MSG_WAITALL)  # the server proves itself to whoever could have known the key once
        assert refused(sock)
    assert ranks.refused > ranks_before
    ranks.meet()


def test_silent_and_slow_callers_hold_nobody_up(ranks):
    silent = [ranks.dial() for _ in range(100)]
    for i, sock in enumerate(silent):
        if i % 2:
            with contextlib.suppress(ConnectionError):  # the oldest may have been dropped by now
                sock.sendall(hello(KEY)[: i % 60])
    assert ranks.meet() < 2.0
    for sock in silent:
        sock.close()


BAD_HELLOS: dict[str, object] = {
    "not msgpack": b"\xc1\xff\xff",
    "another type": [1, 2, 3],
    "wrong fields": {"axis": 5, "rank": "one", "epoch": 3, "members": []},
    "deep nesting": b"\x91" * 5000 + b"\x90",
    "an unknown axis": {"axis": "xp", "rank": 1, "epoch": 3, "members": [0, 1]},
    "another epoch": {"axis": "tp", "rank": 1, "epoch": 2, "members": [0, 1]},
    "nobody we know": {"axis": "tp", "rank": 77, "epoch": 3, "members": [0, 77]},
    "a huge number": {"axis": "tp", "rank": 2**63, "epoch": 3, "members": [0, 1]},
}


@pytest.mark.parametrize("bad", BAD_HELLOS)
def test_a_holder_of_the_key_who_talks_nonsense_is_dropped(ranks, bad):
    content = BAD_HELLOS[bad]
    stream = client(ranks.dial())
    stream.send(1, content if isinstance(content, bytes) else msgspec.msgpack.encode(content), 5)
    stream.sock.setblocking(True)
    assert refused(stream.sock)
    stream.close()
    assert ranks.refused == 1
    ranks.meet()


@pytest.mark.parametrize("tail", ["over-long", "truncated", "unsealed"])
def test_bad_frames_after_a_good_handshake_are_dropped(ranks, tail):
    stream = client(ranks.dial())
    stream.sock.setblocking(True)
    match tail:
        case "over-long":
            stream.sock.sendall(HEADER.pack(0xFFFFFFFF, 1, 0, 0xFFFFFFFF))
        case "truncated":
            stream.sock.sendall(HEADER.pack(100, 1, 0, 100) + bytes(50))
            stream.sock.shutdown(socket.SHUT_WR)
        case "unsealed":
            stream.sock.sendall(framed(bytes(32), 1, msgspec.msgpack.encode({"axis": "tp"})))
    assert refused(stream.sock)
    stream.close()
    assert ranks.refused == 1
    ranks.meet()


# -- an established stream -------------------------------------------------------------------------------------------


def established(encrypt: bool) -> tuple[SecureStream, SecureStream]:
    a, b = socket.socketpair()
    first, second = SecureStream(a, Abort(), "one"), SecureStream(b, Abort(), "two")
    thread = threading.Thread(
        target=second.handshake, args=(KEY,), kwargs=dict(client=False, encrypt=encrypt, timeout=5)
    )
    thread.start()
    first.handshake(KEY, client=True, encrypt=encrypt, timeout=5)
    thread.join()
    return first, second


@pytest.mark.parametrize("encrypt", [False, True])
@pytest.mark.parametrize("attack", ["replayed", "reordered", "reflected", "one bit", "header", "shorter", "longer"])
def test_a_frame_that_was_touched_is_an_error(attack, encrypt):
    first, second = established(encrypt)
    frames = []
    for content in (b"number one", b"number two"):
        first.send(7, content, 1)
        second.sock.setblocking(True)
        frames.append(bytearray(second.sock.recv(1000)))
        second.sock.setblocking(False)
    one, two = frames
    match attack:
        case "replayed":
            wire = one + one
        case "reordered":
            wire = two + one
        case "reflected":
            wire = b""
            second.send(7, b"from the other side", 1)
            first.sock.setblocking(True)
            wire = first.sock.recv(1000)
        case "one bit":
            one[HEADER.size + 2] ^= 4
            wire = one
        case "header":
            one[4] ^= 1  # the kind
            wire = one
        case "shorter":
            one[0] -= 1
            wire = one + two
        case "longer":
            one[0] += 1
            wire = one + two
    first.sock.setblocking(True)
    first.sock.sendall(wire)
    with pytest.raises(Unauthenticated):
        receive_all(second)
    first.close()
    second.close()


def receive_all(stream: SecureStream) -> None:
    while True:
        stream.receive(1000, 1)


@pytest.mark.parametrize("encrypt", [False, True])
def test_random_bytes_never_pass(encrypt):
    source = random.Random(5)
    for _ in range(60):
        first, second = established(encrypt)
        first.sock.setblocking(True)
        first.sock.sendall(source.randbytes(source.choice((1, 23, 24, 40, 200))))
        first.sock.close()
        with pytest.raises(GroupBroken):
            second.receive(1 << 16, 1)
        second.close()


def test_a_claimed_length_takes_no_memory():
    """The limit is looked at before any room is made."""
    first, second = established(False)
    first.sock.setblocking(True)
    first.sock.sendall(struct.pack("<IIQQ", 0xFFFFFFF0, 1, 0, 0))
    start = time.monotonic()
    with pytest.raises(GroupBroken, match="at most 1000"):
        second.receive(1000, 5)
    assert time.monotonic() - start < 0.5
    first.close()
    second.close()


def test_doors_listen_on_their_own_address_only():
    door = Door(0, "127.0.0.1")
    assert door.sockets[0].getsockname()[:1] == b"\0"
    assert door.sockets[1].getsockname()[0] == "127.0.0.1"
    door.close()
    door = Door(0, None)
    assert len(door.sockets) == 1 and door.address.port == 0
    door.close()

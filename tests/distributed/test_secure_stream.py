"""Frames between two ends that have the key: content, order, waits, and peers that are busy, gone or far away."""

import os
import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from phalanx.distributed.transports import secure_stream
from phalanx.distributed.transports.abort import Abort, GroupBroken, PeerLost
from phalanx.distributed.transports.secure_stream import SecureStream

KEY = bytes(range(32))


@pytest.fixture
def abort() -> Iterator[Abort]:
    abort = Abort()
    yield abort
    abort.close()


def sockets(kind: str) -> tuple[socket.socket, socket.socket]:
    if kind == "unix":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        return client, listener.accept()[0]


def connected(abort: Abort, *, kind: str = "tcp", encrypt: bool = False) -> tuple[SecureStream, SecureStream]:
    a, b = sockets(kind)
    client, server = SecureStream(a, abort, "the server"), SecureStream(b, abort, "the client")
    thread = threading.Thread(
        target=server.handshake, args=(KEY,), kwargs=dict(client=False, encrypt=encrypt, timeout=5)
    )
    thread.start()
    client.handshake(KEY, client=True, encrypt=encrypt, timeout=5)
    thread.join()
    return client, server


def in_thread(work, *args) -> threading.Thread:
    thread = threading.Thread(target=work, args=args)
    thread.start()
    return thread


@pytest.mark.parametrize("encrypt", [False, True])
@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_frames_come_as_they_were_sent(kind, encrypt, abort):
    client, server = connected(abort, kind=kind, encrypt=encrypt)
    contents = [b"", b"x", os.urandom(5000), os.urandom(3_000_000), b"last"]

    def send(stream: SecureStream) -> None:
        for kind_of_frame, content in enumerate(contents):
            stream.send(kind_of_frame, content, 5)

    for sender, receiver in ((client, server), (server, client)):
        thread = in_thread(send, sender)
        got = [receiver.receive(1 << 22, 5) for _ in contents]
        thread.join()
        assert [(number, bytes(content)) for number, content in got] == list(enumerate(contents))
    client.close()
    server.close()


@pytest.mark.parametrize("encrypt", [False, True])
def test_what_travels_is_sealed(encrypt, abort):
    """The words are readable on the wire exactly when encryption is off."""
    a, b = sockets("unix")
    client = SecureStream(a, abort, "the server")
    client._send = secure_stream._Codec(KEY, encrypt)
    client.send(1, b"a secret sentence", 1)
    assert (b"secret" in b.recv(1000)) is not encrypt
    client.close()
    b.close()


@pytest.mark.parametrize("encrypt", [False, True])
@pytest.mark.parametrize("size", [0, 1, 100_000, (1 << 20) - 1, 1 << 20, 5_000_001])
def test_tensors_travel_in_pieces(size, encrypt, abort):
    client, server = connected(abort, encrypt=encrypt)
    content, into = os.urandom(size), bytearray(size)
    sending = client.outgoing(3, memoryview(content))
    receiving = server.incoming(3, memoryview(into), lambda kind, n: f"{kind} of {n}")
    done = [False, False]
    while not all(done):
        for i, steps in enumerate((sending, receiving)):
            done[i] = done[i] or next(steps, None) is None
    assert into == content
    client.close()
    server.close()


@pytest.mark.parametrize(("kind", "size"), [(4, 10), (3, 9), (3, 11), (3, 2_000_000)])
def test_another_exchange_is_noticed_at_once(kind, size, abort):
    client, server = connected(abort)
    next(client.outgoing(kind, memoryview(bytes(size))), None)
    time.sleep(0.05)
    with pytest.raises(GroupBroken, match=f"the client is in {kind} of {size}, not 3 of 10"):
        next(server.incoming(3, memoryview(bytearray(10)), lambda k, n: f"{k} of {n}"))
    client.close()
    server.close()


def test_waits_end_in_time(abort):
    client, server = connected(abort)
    start = time.monotonic()
    with pytest.raises(GroupBroken, match="in time"):
        client.receive(10, 0.2)
    assert 0.15 < time.monotonic() - start < 5
    with pytest.raises(GroupBroken, match="in time"):
        server.send(1, bytes(1 << 24), 0.2)
    client.close()
    server.close()


WAITS = {
    "receive": lambda stream: stream.receive(10),
    "send": lambda stream: stream.send(1, bytes(1 << 23)),
    "handshake": lambda stream: stream.handshake(KEY, client=False, encrypt=False, timeout=100),
}


@pytest.mark.parametrize("wait", WAITS)
def test_an_abort_breaks_a_wait(wait, abort):
    client, server = connected(abort)
    when: list[float] = []
    threading.Timer(0.1, lambda: (when.append(time.monotonic()), abort.set("enough"))).start()
    with pytest.raises(GroupBroken, match="enough"):
        WAITS[wait](client)
    assert time.monotonic() - when[0] < 2, "it was not woken"
    client.close()
    server.close()


def test_the_end_of_a_peer_is_an_error(abort):
    client, server = connected(abort)
    server.shut()
    with pytest.raises(PeerLost, match="the server ended"):
        client.receive(10, 1)
    server.close()
    with pytest.raises(PeerLost):
        send_for_ever(client)
    client.close()


def send_for_ever(stream: SecureStream) -> None:
    while True:
        stream.send(1, b"x", 1)
        time.sleep(0.02)


def test_a_live_peer_that_is_slow_to_read_is_not_lost(abort, monkeypatch):
    """Its kernel answers, though all buffers are full for longer than the silence that counts as a loss."""
    monkeypatch.setattr(secure_stream, "_SILENCE_MS", 300)
    client, server = connected(abort)
    thread = in_thread(client.send, 1, bytes(1 << 24), 20.0)
    time.sleep(2.5)
    kind, content = server.receive(1 << 24, 10)
    thread.join()
    assert kind == 1 and len(content) == 1 << 24
    client.close()
    server.close()


def test_descriptors_travel(abort):
    client, server = connected(abort, kind="unix")
    before = len(os.listdir("/proc/self/fd"))
    read, write = os.pipe()
    client.send_descriptors([read, write], 1)
    got = server.receive_descriptors(2, 1)
    os.write(got[1], b"hello")
    assert os.read(read, 5) == b"hello"
    client.send_descriptors([read, write], 1)
    with pytest.raises(GroupBroken, match="descriptors"):
        server.receive_descriptors(3, 1)
    for fd in (read, write, *got):
        os.close(fd)
    client.close()
    server.close()
    assert len(os.listdir("/proc/self/fd")) == before - 2  # the two sockets


def test_small_frames_are_one_packet(abort):
    client, server = connected(abort)
    client.send(1, bytes(200), 1)
    select.select([server.sock], [], [], 1)
    assert len(server.sock.recv(1000)) == secure_stream.HEADER.size + 200 + secure_stream.CODE
    client.close()
    server.close()

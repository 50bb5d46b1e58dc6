"""A network that falls silent between an executor and a rank, between nodes, or between ranks: both sides notice within
three seconds, whether or not anything is under way, and a short interruption is no loss."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from queue import Empty, SimpleQueue

import pytest

from phalanx.distributed.address import Address
from phalanx.distributed.transports.abort import Abort, GroupBroken
from phalanx.distributed.transports.secure_stream import SecureStream
from phalanx.executor.death import kind_of
from phalanx.executor.interfaces import notice_silence
from phalanx.executor.members import Member, Watch
from phalanx.executor.messages import MESSAGE, AbortEpoch, Join, encode
from phalanx.executor.node_messages import BEAT_S, SILENCE_MS
from tests.helpers.hosts import Host, ip

KEY = b"k" * 32
WITHIN = 3.2
"""Seconds; a machine with other work is a little late."""


class Hub:
    """Listens as an executor does, on one host, to one rank on another."""

    def __init__(self, host: Host):
        self.member = Member(0)
        self.there, self.gone = threading.Event(), threading.Event()
        with host.network():
            self.watch = Watch(self, KEY, host=host.address)

    def joined(self, join, stream):
        self.member.stream, self.member.join = stream, join
        self.there.set()
        return self.member

    def heard(self, member, kind, content):
        pass

    def lost(self, member):
        member.lost = True
        self.gone.set()

    def tick(self, now):
        return None


class Rank:
    """Joins and then listens, in a thread."""

    def __init__(self, host: Host, address: Address):
        self.ends: SimpleQueue[GroupBroken] = SimpleQueue()
        with host.network():
            self.stream = SecureStream(socket.create_connection((address.host, address.port)), Abort(), "the executor")
        self.stream.handshake(KEY, client=True, encrypt=False, timeout=10)
        join = Join(Address(0, "elsewhere", "nowhere"), 1, "elsewhere", {})
        self.stream.send(MESSAGE, encode(join), 10)
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        try:
            while True:
                self.stream.receive(1000)
        except GroupBroken as broken:
            self.ends.put(broken)

    def end(self, seconds: float) -> GroupBroken | None:
        with contextlib.suppress(Empty):
            return self.ends.get(timeout=seconds)


@pytest.fixture
def pair(two_hosts) -> Iterator[tuple[Hub, Rank]]:
    hub = Hub(two_hosts[0])
    rank = Rank(two_hosts[1], hub.watch.address)
    assert hub.there.wait(10)
    yield hub, rank
    hub.watch.close()
    hub.member.close()
    rank.stream.close()


@pytest.mark.parametrize("busy", [False, True])
def test_a_cut(pair, two_hosts, busy):
    hub, rank = pair
    time.sleep(1.5)
    two_hosts[1].cut()
    begun = time.monotonic()
    if busy:
        hub.member.send(AbortEpoch("it is over"))
    assert hub.gone.wait(WITHIN)
    assert kind_of(hub.member.why) == "network" and 2 < hub.member.silent < WITHIN
    assert rank.end(max(0.1, begun + WITHIN - time.monotonic())) is not None


def test_one_direction_only(pair, two_hosts):
    """Nothing leaves the rank's host any more, what is sent to it still comes."""
    hub, rank = pair
    ip("-n", two_hosts[1].namespace, "route", "add", "blackhole", two_hosts[0].address)
    begun = time.monotonic()
    assert hub.gone.wait(WITHIN)
    assert rank.end(max(0.1, begun + 2 * WITHIN - time.monotonic())) is not None


def test_a_short_interruption(pair, two_hosts):
    hub, rank = pair
    for _ in range(2):
        two_hosts[1].cut()
        hub.member.send(AbortEpoch("hello"))
        time.sleep(1)
        two_hosts[1].heal()
        time.sleep(1)
    assert not hub.gone.wait(2) and rank.end(0.1) is None


def test_nodes_notice_wherever_between_two_beats(two_hosts):
    here, there = two_hosts
    with here.network():
        door = socket.create_server((here.address, 0))
    ends: SimpleQueue[float] = SimpleQueue()

    def beat(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock.send(b"beat")
                time.sleep(BEAT_S)

    def listen(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while sock.recv(100):
                pass
        ends.put(time.monotonic())

    pairs = 8
    for _ in range(pairs):
        with there.network():
            caller = socket.create_connection(door.getsockname())
        for sock in (door.accept()[0], caller):
            notice_silence(sock, SILENCE_MS)
            for work in (beat, listen):
                threading.Thread(target=work, args=(sock,), daemon=True).start()
        time.sleep(BEAT_S / pairs)
    time.sleep(2 * BEAT_S)
    there.cut()
    begun = time.monotonic()
    noticed = [ends.get(timeout=5) - begun for _ in range(2 * pairs)]
    assert min(noticed) > 1.5 and max(noticed) < WITHIN, noticed

"""The TCP group beyond its results: networks that fall silent, and peers that are only slow."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from phalanx.distributed.transports.abort import Abort, GroupBroken, PeerLost
from phalanx.distributed.transports.secure_stream import SecureStream
from phalanx.distributed.transports.tcp import TcpGroup
from tests.helpers import hosts

KEY = bytes(32)


def grouped(a: socket.socket, b: socket.socket, timeout: float | None) -> list[TcpGroup]:
    """Ranks 4 and 7 of the world, over a connected pair of sockets."""
    streams = [SecureStream(a, Abort(), "rank 7"), SecureStream(b, Abort(), "rank 4")]
    thread = threading.Thread(
        target=streams[1].handshake, args=(KEY,), kwargs=dict(client=False, encrypt=False, timeout=5)
    )
    thread.start()
    streams[0].handshake(KEY, client=True, encrypt=False, timeout=5)
    thread.join()
    return [TcpGroup({1 - rank: stream}, rank, (4, 7), stream._abort, timeout) for rank, stream in enumerate(streams)]


@pytest.fixture
def far_apart() -> Iterator[tuple[list[TcpGroup], "hosts.Host"]]:
    """Two ranks on two hosts; the second host, whose network can be cut."""
    if reason := hosts.missing():
        pytest.skip(reason)
    with hosts.test_bed(2) as (one, two):
        with one.network():
            listener = socket.create_server((one.address, 0))
        with two.network():
            client = socket.create_connection(listener.getsockname(), 5)
        groups = grouped(client, listener.accept()[0], None)
        listener.close()
        yield groups, two
        for group in groups:
            group.close()


WORK = {
    "waiting": lambda group: group.recv((5,), torch.float32, 0),
    "a small exchange": lambda group: group.all_reduce(torch.ones(5)),
    "a large exchange": lambda group: group.all_reduce(torch.ones(1 << 22)),
    "sending": lambda group: [group.send(torch.ones(1 << 22), 0) for _ in range(9)],
}


@pytest.mark.parametrize("work", WORK)
def test_a_network_that_falls_silent_is_noticed(far_apart, work):
    (_, group), host = far_apart
    host.cut()
    time.sleep(0.1)
    start = time.monotonic()
    with pytest.raises(PeerLost, match="rank 4"):
        WORK[work](group)
    assert time.monotonic() - start < 5.5


def test_a_slow_peer_is_not_taken_for_a_lost_one(far_apart):
    """It computes for longer than a loss takes to be noticed, while all buffers are full of what it was sent."""
    (slow, quick), _ = far_apart
    thread = threading.Thread(target=quick.send, args=(torch.ones(1 << 22), 0))
    thread.start()
    time.sleep(5)
    assert slow.recv((1 << 22,), torch.float32, 1).sum() == 1 << 22
    thread.join()


def test_time_outs_name_the_ranks():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        groups = grouped(client, listener.accept()[0], 0.2)
    with pytest.raises(GroupBroken, match=r"Rank 4: waited 0.2 s for rank 7 in exchange 1, all_reduce"):
        groups[0].all_reduce(torch.ones(5))
    assert groups[1].all_reduce(torch.ones(5)).tolist() == [2.0] * 5  # what rank 4 sent before it gave up is good
    with pytest.raises(PeerLost, match="Rank 7: The connection to rank 4 ended"):
        groups[1].barrier()
    for group in groups:
        group.close()

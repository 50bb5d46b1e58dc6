"""How ranks meet: meshes, late comers, epochs, missing ranks, errors that leave nothing open."""

import os
import socket
import threading
import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from phalanx.distributed.bootstrap import Address, Door, Meeting, close_groups, connect_groups, node_id
from phalanx.distributed.collectives import Groups, SingleGroup
from phalanx.distributed.mesh import AXES, Mesh
from phalanx.distributed.transports.abort import Abort, GroupBroken
from phalanx.distributed.transports.shared_memory import SharedMemoryGroup
from phalanx.distributed.transports.tcp import TcpGroup
from tests.helpers.processes import wait_until
from tests.helpers.rank_spawner import Member, Ranks, run_ranks

MEETING = Meeting(1, bytes(range(32)), timeout=10.0, exchange_timeout=10.0)


def every_axis(member: Member, mesh: Mesh) -> dict[str, tuple[str, list[int]]]:
    """The kind of each group, and the world ranks that a gather over it finds."""
    found = {}
    for axis in AXES:
        group = getattr(member.groups, axis)
        assert group.size == getattr(mesh, axis)
        numbers = group.all_gather(torch.tensor([member.rank]), 0, [1] * group.size).tolist()
        assert numbers == list(mesh.group(axis, member.rank)) and numbers[group.rank] == member.rank
        found[axis] = type(group).__name__
    return found


@pytest.mark.parametrize("mesh", [Mesh(tp=3), Mesh(pp=3), Mesh(tp=2, pp=2), Mesh(dp=2, pp=1, cp=2, tp=2)])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_groups_of_every_axis(mesh, transport):
    results = run_ranks(every_axis, mesh.world_size, mesh, mesh=mesh, transport=transport)
    kind = "SharedMemoryGroup" if transport == "shm" else "TcpGroup"
    for found in results:
        for axis in AXES:
            assert found[axis] == (kind if getattr(mesh, axis) > 1 else "SingleGroup")


@pytest.mark.parametrize("transport", ["shm", "tcp-encrypted"])
def test_two_nodes(transport):
    """Tensor groups on a node share memory; stages on two nodes talk TCP."""
    mesh = Mesh(tp=2, pp=2)
    results = run_ranks(every_axis, 4, mesh, mesh=mesh, transport=transport, nodes=["a", "a", "b", "b"])
    assert {r["tp"] for r in results} == {"SharedMemoryGroup"} and {r["pp"] for r in results} == {"TcpGroup"}


class Unequal:
    """Stages of two ranks and of one: only `group(axis, rank)` is asked of a mesh."""

    world_size = 3

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        if axis == "tp":
            return (0, 1) if rank < 2 else (2,)
        if axis == "pp":
            return (0, 2) if rank in (0, 2) else (1,)
        return (rank,)


def unequal(member: Member) -> list[int]:
    groups = member.groups
    return [
        groups.tp.size,
        groups.pp.size,
        int(groups.tp.all_reduce(torch.ones(1))),
        int(groups.pp.all_reduce(torch.ones(1))),
    ]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_mesh_of_unequal_stages(transport):
    assert run_ranks(unequal, 3, mesh=Unequal(), transport=transport) == [[2, 2, 2, 2], [2, 1, 2, 1], [1, 2, 1, 2]]


# -- in this process, a thread a rank --------------------------------------------------------------------------------


class World:
    def __init__(self, size: int, nodes: str = "a"):
        self.doors = [Door(rank, "127.0.0.1") for rank in range(size)]
        for rank, door in enumerate(self.doors):
            door.address = msgspec.structs.replace(door.address, node=nodes[rank % len(nodes)])
        self.roster = [door.address for door in self.doors]
        self.aborts = [Abort() for _ in range(size)]

    def connect(self, rank: int, meeting: Meeting, mesh: Any = None) -> Groups:
        mesh = mesh or Mesh(tp=len(self.doors))
        return connect_groups(mesh, self.doors[rank], self.roster, meeting, self.aborts[rank], crowded=True)

    def all(
        self,
        meetings: list[Meeting],
        meshes: list[Any] | None = None,
        delays: tuple[float, ...] = (),
        missing: int | None = None,
    ) -> list[Any]:
        """Every rank's groups, or its error; None for the one that does not come."""
        results: list[Any] = [None] * len(self.doors)

        def one(rank: int) -> None:
            time.sleep(delays[rank] if delays else 0)
            try:
                results[rank] = self.connect(rank, meetings[rank], meshes[rank] if meshes else None)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(self.doors)) if rank != missing]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return results

    def close(self, results: list[Any] = ()) -> None:
        for groups in results:
            if isinstance(groups, Groups):
                close_groups(groups)
                close_groups(groups)
        for each in (*self.doors, *self.aborts):
            each.close()


@pytest.fixture
def open_files():
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("nodes", ["a", "ab"])
@pytest.mark.parametrize("late", [0, 1, 2])
def test_who_comes_late_is_waited_for(nodes, late, open_files):
    world = World(3, nodes)
    delays = tuple(0.5 * (rank == late) for rank in range(3))
    results = world.all([MEETING] * 3, delays=delays)
    assert all(isinstance(groups, Groups) for groups in results)
    world.close(results)


@pytest.mark.parametrize("nodes", ["a", "ab"])
@pytest.mark.parametrize("missing", [0, 1, 2])
def test_who_does_not_come_is_named(nodes, missing, open_files):
    world = World(3, nodes)
    start = time.monotonic()
    results = world.all([replace(MEETING, timeout=0.4)] * 3, missing=missing)
    assert time.monotonic() - start < 4
    errors = [str(r) for r in results if isinstance(r, GroupBroken)]
    assert len(errors) == 2 and any(f"rank {missing}" in text for text in errors)
    world.close(results)


def test_nobody_listens(open_files):
    world = World(2, "ab")
    world.doors[0].close()
    start = time.monotonic()
    with pytest.raises(GroupBroken, match=r"Rank 1 cannot reach rank 0 at 127.0.0.1:\d+: Connection refused") as caught:
        world.connect(1, MEETING)
    assert "PHALANX_HOST_IP" in str(caught.value)
    assert time.monotonic() - start < 1
    world.close()


def test_nobody_answers(monkeypatch, open_files):
    """A firewall that drops, or the address of an interface that leads nowhere."""
    monkeypatch.setattr("phalanx.distributed.bootstrap._CONNECT_S", 0.3)
    world = World(2, "ab")
    world.roster[0] = msgspec.structs.replace(world.roster[0], host="192.0.2.1")  # for documentation: routed nowhere
    with pytest.raises(GroupBroken, match="Rank 1 cannot reach rank 0"):
        world.connect(1, MEETING)
    world.close()


@pytest.mark.parametrize("phase", ["calling", "waiting"])
def test_an_abort_ends_the_meeting(phase, open_files):
    world = World(2)
    rank = 1 if phase == "calling" else 0
    when: list[float] = []
    abort = lambda: (when.append(time.monotonic()), world.aborts[rank].set("changed our minds"))  # noqa: E731
    threading.Timer(0.2, abort).start()
    with pytest.raises(GroupBroken, match="changed our minds"):
        world.connect(rank, replace(MEETING, timeout=100.0))
    assert time.monotonic() - when[0] < 5
    world.close()


@pytest.mark.parametrize("nodes", ["a", "ab"])
def test_a_peer_still_in_an_older_epoch_is_called_again(nodes, open_files):
    """Rank 0 hears of the new epoch later than rank 1, whose first calls it turns away."""
    world = World(2, nodes)
    old, new = MEETING, replace(MEETING, epoch=2, key=bytes(32))
    late: list[Any] = []

    def first() -> None:
        with pytest.raises(GroupBroken, match="over"):
            world.connect(0, old)
        world.aborts[0] = Abort()
        late.append(world.connect(0, new))

    stale = world.aborts[0]

    def hear() -> None:
        assert wait_until(lambda: world.doors[0].refused >= 1, 30)
        stale.set("epoch 1 is over")

    threads = [threading.Thread(target=work) for work in (first, hear)]
    for thread in threads:
        thread.start()
    groups = world.connect(1, replace(new, timeout=60.0))
    for thread in threads:
        thread.join()
    assert world.doors[0].refused >= 1
    stale.close()
    world.close([groups, *late])


def test_different_keys_never_meet(monkeypatch, open_files):
    monkeypatch.setattr("phalanx.distributed.bootstrap._TURNED_AWAY_S", 0.3)
    world = World(2, "ab")
    short = replace(MEETING, timeout=1.0)
    results = world.all([short, replace(short, key=bytes(32))])
    assert "waited 1 s for rank 1" in str(results[0]) and "turned away" in str(results[0])
    assert "Rank 1 was turned away by rank 0" in str(results[1])
    world.close(results)


def test_different_ideas_of_the_group_are_named(open_files):
    world = World(3, "abc")
    meetings = [replace(MEETING, timeout=1.0)] * 3
    results = world.all(meetings, [Mesh(tp=3), Mesh(tp=3), Mesh(pp=3)])
    assert not any(isinstance(r, Groups) for r in results)
    world.close(results)


def test_epoch_after_epoch_over_the_same_doors(open_files):
    world = World(3, "aab")
    for epoch in range(5):
        meeting = Meeting(epoch, os.urandom(32), epoch % 2 == 1, 10.0, 10.0)
        results = world.all([meeting] * 3)
        assert [type(groups.tp) for groups in results] == [TcpGroup] * 3
        for groups in results:
            close_groups(groups)
    assert all(door.refused == 0 for door in world.doors)
    world.close()


def test_one_rank_needs_nobody(open_files):
    world = World(1)
    groups = world.connect(0, MEETING)
    assert all(type(getattr(groups, axis)) is SingleGroup for axis in AXES)
    world.close([groups])


def test_an_address_that_is_not_ours_is_refused(open_files):
    with pytest.raises(OSError, match="assign"):
        Door(0, "192.0.2.1")


def test_node_names():
    assert node_id() == node_id() and "/net:[" in node_id()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(Address(1, "n", "u")), type=Address) == Address(1, "n", "u")


def test_a_full_queue_of_callers_is_waited_for(open_files):
    """A Unix socket refuses callers while its queue is full; the next try comes when there is room."""
    world = World(2)
    crowd = []
    for _ in range(300):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        if sock.connect_ex(f"\0{world.roster[0].unix}"):
            sock.close()
            break
        crowd.append(sock)
    assert len(crowd) > 200
    results = world.all([MEETING] * 2, delays=(0.3, 0.0))
    assert [type(groups.tp) for groups in results] == [SharedMemoryGroup] * 2
    for sock in crowd:
        sock.close()
    world.close(results)


def quiet(member: Member) -> None:
    member.tell("here")
    member.ask()


def test_processes_share_no_descriptor_they_do_not_need():
    """A rank has the memory of its own two groups, and nothing of others."""
    with Ranks(quiet, 4, mesh=Mesh(tp=2, pp=2)) as ranks:
        assert [ranks.hear(rank) for rank in range(4)] == ["here"] * 4
        counts = []
        for pid, _ in ranks.processes:
            files = [f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd")]
            counts.append(len({os.stat(file).st_ino for file in files if "memfd:phalanx" in os.readlink(file)}))
        assert counts == [2] * 4
        for rank in range(4):
            ranks.tell(rank, None)
        ranks.outcomes(60)

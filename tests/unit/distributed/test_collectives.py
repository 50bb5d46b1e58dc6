"""The group of one, and handles that outlive an epoch's group."""

import inspect

import pytest
import torch

from phalanx.distributed.collectives import Group, GroupHandle, Groups, SingleGroup
from phalanx.distributed.transports.abort import Abort, GroupBroken, PeerLost
from phalanx.distributed.transports.compressed import CompressedGroup
from phalanx.distributed.transports.shared_memory import SharedMemoryGroup
from phalanx.distributed.transports.tcp import TcpGroup

OPERATIONS = {name for name, member in vars(Group).items() if inspect.isfunction(member) and name[0] != "_"}


class Recorder(SingleGroup):
    """Says which group it is."""

    def __init__(self, name: str, rank: int = 1, size: int = 3):
        self.name, self.rank, self.size = name, rank, size

    def all_reduce(self, tensor):
        return f"{self.name} {tensor}"


def test_a_group_of_one_is_the_identity():
    group, x = SingleGroup(), torch.ones(2, 3)
    assert group.all_reduce(x) is x and group.broadcast(x, 0) is x
    assert group.all_gather(x, 1, [3]) is x and group.reduce_scatter(x, 0, [2]) is x
    assert group.all_to_all([x], [(2, 3)])[0] is x and group.barrier() is None
    with pytest.raises(ValueError, match="nobody"):
        group.send(x, 0)
    with pytest.raises(ValueError, match="nobody"):
        group.recv((1,), torch.float32, 0)


@pytest.mark.parametrize("kind", [SingleGroup, SharedMemoryGroup, TcpGroup, CompressedGroup, GroupHandle])
def test_every_group_has_every_operation(kind):
    assert {"all_reduce", "all_to_all", "barrier"} < OPERATIONS and len(OPERATIONS) == 11
    for name in OPERATIONS:
        assert callable(getattr(kind, name))
    assert set(GroupHandle._OPERATIONS) == OPERATIONS


def test_a_handle_follows_the_epoch():
    handle = GroupHandle(1, 3)
    with pytest.raises(GroupBroken, match="not connected"):
        handle.all_reduce("x")
    handle.bind(Recorder("first"))
    assert handle.all_reduce("x") == "first x"
    handle.bind(Recorder("second"))
    assert handle.all_reduce("x") == "second x"
    handle.unbind()
    handle.unbind()
    for name in OPERATIONS:
        with pytest.raises(GroupBroken, match="not connected"):
            getattr(handle, name)()


@pytest.mark.parametrize(("rank", "size"), [(0, 3), (1, 2), (1, 4)])
def test_a_handle_stays_the_same_rank(rank, size):
    with pytest.raises(ValueError, match="cannot become"):
        GroupHandle(1, 3).bind(Recorder("other", rank, size))


def test_groups_behind_handles():
    groups = Groups(tp=Recorder("first"), pp=Recorder("stages", 0, 2))
    handles = groups.handles()
    assert handles.dp is groups.dp and handles.cp is groups.cp  # no handle for a group of one
    kept = handles.tp  # as a layer keeps it
    assert kept.all_reduce("x") == "first x" and (kept.rank, kept.size) == (1, 3)
    handles.bind(Groups(tp=Recorder("second"), pp=Recorder("stages", 0, 2)))
    assert kept.all_reduce("x") == "second x"
    handles.unbind()
    with pytest.raises(GroupBroken):
        kept.barrier()
    with pytest.raises(ValueError, match="cannot become"):
        handles.bind(Groups(tp=Recorder("second")))
    with pytest.raises(ValueError, match="not a handle"):
        groups.bind(Groups())


def test_only_the_first_reason_counts():
    abort = Abort()
    abort.check()
    abort.set("one")
    abort.set("two")
    with pytest.raises(GroupBroken, match="aborted: one"):
        abort.check()
    abort.close()
    abort.close()
    assert abort.fileno() == -1
    late = Abort()
    late.close()
    late.set("after closing")
    assert late.reason == "after closing"


def test_a_lost_peer_says_that_the_cause_is_elsewhere():
    assert PeerLost("x").code == "peer_lost" and isinstance(PeerLost("x"), GroupBroken)

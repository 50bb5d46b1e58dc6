"""Process groups of torch.distributed behind `Group`.

NCCL itself needs a GPU a rank; what lies around it (store, adapter, abort, the detour through the host) runs on CPU
tensors with gloo in its place.
"""

import os
import threading
import time
from datetime import timedelta

import psutil
import pytest
import torch

from phalanx.distributed.transports.abort import Abort, GroupBroken
from phalanx.distributed.transports.nccl import StagedGroup, TorchGroup, connect_nccl, meet_in_store
from tests.helpers.exchanges import exchange_at_random
from tests.helpers.rank_spawner import Member, run_ranks


def gloo(member: Member) -> TorchGroup:
    from torch.distributed import ProcessGroupGloo

    store = meet_in_store(member.tp, "127.0.0.1", timedelta(seconds=20))
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=20)
    return TorchGroup(ProcessGroupGloo(store, member.tp.rank, member.tp.size, options), range(9), member.abort)


def at_random(member: Member, kind: str) -> list[str]:
    group = gloo(member) if kind == "torch" else StagedGroup(member.tp, torch.device("cpu"))
    return [exchange_at_random(group, seed, 60, 20_000) for seed in range(3)]


@pytest.mark.parametrize(("kind", "size"), [("torch", 2), ("staged", 2), ("staged", 3)])
def test_every_operation(kind, size):
    digests = run_ranks(at_random, size, kind)
    assert len(set(map(tuple, digests))) == 1


def listening(member: Member) -> list[str]:
    store = meet_in_store(member.tp, "127.0.0.1", timedelta(seconds=20))
    store.set(f"key{member.rank}", "value")
    member.tp.barrier()
    assert store.get(f"key{1 - member.rank}") == b"value"
    found = [c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    member.tp.barrier()
    return found


def test_the_store_listens_on_one_address():
    first, second = run_ranks(listening, 2)
    assert set(first) == {"127.0.0.1"}  # its own, and the test's door
    assert len(first) == len(second) + 1


class Stuck:
    """A backend and its work in one: waits until it is aborted."""

    def __init__(self) -> None:
        self.broken = threading.Event()

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def barrier(self) -> "Stuck":
        return self

    def wait(self) -> None:
        self.broken.wait(100)
        raise RuntimeError("communicator was aborted\nand a long C++ trace")

    def abort(self) -> None:
        self.broken.set()


def test_an_abort_breaks_the_backend():
    abort = Abort()
    group = TorchGroup(Stuck(), [4, 7], abort)
    threading.Timer(0.1, lambda: abort.set("enough")).start()
    start = time.monotonic()
    with pytest.raises(GroupBroken, match="enough"):
        group.barrier()
    assert time.monotonic() - start < 10
    with pytest.raises(GroupBroken, match="enough"):
        group.barrier()
    group.close()
    abort.close()


def test_errors_of_the_backend_are_one_line():
    abort = Abort()
    group = TorchGroup(Stuck(), [4, 7], abort)
    group.close()  # which aborts the backend
    with pytest.raises(GroupBroken, match=r"Rank 4's exchange failed: communicator was aborted\.$"):
        group.barrier()
    abort.close()


def closed(member: Member) -> int:
    counts = []
    for _ in range(5):
        group = gloo(member)
        group.all_reduce(torch.ones(5))
        member.tp.barrier()
        group.close()
        group.close()
        del group
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts[-1] - counts[0]


def test_nothing_is_left_after_closing():
    assert max(run_ranks(closed, 2)) <= 0


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs two GPUs for two ranks")
def test_nccl():
    run_ranks(on_gpus, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_ranks_that_share_a_gpu_take_the_detour():
    run_ranks(shared_gpu, 2)


def on_gpus(member: Member) -> None:
    device = torch.device("cuda", member.rank)
    torch.cuda.set_device(device)
    group = connect_nccl(member.tp, [0, 1], device, "127.0.0.1", member.abort, 30.0)
    check_on_device(group, device)
    group.close()


def shared_gpu(member: Member) -> None:
    device = torch.device("cuda", 0)
    check_on_device(StagedGroup(member.tp, device), device)


def check_on_device(group: TorchGroup | StagedGroup, device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = torch.full((1000,), group.rank + 1, dtype=dtype, device=device)
        assert (group.all_reduce(x.clone()) == 3).all()
        assert group.all_gather(x[: 10 + group.rank], 0, [10, 11]).tolist() == [1] * 10 + [2] * 11
        assert group.reduce_scatter(x, 0, [300, 700]).tolist() == [3] * (300 + 400 * group.rank)
        got = group.all_to_all([x[:5], x[:7]], [(5 + 2 * group.rank,)] * 2)
        assert [part[0].item() for part in got] == [1, 2] and got[0].device == device
        assert (group.broadcast(x, 1) == 2).all()
        if group.rank == 0:
            group.send(x, 1)
        else:
            assert (group.recv((1000,), dtype, 0) == 1).all()
    group.barrier()

"""Every operation of a group, over every transport, against plain torch."""

import pytest
import torch

from phalanx.distributed.transports import shared_memory
from tests.helpers.exchanges import DTYPES, exchange_at_random, same, stretched, tensor, total
from tests.helpers.rank_spawner import TRANSPORTS, Member, run_ranks

transports = pytest.mark.parametrize("transport", TRANSPORTS)
SLOT = shared_memory.SLOT


def at_random(member: Member, seeds: list[int], steps: int, most: int) -> list[str]:
    return [exchange_at_random(member.tp, seed, steps, most) for seed in seeds]


@transports
@pytest.mark.parametrize("size", [2, 3, 5])
def test_random_sequences(transport, size):
    digests = run_ranks(at_random, size, list(range(11 * size, 11 * size + 4)), 100, 40_000, transport=transport)
    assert len(set(map(tuple, digests))) == 1


@pytest.mark.slow
@transports
@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_many_random_sequences(transport, size):
    digests = run_ranks(at_random, size, list(range(8)), 80, 300_000, transport=transport, timeout=200)
    assert len(set(map(tuple, digests))) == 1


def seven(member: Member) -> bool:
    exchange_at_random(member.tp, 5, 20, 2000)
    return True


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_seven_ranks_on_few_cores(transport):
    assert run_ranks(seven, 7, transport=transport) == [True] * 7


def large(member: Member) -> bool:
    """Longer than a slot, and not a whole number of slots, for each operation and dtype."""
    group, size, me = member.tp, member.tp.size, member.rank
    for dtype in DTYPES:
        n = (2 * SLOT + SLOT // 3) // dtype.itemsize + 1
        parts = [tensor((r, dtype), [n], dtype) for r in range(size)]
        expected = total(parts)
        same(group.all_reduce(parts[me].clone()), expected, f"all_reduce {dtype}")
        lengths = [n - 5 * r for r in range(size)]
        gathered = group.all_gather(parts[me][: lengths[me]], 0, lengths)
        same(gathered, torch.cat([p[:m] for p, m in zip(parts, lengths, strict=True)]), f"all_gather {dtype}")
        cut = [7, *[0] * (size - 2), n - 7]
        same(group.reduce_scatter(parts[me], 0, cut), expected.split(cut)[me], f"reduce_scatter {dtype}")
        back = group.all_to_all([parts[me][: n // 2 + to] for to in range(size)], [(n // 2 + me,)] * size)
        for r in range(size):
            same(back[r], parts[r][: n // 2 + me], f"all_to_all {dtype}")
        same(group.broadcast(parts[me], size - 1), parts[-1], f"broadcast {dtype}")
        if me == 0:
            group.send(parts[0], 1)
        elif me == 1:
            same(group.recv((n,), dtype, 0), parts[0], f"send {dtype}")
    return True


@transports
@pytest.mark.parametrize("size", [2, 3])
def test_tensors_longer_than_a_slot(transport, size):
    assert run_ranks(large, size, transport=transport) == [True] * size


def wide(member: Member) -> bool:
    """Rows of which one alone is longer than a slot, gathered along the last dimension."""
    n = SLOT // 4
    parts = [tensor(r, [3, n + 10 * r], torch.float32) for r in range(member.tp.size)]
    lengths = [p.shape[1] for p in parts]
    same(member.tp.all_gather(stretched(parts[member.rank]), 1, lengths), torch.cat(parts, 1), "wide rows")
    many = [p[:, : 50 + r].repeat(9000, 1) for r, p in enumerate(parts)]
    lengths = [p.shape[1] for p in many]
    same(member.tp.all_gather(many[member.rank], -1, lengths), torch.cat(many, 1), "many rows")
    return True


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_gathering_columns(transport):
    assert run_ranks(wide, 3, transport=transport) == [True] * 3


def odd_shapes(member: Member) -> bool:
    group, me = member.tp, member.rank
    same(group.all_reduce(torch.tensor(2.5)), torch.tensor(5.0), "a number")
    same(group.all_reduce(torch.ones(1, 1).expand(3, 4)), torch.full((3, 4), 2.0), "an expanded tensor")
    for shape in ((0,), (3, 0), (0, 3)):
        empty = torch.empty(shape)
        same(group.all_reduce(empty), empty, "empty")
        same(group.broadcast(empty, 1), empty, "empty")
        same(group.all_gather(empty, 0, [shape[0]] * 2), torch.cat([empty, empty]), "empty")
    same(group.all_gather(torch.ones(3, me), 1, [0, 1]), torch.ones(3, 1), "an empty share")
    if me == 0:
        group.send(torch.empty(0, 4), 1)
        group.send(torch.arange(3), 1)
    else:
        same(group.recv((0, 4), torch.float32, 0), torch.empty(0, 4), "empty")
        same(group.recv((3,), torch.int64, 0), torch.arange(3), "integers")
    for shape in ([5], [2, 3], [1, 2, 3], [5]):  # the small sum's shapes are remembered
        x = tensor((me, shape), shape, torch.float32)
        same(group.all_reduce(x.clone()), total([tensor((r, shape), shape, torch.float32) for r in (0, 1)]), "small")
    return True


@transports
def test_odd_shapes(transport):
    assert run_ranks(odd_shapes, 2, transport=transport) == [True] * 2


def ahead(member: Member) -> bool:
    """Sends as far as the mailbox goes before anything is read, both ways at once."""
    other = 1 - member.rank
    for turn in range(50):
        for i in range(2):
            member.tp.send(torch.tensor([turn, i, member.rank]), other)
        for i in range(2):
            same(member.tp.recv((3,), torch.int64, other), torch.tensor([turn, i, other]), "ahead")
        if turn % 3 == 0:
            member.tp.barrier()
    return True


@transports
def test_sends_that_run_ahead(transport):
    assert run_ranks(ahead, 2, transport=transport) == [True] * 2

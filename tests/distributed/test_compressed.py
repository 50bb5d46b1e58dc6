"""Packed tensors: the error's bound, the same bits on every rank, and what travels as it is."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.distributed.collectives import Group
from phalanx.distributed.transports.compressed import AT_LEAST, BLOCK, CompressedGroup, pack, packed_bytes, unpack
from phalanx.distributed.transports.sums import as_bytes
from tests.helpers.exchanges import exchange_at_random, tensor
from tests.helpers.rank_spawner import Member, run_ranks

EPSILON = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


def bound(x: torch.Tensor) -> torch.Tensor:
    """The most by which an entry may arrive wrong: largest / 254 of its block, and its rounding to the dtype."""
    flat = x.float().reshape(-1)
    lacking = -flat.numel() % BLOCK
    blocks = torch.cat([flat, flat.new_zeros(lacking)]).view(-1, BLOCK)
    largest = blocks.abs().amax(1, keepdim=True).expand_as(blocks).reshape(-1)[: flat.numel()].view(x.shape)
    return largest / 254 * 1.0001 + largest * EPSILON[x.dtype] + (2.0**-24 if x.dtype == torch.float16 else 1.3e-35)


@settings(max_examples=150)
@given(
    count=st.integers(0, 700),
    seed=st.integers(0, 1 << 30),
    size=st.integers(-120, 120),
    dtype=st.sampled_from(list(EPSILON)),
)
def test_the_bound_holds_at_every_size_and_magnitude(count, seed, size, dtype):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator) ** 3 * 2.0**size
    largest = 6e4 if dtype == torch.float16 else 3e38
    x = x.clamp(-largest, largest).to(dtype)
    data = pack(x)
    assert data.numel() == packed_bytes(count) and data.dtype == torch.uint8
    back = unpack(data, x.shape, dtype)
    assert back.dtype == dtype and back.shape == x.shape
    assert ((back.double() - x.double()).abs() <= bound(x).double()).all()


def test_it_takes_a_quarter_of_float32_and_half_of_bfloat16():
    assert packed_bytes(1 << 20) == (1 << 20) * (1 + 4 / BLOCK)


def test_what_is_no_number_stays_no_number_and_spoils_its_block_only():
    x = torch.ones(3 * BLOCK)
    x[5], x[BLOCK + 7] = torch.nan, torch.inf
    back = unpack(pack(x), x.shape, x.dtype)
    assert back[: 2 * BLOCK].isnan().all()
    assert torch.equal(back[2 * BLOCK :], x[2 * BLOCK :])


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(as_bytes(x.contiguous()).numpy().tobytes()).hexdigest()


def packed(member: Member, dtype: torch.dtype, seed: int) -> tuple[dict[str, str], dict[str, float]]:
    """Digests of what must be equal everywhere, and how large each error is compared with its bound."""
    group: Group = CompressedGroup(member.tp, 1024)
    size, me = group.size, member.rank
    parts = [tensor((seed, r), [24, 40 * size], dtype) for r in range(size)]
    exact = sum((part.double() for part in parts), torch.zeros(24, 40 * size, dtype=torch.float64))
    found, errors = {}, {}

    def look(name: str, got: torch.Tensor, expected: torch.Tensor, most: torch.Tensor) -> None:
        assert got.dtype == dtype and got.shape == expected.shape, name
        errors[name] = float(((got.double() - expected.double()).abs() / most.double()).max())

    each = [bound(part.reshape(-1)).amax() for part in parts]
    given = parts[me].clone()
    total = group.all_reduce(given)
    # every other rank's part, then the sum itself; blocks are cut elsewhere, hence the largest bound
    look("all_reduce", total, exact, sum(each) + bound(exact.to(dtype).reshape(-1)).amax() * 2)
    assert torch.equal(given, parts[me])
    found["all_reduce"] = digest(total)
    for dim in (0, -1):
        lengths = [8 + 8 * r for r in range(size)]
        mine = [part.narrow(dim, 0, n) for part, n in zip(parts, lengths, strict=True)]
        joined = group.all_gather(mine[me], dim, lengths)
        look(f"all_gather {dim}", joined, torch.cat(mine, dim), torch.stack(each).amax())
        found[f"all_gather {dim}"] = digest(joined)
    scattered = group.reduce_scatter(parts[me], 1, [40] * size)
    look("reduce_scatter", scattered, exact[:, 40 * me : 40 * me + 40], sum(each))
    for source in range(size):
        sent = group.broadcast(parts[me], source)
        look(f"broadcast {source}", sent, parts[source], each[source])
        found[f"broadcast {source}"] = digest(sent)
    pieces = [part.flatten() for part in parts]
    sizes = [[(10 + 700 * ((a + b) % 2),) for b in range(size)] for a in range(size)]  # below and above the threshold
    outgoing = [pieces[me][: sizes[me][to][0]] for to in range(size)]
    for r, got in enumerate(group.all_to_all(outgoing, [sizes[r][me] for r in range(size)])):
        look(f"all_to_all {r}", got, pieces[r][: sizes[r][me][0]], each[r])
        if sizes[r][me][0] == 10 or r == me:
            assert torch.equal(got, pieces[r][: sizes[r][me][0]])
    if me == 0:
        group.send(parts[0], 1)
    elif me == 1:
        look("send", group.recv(tuple(parts[0].shape), dtype, 0), parts[0], each[0])
    group.barrier()
    return found, errors


@pytest.mark.parametrize("dtype", list(EPSILON), ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_every_operation_is_within_its_bound_and_the_same_everywhere(size, dtype):
    outcomes = run_ranks(packed, size, dtype, 7 * size, transport="tcp")
    assert all(found == outcomes[0][0] for found, _ in outcomes)
    for _, errors in outcomes:
        assert max(errors.values()) <= 1, errors
        assert min(errors["all_reduce"], errors["broadcast 1"]) > 0, "nothing was packed"


def as_it_is(member: Member) -> str:
    group = CompressedGroup(member.tp, 1 << 30)
    digest = exchange_at_random(group, 5, 60, 20_000)
    small = CompressedGroup(member.tp)
    x = torch.randn(AT_LEAST // 4 - 1)
    assert torch.equal(small.broadcast(x, 0), member.tp.broadcast(x, 0))
    wide = torch.arange(1 << 16)
    assert torch.equal(small.all_reduce(wide), wide * member.tp.size)
    assert small.describe() == {**member.tp.describe(), "compressed_from_bytes": AT_LEAST}
    return digest


def test_small_tensors_and_integers_travel_as_they_are():
    assert len(set(run_ranks(as_it_is, 3, transport="tcp"))) == 1


def one_packs(member: Member) -> None:
    group: Group = member.tp if member.rank else CompressedGroup(member.tp, 1024)
    group.broadcast(torch.zeros(1000), 0)


def test_ranks_that_disagree_about_packing_find_out():
    with pytest.raises(
        AssertionError, match=r"broadcast of 1032 bytes of uint8, not .*broadcast of 4000 bytes of float32"
    ):
        run_ranks(one_packs, 2, transport="tcp")

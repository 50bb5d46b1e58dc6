"""Random sequences of exchanges, the same on all ranks, checked against plain torch."""

import hashlib
import random

import torch

from phalanx.distributed.collectives import Group
from phalanx.distributed.transports.sums import as_bytes

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8)


def tensor(seed: object, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """The tensor of this name."""
    random_numbers = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(repr(seed).encode()).digest()[:7]))
    if dtype.is_floating_point:
        return torch.randn(shape, generator=random_numbers).to(dtype)
    return torch.randint(0, 100, shape, generator=random_numbers).to(dtype)


def total(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum in rank order; of more than two narrow floats in float32, rounded once."""
    narrow = len(parts) > 2 and parts[0].dtype in (torch.bfloat16, torch.float16)
    result = parts[0].float() if narrow else parts[0].clone()
    for part in parts[1:]:
        result = result + part
    return result.to(parts[0].dtype)


def same(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if actual.dtype != expected.dtype or actual.shape != expected.shape or not torch.equal(actual, expected):
        raise AssertionError(f"{what}: {actual.dtype} {tuple(actual.shape)} is not as expected")


def stretched(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, not contiguous in memory."""
    if x.dim() >= 2:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    wide = x.new_zeros([*x.shape, 2])
    wide[..., 0] = x
    return wide[..., 0]


def exchange_at_random(group: Group, seed: int, steps: int, most: int) -> str:
    """`steps` exchanges of at most about `most` entries. Returns a digest of what must be equal on all ranks."""
    plan, size, me = random.Random(seed), group.size, group.rank
    digest = hashlib.sha256()

    def shape() -> list[int]:
        result, left = [], plan.choice((0, 1, 7, 100, 3000, most))
        for _ in range(plan.randint(0, 2)):
            result.append(plan.randint(0 if left == 0 else 1, max(1, min(left, 9))))
            left //= max(result[-1], 1)
        plan.shuffle(result := [*result, left])
        return result

    for step in range(steps):
        what = plan.choice(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "barrier"))
        dtype, extent = plan.choice(DTYPES), shape()
        scattered, dim = plan.random() < 0.3, plan.randrange(len(extent))
        lengths = [plan.randint(0, 2 * extent[dim] // size + 1) for _ in range(size)]
        name = f"step {step}, {what} {dtype} {extent} dim {dim} {lengths}"

        def one(rank: int, extent: list[int], step: int = step, dtype: torch.dtype = dtype) -> torch.Tensor:
            return tensor((seed, step, rank), extent, dtype)

        def given(x: torch.Tensor, scattered: bool = scattered) -> torch.Tensor:
            return stretched(x) if scattered else x.clone()

        def cut(n: int, extent: list[int] = extent, dim: int = dim) -> list[int]:
            return [*extent[:dim], n, *extent[dim + 1 :]]

        match what:
            case "all_reduce":
                result = group.all_reduce(given(one(me, extent)))
                same(result, total([one(r, extent) for r in range(size)]), name)
                digest.update(as_bytes(result.contiguous()).numpy().tobytes())
            case "all_gather":
                result = group.all_gather(given(one(me, cut(lengths[me]))), dim, lengths)
                same(result, torch.cat([one(r, cut(n)) for r, n in enumerate(lengths)], dim), name)
            case "reduce_scatter":
                whole = cut(sum(lengths))
                result = group.reduce_scatter(given(one(me, whole)), dim, lengths)
                same(result, total([one(r, whole) for r in range(size)]).split(lengths, dim)[me], name)
            case "all_to_all":
                table = [[cut(plan.randint(0, extent[dim])) for _ in range(size)] for _ in range(size)]
                mine = [given(one((me, to), table[me][to])) for to in range(size)]
                result = group.all_to_all(mine, [tuple(table[r][me]) for r in range(size)])
                for r in range(size):
                    same(result[r], one((r, me), table[r][me]), name)
            case "broadcast":
                source = plan.randrange(size)
                result = group.broadcast(given(one(me, extent)), source)
                same(result, one(source, extent), name)
            case "send":
                source, to = plan.sample(range(size), 2)
                if me == source:
                    group.send(given(one(me, extent)), to)
                elif me == to:
                    same(group.recv(tuple(extent), dtype, source), one(source, extent), name)
            case "barrier":
                group.barrier()
    return digest.hexdigest()

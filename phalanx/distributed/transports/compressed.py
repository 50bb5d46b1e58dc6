"""A group between nodes that sends large floating-point tensors as 8-bit integers, for links that are slow.

A tensor travels in blocks of 128 entries, each with a float32 scale: its largest magnitude / 127. So an entry arrives
within largest / 254 of its block's, and takes 1.03 bytes instead of 4 or 2. What is shared by all ranks (`all_gather`,
`broadcast`, and so `all_reduce`) its own sender takes in as the others do, so that all ranks still hold the same bits.
Sums are taken in float32, in rank order; a rank's own part of a sum is exact. A block with an infinity or a NaN arrives
as NaN. Integers, and tensors below `at_least` bytes, travel as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from phalanx.distributed.collectives import OpenGroup
from phalanx.distributed.transports.sums import as_bytes, slices

BLOCK = 128
AT_LEAST = 1 << 16
"""Bytes. Smaller tensors wait for the link's latency, not for its bandwidth."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_SCALE = 4
"""Bytes of a scale."""
_NOTHING = 1e-37
"""A block with a smaller scale arrives as zeros."""


def packed_bytes(count: int) -> int:
    """What `count` entries take when packed: the scales, then the entries."""
    return -(-count // BLOCK) * _SCALE + count


def pack(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes [packed_bytes(entries)] of a floating-point tensor of any shape."""
    flat = tensor.reshape(-1).float()
    count = flat.numel()
    out = torch.empty(packed_bytes(count), dtype=torch.uint8, device=flat.device)
    at = out.numel() - count
    blocks = _in_blocks(flat)
    least, most = blocks.aminmax(dim=1, keepdim=True) if count else (blocks, blocks)
    scales = torch.maximum(most, -least).div_(127.0)
    scales[~scales.isfinite()] = torch.nan
    inverse = torch.where(scales > _NOTHING, 1.0 / scales, 0.0)
    out[:at] = as_bytes(scales)
    out[at:].view(torch.int8).copy_((blocks * inverse).round_().view(-1)[:count])
    return out


def _in_blocks(flat: torch.Tensor) -> torch.Tensor:
    """[blocks, BLOCK]; the last one filled up with zeros."""
    lacking = -flat.numel() % BLOCK
    return (F.pad(flat, (0, lacking)) if lacking else flat).view(-1, BLOCK)


def unpack(data: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """What `pack` made of a tensor of this shape, in `dtype`."""
    count = torch.Size(shape).numel()
    at = -(-count // BLOCK) * _SCALE
    scales = data[:at].clone().view(torch.float32).unsqueeze(1)
    return _in_blocks(data[at:].view(torch.int8).float()).mul_(scales).view(-1)[:count].view(tuple(shape)).to(dtype)


class CompressedGroup:
    """`group`, and packing in front of it. All members must be made alike."""

    def __init__(self, group: OpenGroup, at_least: int = AT_LEAST):
        self.rank, self.size = group.rank, group.size
        self._group, self._at_least = group, at_least

    def describe(self) -> dict[str, Any]:
        return {**self._group.describe(), "compressed_from_bytes": self._at_least}

    def _packs(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        return dtype in _FLOATS and torch.Size(shape).numel() * dtype.itemsize >= self._at_least

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._packs(tensor.shape, tensor.dtype):
            return self._group.all_reduce(tensor)
        flat = tensor.reshape(-1)
        lengths = [last - first for first, last in slices(flat.numel(), self.size)]
        mine = self._scatter(torch.split(flat, lengths))
        return torch.cat(self._gather(mine, [(length,) for length in lengths])).view(tensor.shape)

    def all_gather(self, tensor: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        before, after = tensor.shape[:dim], tensor.shape[dim:][1:]
        if tensor.shape[dim] != lengths[self.rank] or not self._packs((*before, sum(lengths), *after), tensor.dtype):
            return self._group.all_gather(tensor, dim, lengths)
        return torch.cat(self._gather(tensor, [(*before, length, *after) for length in lengths]), dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        if tensor.shape[dim] != sum(lengths) or not self._packs(tensor.shape, tensor.dtype):
            return self._group.reduce_scatter(tensor, dim, lengths)
        return self._scatter(torch.split(tensor, list(lengths), dim))

    def all_to_all(self, tensors: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        dtype = tensors[0].dtype
        if dtype not in _FLOATS:
            return self._group.all_to_all(tensors, shapes)
        outgoing = [pack(t) if self._packs(t.shape, dtype) else as_bytes(t.contiguous()) for t in tensors]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        packs = [self._packs(shape, dtype) for shape in shapes]
        incoming = self._group.all_to_all(
            outgoing,
            [(packed_bytes(n) if p else n * dtype.itemsize,) for n, p in zip(sizes, packs, strict=True)],
        )
        out = []
        for rank, (data, shape, packed) in enumerate(zip(incoming, shapes, packs, strict=True)):
            if rank == self.rank:
                out.append(tensors[rank])
            else:
                out.append(unpack(data, shape, dtype) if packed else data.view(dtype).view(shape))
        return out

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        if not self._packs(tensor.shape, tensor.dtype):
            return self._group.broadcast(tensor, source)
        if self.rank == source:
            data = pack(tensor)
        else:
            data = torch.empty(packed_bytes(tensor.numel()), dtype=torch.uint8, device=tensor.device)
        return unpack(self._group.broadcast(data, source), tensor.shape, tensor.dtype)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self._group.send(pack(tensor) if self._packs(tensor.shape, tensor.dtype) else tensor, to)

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> torch.Tensor:
        if not self._packs(shape, dtype):
            return self._group.recv(shape, dtype, source)
        data = self._group.recv((packed_bytes(torch.Size(shape).numel()),), torch.uint8, source)
        return unpack(data, shape, dtype)

    def barrier(self) -> None:
        self._group.barrier()

    def rounds(self, dtype: torch.dtype) -> None:
        return None

    def join_round(self) -> None:
        return None

    def close(self) -> None:
        """Idempotent."""
        self._group.close()

    def _gather(self, mine: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Every rank's tensor as it has travelled, this one's too."""
        sizes = [packed_bytes(torch.Size(shape).numel()) for shape in shapes]
        parts = torch.split(self._group.all_gather(pack(mine), 0, sizes), sizes)
        return [unpack(part, shape, mine.dtype) for part, shape in zip(parts, shapes, strict=True)]

    def _scatter(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """This rank's piece of the sum."""
        mine = pieces[self.rank]
        nothing = torch.empty(0, dtype=torch.uint8, device=mine.device)
        outgoing = [nothing if rank == self.rank else pack(piece) for rank, piece in enumerate(pieces)]
        incoming = self._group.all_to_all(outgoing, [(packed_bytes(mine.numel()),)] * self.size)
        total = torch.zeros(mine.shape, device=mine.device)
        for rank, data in enumerate(incoming):
            total += mine.float() if rank == self.rank else unpack(data, mine.shape, torch.float32)
        return total.to(mine.dtype)

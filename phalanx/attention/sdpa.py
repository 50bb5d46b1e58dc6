"""The reference backend: plain PyTorch on any device, every feature, float32 inside. Slow and always right.

Row by row it gathers the context's keys and values, one copy per query head, and does what the formula says. Other
backends are tested against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from phalanx.attention.base import AttentionShape, HeadNorm, LayerCache, Rotation, StepLayout


@dataclass(frozen=True)
class SdpaPlan:
    slots: list[torch.Tensor]
    """Per row, int64 [context]: where its keys and values are, as block * block_size + offset."""


class SdpaAttention:
    name = "sdpa"
    plays = False

    def allocate(
        self, shape: AttentionShape, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> LayerCache:
        """Zeros, on a CPU in memory that becomes resident only where it is written (torch.zeros would touch it all)."""
        size = (blocks, block_size, shape.num_kv_heads, shape.head_dim)

        def zeros() -> torch.Tensor:
            if device.type != "cpu":
                return torch.zeros(size, dtype=dtype, device=device)
            return torch.from_numpy(np.zeros(prod(size) * dtype.itemsize, np.uint8)).view(dtype).view(size)

        return LayerCache(zeros(), zeros())

    def plan(self, layout: StepLayout) -> SdpaPlan:
        offsets = torch.arange(layout.block_size, device=layout.block_tables.device)
        slots = []
        for row, context in enumerate(layout.context_lens):
            blocks = layout.block_tables[row, : -(-context // layout.block_size)].long()
            slots.append((blocks[:, None] * layout.block_size + offsets).flatten()[:context])
        return SdpaPlan(slots)

    def write(self, cache: LayerCache, key: torch.Tensor, value: torch.Tensor, layout: StepLayout) -> None:
        cache.key.flatten(0, 1).index_copy_(0, layout.slot_mapping, key)
        cache.value.flatten(0, 1).index_copy_(0, layout.slot_mapping, value)

    def attend(
        self, query: torch.Tensor, cache: LayerCache, layout: StepLayout, plan: SdpaPlan, shape: AttentionShape
    ) -> tuple[torch.Tensor, torch.Tensor]:
        head_map = torch.tensor(shape.kv_head_of, device=query.device)
        keys, values = cache.key.flatten(0, 1), cache.value.flatten(0, 1)
        output, lse = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)
        for row, slots in enumerate(plan.slots):
            start, stop = layout.query_start[row], layout.query_start[row + 1]
            if start == stop:
                continue
            key = keys[slots].index_select(1, head_map).float()
            value = values[slots].index_select(1, head_map).float()
            scores = torch.einsum("qhd,khd->hqk", query[start:stop].float(), key) * shape.scale
            if shape.soft_cap is not None:
                scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
            scores = scores.masked_fill(~visible(stop - start, len(slots), shape.window, query.device), -torch.inf)
            lse[start:stop] = scores.logsumexp(-1).T
            output[start:stop] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).to(query.dtype)
        return output, lse

    def attend_merged(
        self, qkv: torch.Tensor, cache: LayerCache, layout: StepLayout, plan: Any, shape: AttentionShape,
        q_norm: HeadNorm | None, k_norm: HeadNorm | None, turn: Rotation | None, query_factor: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        qkv = qkv.view(qkv.shape[0], heads + 2 * kv_heads, shape.head_dim)
        value = qkv[:, heads + kv_heads :]
        if q_norm is not None and k_norm is not None:
            query, key = q_norm.forward(qkv[:, :heads]), k_norm.forward(qkv[:, heads : heads + kv_heads])
            if turn is not None:
                query, key = turn(query), turn(key)
        else:
            both = qkv[:, : heads + kv_heads]
            if turn is not None:
                both = turn(both)
            query, key = both[:, :heads], both[:, heads:]
        if query_factor is not None:
            query = query * query_factor
        self.write(cache, key, value, layout)
        attended, _ = self.attend(query, cache, layout, plan, shape)
        return attended.reshape(qkv.shape[0], heads * shape.head_dim)


def visible(queries: int, context: int, window: int | None, device: torch.device) -> torch.Tensor:
    """bool [queries, context]: what the last `queries` positions of a context see."""
    positions = torch.arange(context, device=device)
    own = positions[context - queries :, None]
    seen = positions <= own
    return seen if window is None else seen & (positions > own - window)

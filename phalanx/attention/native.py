"""The native backend: one call a layer, from the merged product of query, key and value to the heads' results.

Its cache is in the order that its kernels read; see native/attention.hpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from phalanx.attention.base import AttentionShape, HeadNorm, LayerCache, Rotation, StepLayout
from phalanx.attention.sdpa import SdpaAttention
from phalanx.kernels.attention import PagedLayer, PagedStep, attend_cached, attend_merged, cache_shape, write_cache

_LINE = 64
"""Bytes of a cache line."""


@dataclass(frozen=True)
class NativeCache(LayerCache):
    layer: PagedLayer


class NativeAttention(SdpaAttention):
    name = "native"
    plays = True

    def allocate(
        self, shape: AttentionShape, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> NativeCache:
        """Zeros, in memory that becomes resident only where it is written."""
        size = cache_shape(dtype, blocks, block_size, shape.num_kv_heads, shape.head_dim)
        key, value = _zeros(size, dtype), _zeros(size, dtype)
        layer = PagedLayer(
            key, value, kv_head_of=shape.kv_head_of, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim,
            scale=shape.scale, window=shape.window, soft_cap=shape.soft_cap, blocks=blocks, block_size=block_size,
        )  # fmt: skip
        return NativeCache(key, value, layer)

    def plan(self, layout: StepLayout) -> PagedStep:  # type: ignore[override]
        return PagedStep(
            layout.query_start, layout.context_lens, layout.block_tables, layout.slot_mapping, layout.block_size
        )

    def write(self, cache: NativeCache, key: torch.Tensor, value: torch.Tensor, layout: StepLayout) -> None:  # type: ignore[override]
        write_cache(key, value, cache.layer, layout.slot_mapping)

    def attend(
        self, query: torch.Tensor, cache: NativeCache, layout: StepLayout, plan: PagedStep, shape: AttentionShape  # type: ignore[override]
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        return attend_cached(query, cache.layer, plan)

    def attend_merged(
        self, qkv: torch.Tensor, cache: NativeCache, layout: StepLayout, plan: PagedStep, shape: AttentionShape,  # type: ignore[override]
        q_norm: HeadNorm | None, k_norm: HeadNorm | None, turn: Rotation | None, query_factor: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        if q_norm is not None and q_norm.layer:  # a layer norm
            return super().attend_merged(qkv, cache, layout, plan, shape, q_norm, k_norm, turn, query_factor)
        return attend_merged(qkv, cache.layer, plan, q_norm, k_norm, turn, query_factor)


def _zeros(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that begin at a cache line."""
    nbytes = prod(size) * dtype.itemsize
    memory = np.zeros(nbytes + _LINE, np.uint8)
    start = -memory.ctypes.data % _LINE
    return torch.from_numpy(memory[start : start + nbytes]).view(dtype).view(size)

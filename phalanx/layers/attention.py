"""The attention layer: one product for query, key and value, norms, rotation, the cache, and the way out.

How the cache is written and read is the attention backend's business; which heads are this rank's comes in as
partitions. A KV head that several ranks need is on each of them.
"""

from __future__ import annotations

from typing import Any

import torch

from phalanx.attention.base import AttentionBackend, AttentionShape, LayerCache, StepLayout
from phalanx.distributed.partition import Partition
from phalanx.layers.layer import Layer
from phalanx.layers.linear import ColumnLinear, LinearContext, Output, RowLinear
from phalanx.layers.norm import Norm
from phalanx.layers.rotary import Turn


class Attention(Layer):
    """[T, hidden] -> the same; writes the step's keys and values into `cache`."""

    def __init__(
        self, name: str, hidden: int, shape: AttentionShape, heads: Partition, kv_heads: Partition,
        backend: AttentionBackend, context: LinearContext, *, qkv_bias: bool, out_bias: bool,
        q_norm: Norm | None, k_norm: Norm | None,
    ):  # fmt: skip
        self.shape = shape
        self.backend = backend
        dim = shape.head_dim
        queries, keys = heads.scaled(dim), kv_heads.scaled(dim)
        self.qkv = ColumnLinear(
            (Output(f"{name}.q", queries), Output(f"{name}.k", keys), Output(f"{name}.v", keys)),
            hidden,
            qkv_bias,
            context,
        )
        self.out = RowLinear(f"{name}.out", queries, hidden, out_bias, context)
        self.q_norm = q_norm
        self.k_norm = k_norm

    def forward(
        self, x: torch.Tensor, cache: LayerCache, layout: StepLayout, plan: Any, turn: Turn | None,
        query_factor: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """`turn` rotates query and key; `query_factor` [T, 1, 1] multiplies queries."""
        attended = self.backend.attend_merged(
            self.qkv.forward(x), cache, layout, plan, self.shape, self.q_norm, self.k_norm, turn, query_factor
        )
        return self.out.forward(attended)

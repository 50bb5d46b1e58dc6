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
        tokens, heads, kv_heads = x.shape[0], self.shape.num_heads, self.shape.num_kv_heads
        qkv = self.qkv.forward(x).view(tokens, heads + 2 * kv_heads, self.shape.head_dim)
        value = qkv[:, heads + kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm.forward(qkv[:, :heads]), self.k_norm.forward(qkv[:, heads : heads + kv_heads])
            if turn is not None:
                query, key = turn(query), turn(key)
        else:
            both = qkv[:, : heads + kv_heads]
            if turn is not None:
                both = turn(both)
            query, key = both[:, :heads], both[:, heads:]
        if query_factor is not None:
            query = query * query_factor
        self.backend.write(cache, key, value, layout)
        attended, _ = self.backend.attend(query, cache, layout, plan, self.shape)
        return self.out.forward(attended.reshape(tokens, heads * self.shape.head_dim))

"""The attention layer: one product for query, key and value, norms, rotation, the cache, and the way out.

How the cache is written and read is the attention backend's business; which heads are this rank's comes in as
partitions. A KV head that several ranks need is on each of them.
"""

from __future__ import annotations

from typing import Any

import torch

from phalanx.attention.base import AttentionBackend, AttentionShape, LayerCache, StepLayout
from phalanx.distributed.partition import Partition
from phalanx.kernels.tape import INNER, WIDE, CannotRecord, Tape
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

    def record(self, tape: Tape, x: int) -> None:
        """`forward`, from a buffer to the delta. Raises CannotRecord."""
        if not self.backend.plays or (self.q_norm is not None and self.q_norm.layer):
            raise CannotRecord("attention is not native")
        self.qkv.record(tape, x, WIDE)
        shape = self.shape
        tape.attend(WIDE, self.q_norm, self.k_norm, shape.num_heads, shape.num_kv_heads, shape.head_dim, INNER)
        self.out.record(tape, INNER)

    @property
    def widths(self) -> tuple[int, int]:
        """Numbers of a token in the first product, and before the second."""
        return self.qkv.width, self.shape.num_heads * self.shape.head_dim

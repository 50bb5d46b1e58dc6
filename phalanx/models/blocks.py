"""The blocks a decoder is made of, one class per dataflow, chosen by the type of the layer's spec."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.attention.base import AttentionBackend, AttentionShape, LayerCache, StepLayout
from phalanx.kernels.tape import DELTA, NORMED, STREAM, Tape
from phalanx.layers.attention import Attention
from phalanx.layers.layer import Layer
from phalanx.layers.linear import LinearContext
from phalanx.layers.mlp import FeedForward, GatedFeedForward
from phalanx.layers.norm import Norm
from phalanx.layers.rotary import Turn
from phalanx.models.spec import (
    AttentionSpec,
    GatedMlp,
    LayerSpec,
    NormSpec,
    PostNormLayer,
    PreNormLayer,
    RopeSpec,
)
from phalanx.models.split import Split


@dataclass(frozen=True)
class Step:
    """What all blocks of a step share."""

    layout: StepLayout
    plan: Any
    """The attention backend's."""
    turns: list[Turn]
    """By `BlockContext.ropes`."""
    query_factors: dict[int, torch.Tensor]
    """By `AttentionSpec.log_positions`."""


@dataclass(frozen=True)
class BlockContext:
    """What every block of one rank is built with."""

    hidden: int
    split: Split
    backend: AttentionBackend
    linear: LinearContext
    ropes: list[RopeSpec]
    """The rotary embeddings of this rank's layers; a step's `turns` are in this order."""


def attention_shape(spec: AttentionSpec, split: Split, rank: int) -> AttentionShape:
    """What `rank` computes of an attention layer."""
    return AttentionShape(
        num_heads=split.heads(spec).length(rank),
        num_kv_heads=split.kv_heads(spec).length(rank),
        head_dim=spec.head_dim,
        kv_head_of=split.kv_head_map(spec, rank),
        scale=spec.scale,
        window=spec.window,
        soft_cap=spec.soft_cap,
    )


def make_norm(name: str, spec: NormSpec, size: int, linear: LinearContext) -> Norm:
    return Norm(
        name, size, spec.kind, spec.eps, affine=spec.affine, wide=spec.wide, dtype=linear.dtype, memory=linear.memory
    )


def _attention(name: str, spec: AttentionSpec, context: BlockContext) -> Attention:
    linear, split = context.linear, context.split
    norms = [
        None if spec.qk_norm is None else make_norm(f"{name}.{which}", spec.qk_norm, spec.head_dim, linear)
        for which in ("q_norm", "k_norm")
    ]
    return Attention(
        name, context.hidden, attention_shape(spec, split, linear.rank), split.heads(spec), split.kv_heads(spec),
        context.backend, linear, qkv_bias=spec.qkv_bias, out_bias=spec.out_bias, q_norm=norms[0], k_norm=norms[1],
    )  # fmt: skip


def _feed_forward(name: str, layer: LayerSpec, context: BlockContext) -> GatedFeedForward | FeedForward:
    spec, inner = layer.mlp, context.split.inner(layer, context.linear.scheme.shard_unit)
    kind = GatedFeedForward if isinstance(spec, GatedMlp) else FeedForward
    return kind(name, context.hidden, inner, spec.activation, spec.bias, context.linear)


class Block(Layer, ABC):
    """Attention and a feed-forward layer around a residual stream [T, hidden]."""

    def __init__(self, name: str, spec: LayerSpec, context: BlockContext):
        self.spec = spec
        rope = spec.attention.rope
        self.turn = None if rope is None else context.ropes.index(rope)
        self.log_positions = spec.attention.log_positions
        self.attention = _attention(f"{name}.attention", spec.attention, context)
        self.mlp = _feed_forward(f"{name}.mlp", spec, context)
        self.attention_norm = make_norm(f"{name}.attention_norm", spec.attention_norm, context.hidden, context.linear)
        self.mlp_norm = make_norm(f"{name}.mlp_norm", spec.mlp_norm, context.hidden, context.linear)

    def attend(self, x: torch.Tensor, cache: LayerCache, step: Step) -> torch.Tensor:
        turn = None if self.turn is None else step.turns[self.turn]
        factor = None if self.log_positions is None else step.query_factors[self.log_positions]
        return self.attention.forward(x, cache, step.layout, step.plan, turn, factor)

    def new_tape(self) -> Tape:
        """Empty, with room for this block. Raises CannotRecord."""
        wide, inner = zip(self.attention.widths, self.mlp.widths, strict=True)
        return Tape(self.attention.qkv.context.dtype, self.attention_norm.size, max(wide), max(inner))

    @abstractmethod
    def forward(
        self, x: torch.Tensor, delta: torch.Tensor | None, cache: LayerCache, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The residual stream is x + delta, before and after: the sum is left to the norm that reads it next.
        May change `x` in place."""

    leaves_delta: bool

    @abstractmethod
    def record(self) -> Tape:
        """`forward` as a tape. Raises CannotRecord."""


class PreNormBlock(Block):
    """x + post(attention(norm(x))), then x + post(mlp(norm(x)))."""

    def __init__(self, name: str, spec: PreNormLayer, context: BlockContext):
        super().__init__(name, spec, context)
        self.attention_post_norm, self.mlp_post_norm = (
            None if norm is None else make_norm(f"{name}.{which}", norm, context.hidden, context.linear)
            for which, norm in (
                ("attention_post_norm", spec.attention_post_norm),
                ("mlp_post_norm", spec.mlp_post_norm),
            )
        )

    def forward(
        self, x: torch.Tensor, delta: torch.Tensor | None, cache: LayerCache, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        attended = self.attend(self.attention_norm.add(x, delta), cache, step)
        if self.attention_post_norm is not None:
            attended = self.attention_post_norm.forward(attended)
        fed = self.mlp.forward(self.mlp_norm.add(x, attended))
        if self.mlp_post_norm is not None:
            fed = self.mlp_post_norm.forward(fed)
        return x, fed

    leaves_delta = True

    def record(self) -> Tape:
        tape = self.new_tape()
        self.attention_norm.record(tape, STREAM, DELTA, NORMED)
        self.attention.record(tape, NORMED)
        if self.attention_post_norm is not None:
            self.attention_post_norm.record(tape, DELTA, None, DELTA)
        self.mlp_norm.record(tape, STREAM, DELTA, NORMED)
        self.mlp.record(tape, NORMED)
        if self.mlp_post_norm is not None:
            self.mlp_post_norm.record(tape, DELTA, None, DELTA)
        return tape


class PostNormBlock(Block):
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    def forward(
        self, x: torch.Tensor, delta: torch.Tensor | None, cache: LayerCache, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if delta is not None:
            x += delta
        x = self.attention_norm.add(x, self.attend(x, cache, step))
        return self.mlp_norm.add(x, self.mlp.forward(x)), None

    leaves_delta = False

    def record(self) -> Tape:
        tape = self.new_tape()
        self.attention.record(tape, STREAM)
        self.attention_norm.record(tape, STREAM, DELTA, STREAM)
        self.mlp.record(tape, STREAM)
        self.mlp_norm.record(tape, STREAM, DELTA, STREAM)
        return tape


def make_block(name: str, spec: LayerSpec, context: BlockContext) -> Block:
    match spec:
        case PreNormLayer():
            return PreNormBlock(name, spec, context)
        case PostNormLayer():
            return PostNormBlock(name, spec, context)

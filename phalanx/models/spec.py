"""What a model is: one frozen record that decoder, loader, worker memory, planner and support table all read.

A `DecoderSpec` holds one record per layer, so that layers may differ (windows, rotary bases, widths) without index
arrays. A different dataflow is a different layer type (`PreNormLayer`, `PostNormLayer`), never a flag. Every weight of
the model is listed by `tensors`, under one name of ours whatever the checkpoint calls it; a fused checkpoint tensor is
several of these. Covers no computation and no file names: those are in `models.decoder` and `models.families`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple

BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
CheckpointType = Literal["float32", "bfloat16", "float16", "quantized"]


@dataclass(frozen=True)
class NormSpec:
    kind: Literal["rms", "layer"]
    eps: float
    affine: bool = True
    """Has a weight (and, for a layer norm, a bias)."""
    wide: bool = False
    """The weight is kept and applied in float32, before the result is rounded to the activations' type."""


@dataclass(frozen=True)
class LinearScaling:
    """All frequencies divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class DynamicScaling:
    """NTK scaling whose base grows with the prompt, in steps of two, once it is longer than `trained` tokens."""

    factor: float
    trained: int


@dataclass(frozen=True)
class DynamicPowerScaling:
    """NTK scaling by 2^ceil(log2(prompt / trained) + 1) - 1, as Qwen 1 does when `use_dynamic_ntk` is set."""

    trained: int


@dataclass(frozen=True)
class Llama3Scaling:
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    trained: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN, arXiv 2309.00071."""

    factor: float
    trained: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE, arXiv 2402.13753: one divisor per frequency; `long` for prompts of more than `trained` tokens."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    trained: int
    attention_factor: float


RopeScaling = LinearScaling | DynamicScaling | DynamicPowerScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding (arXiv 2104.09864), halves rotated against each other."""

    dim: int
    """The first `dim` numbers of each head are rotated; the rest pass unchanged."""
    theta: float
    scaling: RopeScaling | None = None

    def prompt_classes(self, max_positions: int) -> tuple[int, ...]:
        """Prompt lengths above which the frequencies change: prompts on two sides of one have different keys."""
        match self.scaling:
            case LongRopeScaling(short=short, long=long, trained=trained):
                return (trained,) if trained < max_positions and short != long else ()
            case DynamicScaling(trained=trained) | DynamicPowerScaling(trained=trained):
                limits = []
                while trained < max_positions:
                    limits.append(trained)
                    trained *= 2
                return tuple(limits)
            case _:
                return ()


@dataclass(frozen=True)
class AttentionSpec:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None = None
    window: int | None = None
    """Sliding window in tokens, the token itself counted."""
    soft_cap: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: NormSpec | None = None
    """Over each head of query and key, before the rotation."""
    log_positions: int | None = None
    """Queries at position p ≥ this are multiplied by log(p + 1) / log(this): Qwen 1's logn attention."""

    def kv_head_of(self, head: int) -> int:
        return head * self.num_kv_heads // self.num_heads


def kv_head_bytes(head_dim: int, dtype: str) -> int:
    """One token's key and value of one head in a cache of `dtype`; int8 ones have a float32 scale each."""
    return 2 * (head_dim * BYTES_PER_ELEMENT[dtype] + (4 if dtype == "int8" else 0))


@dataclass(frozen=True)
class GatedMlp:
    """down(activation(gate(x)) * up(x))."""

    intermediate_size: int
    activation: Activation
    bias: bool = False


@dataclass(frozen=True)
class PlainMlp:
    """down(activation(up(x)))."""

    intermediate_size: int
    activation: Activation
    bias: bool = True


@dataclass(frozen=True)
class PreNormLayer:
    """x + post(attention(norm(x))), then x + post(mlp(norm(x))); the post norms may be absent."""

    attention: AttentionSpec
    mlp: GatedMlp | PlainMlp
    attention_norm: NormSpec
    mlp_norm: NormSpec
    attention_post_norm: NormSpec | None = None
    mlp_post_norm: NormSpec | None = None


@dataclass(frozen=True)
class PostNormLayer:
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    attention: AttentionSpec
    mlp: GatedMlp | PlainMlp
    attention_norm: NormSpec
    mlp_norm: NormSpec


LayerSpec = PreNormLayer | PostNormLayer


@dataclass(frozen=True)
class EmbeddingSpec:
    width: int
    """Numbers per token in the table; when it is not the hidden size, bias-free projections lead in and out."""
    scale: float | None = None
    """Token embeddings are multiplied by this, rounded to the weights' type first."""
    positions: int | None = None
    """Rows of a learned position table that is added; None has no table."""
    position_offset: int = 0
    """Position p reads row p + this."""


@dataclass(frozen=True)
class WeightSpec:
    """One weight: its whole shape, and the config keys that decide it (for messages)."""

    shape: tuple[int, ...]
    keys: tuple[str, ...]
    wide: bool = False
    """Kept in float32 whatever the model's type."""


class StoredRows(NamedTuple):
    """Some rows of a weight, and the kind of packed matrix they are in memory; plain numbers where that is empty."""

    rows: int
    kind: str
    group: int = 0
    """Inputs that share a scale, where the kind leaves that open (INT4); 0 for all."""
    ordered: bool = False
    """Groups are not of neighbouring inputs."""


StoredParts = tuple[tuple[str, tuple[StoredRows, ...]], ...]
"""Weights by name, each with its rows in order."""


@dataclass(frozen=True)
class StoredWeights:
    """The weights that stay quantised."""

    outer: StoredParts
    layers: tuple[StoredParts, ...]
    """Named within each layer."""


@dataclass(frozen=True)
class DecoderSpec:
    family: str
    vocab_size: int
    """Rows of the output head."""
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    embedding: EmbeddingSpec
    final_norm: NormSpec | None
    max_positions: int
    checkpoint_dtype: CheckpointType
    tie_embeddings: bool = False
    """The output head is the embedding table."""
    head_bias: bool = False
    logit_soft_cap: float | None = None
    stored: StoredWeights | None = None
    """None keeps all weights as plain numbers."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def prompt_classes(self) -> tuple[int, ...]:
        """Prompt lengths above which keys of the same tokens differ (see `RopeSpec.prompt_classes`)."""
        ropes = {layer.attention.rope for layer in self.layers if layer.attention.rope is not None}
        return tuple(sorted({limit for rope in ropes for limit in rope.prompt_classes(self.max_positions)}))

    @cached_property
    def num_parameters(self) -> int:
        """A tied table counts once."""
        return sum(prod(weight.shape) for weight in self.tensors.values())

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of the whole model's weights in `dtype`, without quantisation."""
        size = BYTES_PER_ELEMENT[dtype]
        return sum(prod(w.shape) * (4 if w.wide else size) for w in self.tensors.values())

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Keys and values of all layers for one token."""
        attentions = [layer.attention for layer in self.layers]
        return sum(spec.num_kv_heads * kv_head_bytes(spec.head_dim, dtype) for spec in attentions)

    @cached_property
    def tensors(self) -> dict[str, WeightSpec]:
        """Every weight by its name. Matrices are [outputs, inputs]."""
        weights = dict(self.outer_tensors)
        for index, layer in enumerate(self.layers):
            weights |= {f"layers.{index}.{name}": weight for name, weight in layer_tensors(layer, self.hidden_size)}
        return weights

    @cached_property
    def outer_tensors(self) -> tuple[tuple[str, WeightSpec], ...]:
        """The weights outside the layers, by name."""
        return tuple(self._outer_tensors())

    def _outer_tensors(self) -> Iterator[tuple[str, WeightSpec]]:
        hidden, width = self.hidden_size, self.embedding.width
        yield "embedding.weight", WeightSpec((self.vocab_size, width), ("vocab_size", "embedding_size"))
        if self.embedding.positions is not None:
            rows = self.embedding.positions
            yield "positions.weight", WeightSpec((rows, hidden), ("max_position_embeddings", "hidden_size"))
        if width != hidden:
            yield "project_in.weight", WeightSpec((hidden, width), ("hidden_size", "embedding_size"))
            yield "project_out.weight", WeightSpec((width, hidden), ("embedding_size", "hidden_size"))
        if self.final_norm is not None:
            yield from norm_tensors("final_norm", self.final_norm, hidden, ("hidden_size",))
        if not self.tie_embeddings:
            yield "head.weight", WeightSpec((self.vocab_size, width), ("vocab_size", "embedding_size"))
        if self.head_bias:
            yield "head.bias", WeightSpec((self.vocab_size,), ("vocab_size",))


def norm_tensors(name: str, norm: NormSpec, size: int, keys: tuple[str, ...]) -> Iterator[tuple[str, WeightSpec]]:
    if norm.affine:
        yield f"{name}.weight", WeightSpec((size,), keys, norm.wide)
        if norm.kind == "layer":
            yield f"{name}.bias", WeightSpec((size,), keys, norm.wide)


def linear_tensors(
    name: str, shape: tuple[int, int], keys: tuple[str, ...], bias: bool
) -> Iterator[tuple[str, WeightSpec]]:
    yield f"{name}.weight", WeightSpec(shape, keys)
    if bias:
        yield f"{name}.bias", WeightSpec(shape[:1], keys)


def layer_tensors(layer: LayerSpec, hidden: int) -> Iterator[tuple[str, WeightSpec]]:
    """The weights of one layer, named within the layer."""
    attention, mlp = layer.attention, layer.mlp
    queries, keys = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    query_keys = ("num_attention_heads", "head_dim", "hidden_size")
    kv_keys = ("num_key_value_heads", "head_dim", "hidden_size")
    yield from linear_tensors("attention.q", (queries, hidden), query_keys, attention.qkv_bias)
    yield from linear_tensors("attention.k", (keys, hidden), kv_keys, attention.qkv_bias)
    yield from linear_tensors("attention.v", (keys, hidden), kv_keys, attention.qkv_bias)
    yield from linear_tensors("attention.out", (hidden, queries), query_keys, attention.out_bias)
    if attention.qk_norm is not None:
        yield from norm_tensors("attention.q_norm", attention.qk_norm, attention.head_dim, ("head_dim",))
        yield from norm_tensors("attention.k_norm", attention.qk_norm, attention.head_dim, ("head_dim",))
    width, mlp_keys = mlp.intermediate_size, ("intermediate_size", "hidden_size")
    if isinstance(mlp, GatedMlp):
        yield from linear_tensors("mlp.gate", (width, hidden), mlp_keys, mlp.bias)
    yield from linear_tensors("mlp.up", (width, hidden), mlp_keys, mlp.bias)
    yield from linear_tensors("mlp.down", (hidden, width), mlp_keys, mlp.bias)
    norms = {"attention_norm": layer.attention_norm, "mlp_norm": layer.mlp_norm}
    if isinstance(layer, PreNormLayer):
        norms |= {
            name: norm
            for name, norm in (
                ("attention_post_norm", layer.attention_post_norm),
                ("mlp_post_norm", layer.mlp_post_norm),
            )
            if norm is not None
        }
    for name, norm in norms.items():
        yield from norm_tensors(name, norm, hidden, ("hidden_size",))

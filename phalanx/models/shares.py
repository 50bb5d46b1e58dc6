"""What one rank of a split model holds, in numbers: for the worker's memory and the planner. Pure; imports no torch."""

from __future__ import annotations

from functools import lru_cache
from math import prod

from phalanx.distributed.mesh import Mesh, Place
from phalanx.models.spec import BYTES_PER_ELEMENT, DecoderSpec, LayerSpec, WeightSpec, kv_head_bytes, layer_tensors
from phalanx.models.split import Split


def weight_bytes(spec: DecoderSpec, mesh: Mesh, split: Split, place: Place, dtype: str) -> int:
    """Bytes of the weights of the rank at `place`, in `dtype`, without quantisation. A tied table on the first and the
    last stage counts on both."""
    outer = outer_bytes(spec, split, place.tp, dtype, first=place.pp == 0, last=place.pp == mesh.pp - 1)
    layers = spec.layers[slice(*split.layers.ranges[place.pp])]
    return outer + sum(layer_bytes(layer, spec.hidden_size, split, place.tp, dtype) for layer in layers)


def outer_bytes(spec: DecoderSpec, split: Split, tp: int, dtype: str, *, first: bool, last: bool) -> int:
    """Of what is outside the layers: a first stage has the token table, a last one the head."""
    total = 0
    for name, weight in spec.outer_tensors:
        part = name.partition(".")[0]
        if part == "embedding":
            here = first or (last and spec.tie_embeddings)
        else:
            here = first if part in ("positions", "project_in") else last
        if here:
            numbers = prod(weight.shape)
            if part in ("embedding", "head"):
                numbers = numbers // spec.vocab_size * split.vocabulary(spec).length(tp)
            total += numbers * _size(weight, dtype)
    return total


@lru_cache(4096)
def layer_bytes(layer: LayerSpec, hidden: int, split: Split, tp: int, dtype: str) -> int:
    """Of one layer's weights on tensor rank `tp`."""
    attention, mlp = layer.attention, layer.mlp
    heads, kv_heads = split.heads(attention).length(tp), split.kv_heads(attention).length(tp)
    inner = split.inner(layer).length(tp)
    total = 0
    for name, weight in layer_tensors(layer, hidden):
        numbers = prod(weight.shape)
        match name:
            case "attention.q.weight" | "attention.q.bias" | "attention.out.weight":
                numbers = numbers // attention.num_heads * heads
            case "attention.k.weight" | "attention.k.bias" | "attention.v.weight" | "attention.v.bias":
                numbers = numbers // attention.num_kv_heads * kv_heads
            case "mlp.gate.weight" | "mlp.gate.bias" | "mlp.up.weight" | "mlp.up.bias" | "mlp.down.weight":
                numbers = numbers // mlp.intermediate_size * inner
        total += numbers * _size(weight, dtype)
    return total


def _size(weight: WeightSpec, dtype: str) -> int:
    return 4 if weight.wide else BYTES_PER_ELEMENT[dtype]


def kv_bytes_per_token(spec: DecoderSpec, split: Split, place: Place, dtype: str) -> int:
    """Keys and values of one token in this rank's layers and heads."""
    layers = spec.layers[slice(*split.layers.ranges[place.pp])]
    return sum(layer_kv_bytes(layer, split, place.tp, dtype) for layer in layers)


@lru_cache(4096)
def layer_kv_bytes(layer: LayerSpec, split: Split, tp: int, dtype: str) -> int:
    """Keys and values of one token in one layer on tensor rank `tp`."""
    attention = layer.attention
    return split.kv_heads(attention).length(tp) * kv_head_bytes(attention.head_dim, dtype)

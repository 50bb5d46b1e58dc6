"""What one rank of a split model holds, in numbers: for the worker's memory and the planner. Pure; imports no torch."""

from __future__ import annotations

from math import prod

from phalanx.distributed.mesh import Mesh, Place
from phalanx.models.spec import BYTES_PER_ELEMENT, DecoderSpec, WeightSpec
from phalanx.models.split import Split


def weight_bytes(spec: DecoderSpec, mesh: Mesh, split: Split, place: Place, dtype: str) -> int:
    """Bytes of the weights of the rank at `place`, in `dtype`, without quantisation. A tied table on the first and the
    last stage counts on both."""
    size, total = BYTES_PER_ELEMENT[dtype], 0
    for name, weight in spec.tensors.items():
        if _stage_has(spec, mesh, split, place, name):
            total += _elements(spec, split, place, name, weight) * (4 if weight.wide else size)
    return total


def kv_bytes_per_token(spec: DecoderSpec, split: Split, place: Place, dtype: str) -> int:
    """Keys and values of one token in this rank's layers and heads."""
    numbers = 0
    for layer in spec.layers[slice(*split.layers.ranges[place.pp])]:
        attention = layer.attention
        numbers += 2 * split.kv_heads(attention).length(place.tp) * attention.head_dim
    return numbers * BYTES_PER_ELEMENT[dtype]


def _stage_has(spec: DecoderSpec, mesh: Mesh, split: Split, place: Place, name: str) -> bool:
    first, last = place.pp == 0, place.pp == mesh.pp - 1
    head, _, rest = name.partition(".")
    match head:
        case "layers":
            start, stop = split.layers.ranges[place.pp]
            return start <= int(rest.partition(".")[0]) < stop
        case "embedding":
            return first or (last and spec.tie_embeddings)
        case "positions" | "project_in":
            return first
        case _:
            return last


def _elements(spec: DecoderSpec, split: Split, place: Place, name: str, weight: WeightSpec) -> int:
    """Numbers of one weight that the rank holds."""
    whole = prod(weight.shape)
    head, _, rest = name.partition(".")
    if head in ("embedding", "head"):
        return whole // spec.vocab_size * split.vocabulary(spec).length(place.tp)
    if head != "layers":
        return whole
    number, _, part = rest.partition(".")
    layer = spec.layers[int(number)]
    attention, mlp = layer.attention, layer.mlp
    match part:
        case "attention.q.weight" | "attention.q.bias" | "attention.out.weight":
            return whole // attention.num_heads * split.heads(attention).length(place.tp)
        case "attention.k.weight" | "attention.k.bias" | "attention.v.weight" | "attention.v.bias":
            return whole // attention.num_kv_heads * split.kv_heads(attention).length(place.tp)
        case "mlp.gate.weight" | "mlp.gate.bias" | "mlp.up.weight" | "mlp.up.bias" | "mlp.down.weight":
            return whole // mlp.intermediate_size * split.inner(layer).length(place.tp)
        case _:
            return whole

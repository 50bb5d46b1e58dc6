"""What one rank of a split model holds, in numbers: for the worker's memory and the planner. Pure; imports no torch."""

from __future__ import annotations

from functools import lru_cache

from phalanx.distributed.mesh import Mesh, Place
from phalanx.kernels.block_layout import BLOCK, packed_bytes
from phalanx.models.spec import (
    BYTES_PER_ELEMENT,
    DecoderSpec,
    LayerSpec,
    StoredParts,
    StoredRows,
    WeightSpec,
    kv_head_bytes,
    layer_tensors,
)
from phalanx.models.split import Split


def weight_bytes(spec: DecoderSpec, mesh: Mesh, split: Split, place: Place, dtype: str) -> int:
    """Bytes of the weights of the rank at `place`: what `spec.stored` names as it is stored, the rest in `dtype`. A
    tied table on the first and the last stage counts on both."""
    outer = outer_bytes(spec, split, place.tp, dtype, first=place.pp == 0, last=place.pp == mesh.pp - 1)
    start, stop = split.layers.ranges[place.pp]
    return outer + sum(layer_bytes(spec, index, split, place.tp, dtype) for index in range(start, stop))


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
            total += _outer_weight_bytes(spec, name, weight, split, tp, dtype)
    return total


def table_bytes(spec: DecoderSpec, split: Split, tp: int, dtype: str) -> int:
    """Of the rank's part of the token table."""
    name = "embedding.weight"
    return _outer_weight_bytes(spec, name, dict(spec.outer_tensors)[name], split, tp, dtype)


def _outer_weight_bytes(spec: DecoderSpec, name: str, weight: WeightSpec, split: Split, tp: int, dtype: str) -> int:
    stored = dict(spec.stored.outer) if spec.stored is not None else {}
    rows = split.vocabulary(spec).ranges[tp] if name.partition(".")[0] in ("embedding", "head") else None
    return _bytes(weight, rows, None, stored.get(name), dtype)


def layer_bytes(spec: DecoderSpec, index: int, split: Split, tp: int, dtype: str) -> int:
    """Of the weights of layer `index` on tensor rank `tp`."""
    stored = spec.stored.layers[index] if spec.stored is not None else ()
    return _layer_bytes(spec.layers[index], spec.hidden_size, stored, split, tp, dtype)


@lru_cache(4096)
def _layer_bytes(layer: LayerSpec, hidden: int, stored: StoredParts, split: Split, tp: int, dtype: str) -> int:
    attention = layer.attention
    queries = split.heads(attention).scaled(attention.head_dim).ranges[tp]
    keys = split.kv_heads(attention).scaled(attention.head_dim).ranges[tp]
    inner = split.inner(layer).ranges[tp]
    total, kinds = 0, dict(stored)
    for name, weight in layer_tensors(layer, hidden):
        rows = columns = None
        match name:
            case "attention.q.weight" | "attention.q.bias":
                rows = queries
            case "attention.k.weight" | "attention.k.bias" | "attention.v.weight" | "attention.v.bias":
                rows = keys
            case "attention.out.weight":
                columns = queries
            case "mlp.gate.weight" | "mlp.gate.bias" | "mlp.up.weight" | "mlp.up.bias":
                rows = inner
            case "mlp.down.weight":
                columns = inner
        total += _bytes(weight, rows, columns, kinds.get(name), dtype)
    return total


def _bytes(
    weight: WeightSpec, rows: tuple[int, int] | None, columns: tuple[int, int] | None,
    stored: tuple[StoredRows, ...] | None, dtype: str,
) -> int:  # fmt: skip
    """Of some rows and columns (None for all) of a weight."""
    rows = rows or (0, weight.shape[0])
    size = 4 if weight.wide else BYTES_PER_ELEMENT[dtype]
    if len(weight.shape) == 1:
        return (rows[1] - rows[0]) * size
    columns = columns or (0, weight.shape[1])
    width = columns[1] - columns[0]
    total = begin = 0
    for piece in stored or (StoredRows(weight.shape[0], ""),):
        count = max(0, min(rows[1], begin + piece.rows) - max(rows[0], begin))
        total += _packed(piece, count, columns, weight.shape[1]) if piece.kind else count * width * size
        begin += piece.rows
    return total


def _packed(piece: StoredRows, count: int, columns: tuple[int, int], inputs: int) -> int:
    """Bytes of `count` rows. Of ordered groups that several ranks share each rank has some inputs of every group, in
    whole blocks of its own: it is the most that these may be."""
    if not piece.ordered or columns == (0, inputs):
        return packed_bytes(piece.kind, count, columns, piece.group)
    groups, width = -(-inputs // piece.group), columns[1] - columns[0]
    most = min((width + groups * (BLOCK - 1)) // BLOCK * BLOCK, groups * piece.group)
    return packed_bytes(piece.kind, count, (0, most), BLOCK)


def kv_bytes_per_token(spec: DecoderSpec, split: Split, place: Place, dtype: str) -> int:
    """Keys and values of one token in this rank's layers and heads."""
    layers = spec.layers[slice(*split.layers.ranges[place.pp])]
    return sum(layer_kv_bytes(layer, split, place.tp, dtype) for layer in layers)


@lru_cache(4096)
def layer_kv_bytes(layer: LayerSpec, split: Split, tp: int, dtype: str) -> int:
    """Keys and values of one token in one layer on tensor rank `tp`."""
    attention = layer.attention
    return split.kv_heads(attention).length(tp) * kv_head_bytes(attention.head_dim, dtype)

"""Which weights of a model stay quantised in memory, and as what, for whoever counts bytes. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from phalanx.checkpoint.locate import Checkpoint
from phalanx.checkpoint.quantized import METHODS, QuantizedInfo
from phalanx.checkpoint.rules import Piece, bind
from phalanx.checkpoint.tensor_info import BLOCK_TYPES
from phalanx.kernels.library import native
from phalanx.models.registry import weight_table
from phalanx.models.spec import DecoderSpec, StoredRows, StoredWeights


def with_stored(spec: DecoderSpec, checkpoint: Checkpoint | None, quantization: str | None) -> DecoderSpec:
    """`spec` with what `quantization` (resolved: a checkpoint's method, int8, or none) makes of its weights; without
    the native library nothing stays quantised. Without a `checkpoint`, only int8 is known.

    Raises CheckpointError when the checkpoint's tensors are not the model's.
    """
    if native() is None:
        return spec
    if checkpoint is not None and quantization in ("gguf", *METHODS):
        binding = bind(weight_table(spec, checkpoint.format), checkpoint.tensors(), spec.tensors)
        found = {
            name: tuple(_stored(piece) for piece in pieces)
            for name, pieces in binding.items()
            if _is_multiplied(spec, name)
        }
    elif quantization == "int8":
        shapes = spec.tensors.items()
        found = {name: (StoredRows(w.shape[0], "INT8"),) for name, w in shapes if _is_multiplied(spec, name)}
    else:
        return spec
    return replace(spec, stored=_by_layer(spec, found.items()))


def _stored(piece: Piece) -> StoredRows:
    info = piece.info
    if not piece.keeps_rows:
        return StoredRows(piece.length, "")
    if isinstance(info, QuantizedInfo):
        return StoredRows(piece.length, info.dtype, info.form.group, info.form.ordered)
    return StoredRows(piece.length, info.dtype if info.dtype in BLOCK_TYPES else "")


def _is_multiplied(spec: DecoderSpec, name: str) -> bool:
    """Whether a weight is a linear layer's or a token table, and not a vector or a table of positions."""
    return len(spec.tensors[name].shape) == 2 and name != "positions.weight"


def _by_layer(spec: DecoderSpec, weights: Iterable[tuple[str, tuple[StoredRows, ...]]]) -> StoredWeights:
    outer, layers = [], [[] for _ in spec.layers]  # type: ignore[var-annotated]
    for name, rows in weights:
        if all(piece.kind == "" for piece in rows):
            continue
        if name.startswith("layers."):
            _, number, within = name.split(".", 2)
            layers[int(number)].append((within, rows))
        else:
            outer.append((name, rows))
    return StoredWeights(tuple(sorted(outer)), tuple(tuple(sorted(layer)) for layer in layers))

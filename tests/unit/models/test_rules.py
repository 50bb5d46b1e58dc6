"""Weight rules as data: every tensor used, every weight filled, every rule matched, and back again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from phalanx.checkpoint.locate import locate
from phalanx.checkpoint.rules import (
    Add,
    Operation,
    PermuteRope,
    Transpose,
    WeightTable,
    bind,
    bind_copies,
    export,
    rule,
)
from phalanx.checkpoint.tensor_info import TensorInfo
from phalanx.errors import CheckpointError
from phalanx.models.registry import read_spec, weight_table
from phalanx.models.spec import WeightSpec
from tests.helpers.tiny_models import FAMILIES, tiny_checkpoint


def info(name: str, *shape: int) -> TensorInfo:
    return TensorInfo(name, "F32", shape, Path("model.safetensors"), 0, 4 * int(np.prod(shape)))


def infos(**shapes: tuple[int, ...]) -> dict[str, TensorInfo]:
    return {name.replace("__", "."): info(name.replace("__", "."), *shape) for name, shape in shapes.items()}


def weights(**shapes: tuple[int, ...]) -> dict[str, WeightSpec]:
    return {name.replace("__", "."): WeightSpec(shape, ("hidden_size",)) for name, shape in shapes.items()}


TABLE = WeightTable(
    (
        rule("emb.weight", "embedding.weight"),
        rule("h.{layer}.qkv.{kind}", [f"l.{{layer}}.{x}.{{kind}}" for x in "qkv"]),
    ),
    ignored=("*.inv_freq",), prefixes=("model.",), keys={"hidden_size": "n_embd"},
)  # fmt: skip
TENSORS = infos(model__emb__weight=(5, 4), model__h__0__qkv__weight=(8, 4), h__0__inv_freq=(2,))
WEIGHTS = weights(embedding__weight=(5, 4), l__0__q__weight=(4, 4), l__0__k__weight=(2, 4), l__0__v__weight=(2, 4))


def test_bind_splits_rows() -> None:
    binding = bind(TABLE, TENSORS, WEIGHTS)
    assert set(binding) == set(WEIGHTS)
    (key,) = binding["l.0.k.weight"]
    assert (key.skip, key.length) == (4, 2) and key.source(key.rows(0, 2)) == ((4, 6), (0, 4))
    array = np.arange(32).reshape(8, 4)
    assert np.array_equal(key.take(array[5:6], key.rows(1, 2)), array[5:6])


@pytest.mark.parametrize(
    ("tensors", "wanted", "message"),
    [
        (TENSORS | infos(extra__weight=(3,)), WEIGHTS, "1 tensor.* no place in the model: 'extra.weight'"),
        (TENSORS, WEIGHTS | weights(norm__weight=(4,)), "1 weight.* not in the checkpoint: 'norm.weight'"),
        (infos(h__0__qkv__weight=(8, 4)), WEIGHTS, "no tensor 'emb.weight'"),
        (TENSORS | infos(h__1__qkv__weight=(8, 4)), WEIGHTS, "no weight 'l.1.q.weight', but .* 'h.1.qkv.weight'"),
        (TENSORS | infos(model__h__0__qkv__bias=(8,)), WEIGHTS, "no weight 'l.0.q.bias'"),
        (TENSORS | infos(model__emb__weight=(5, 3)), WEIGHTS, r"'model.emb.weight' .*\[5, 3\].*\[5, 4\].*`n_embd`"),
        (TENSORS | infos(model__h__0__qkv__weight=(9, 4)), WEIGHTS, r"shape \[9, 4\].*asks for \[8, 4\]"),
        (TENSORS | infos(model__emb__weight=()), WEIGHTS, "a single number"),
    ],
)  # fmt: skip
def test_refusals(tensors: dict[str, TensorInfo], wanted: dict[str, WeightSpec], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        bind(TABLE, tensors, wanted)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value) and caught.value.status == 400


def test_many_unused_tensors_are_counted_not_listed() -> None:
    with pytest.raises(CheckpointError, match=r"40 tensor\(s\).*and 35 more"):
        bind(TABLE, TENSORS | {f"x{i}": info(f"x{i}", 1) for i in range(40)}, WEIGHTS)


def test_joining_rule() -> None:
    table = WeightTable((rule(["a.weight", "b.weight"], "ab.weight"),))
    binding = bind(table, infos(a__weight=(3, 2), b__weight=(1, 2)), weights(ab__weight=(4, 2)))
    assert [(p.info.name, p.start, p.length) for p in binding["ab.weight"]] == [("a.weight", 0, 3), ("b.weight", 3, 1)]
    with pytest.raises(CheckpointError, match=r"has 'a.weight' but not 'b.weight'"):
        bind(table, infos(a__weight=(4, 2)), weights(ab__weight=(4, 2)))
    whole = np.arange(8).reshape(4, 2)
    back = export(table, {"ab.weight": whole}, np.concatenate, lambda name: {"a.weight": 3, "b.weight": 1}[name])
    assert np.array_equal(back["a.weight"], whole[:3]) and np.array_equal(back["b.weight"], whole[3:])
    with pytest.raises(ValueError, match="joins or splits"):
        rule(["a", "b"], ["c", "d"])


def test_copy_is_bound_apart() -> None:
    table = WeightTable((rule("e", "embedding.weight"),), copies=(rule("head", "embedding.weight"),))
    shapes = weights(embedding__weight=(5, 4))
    assert bind_copies(table, infos(e=(5, 4)), shapes) == {}
    both = infos(e=(5, 4), head=(5, 4))
    assert bind(table, both, shapes)["embedding.weight"][0].info.name == "e"
    assert bind_copies(table, both, shapes)["embedding.weight"][0].info.name == "head"
    with pytest.raises(CheckpointError, match="'head' has shape"):
        bind_copies(table, infos(e=(5, 4), head=(6, 4)), shapes)


@pytest.mark.parametrize("operation", [Transpose(), PermuteRope(6), Add(1.0)])
@pytest.mark.parametrize("shape", [(12, 5), (12,)])
def test_operations_undo_themselves(operation: Operation, shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).standard_normal(shape)
    assert np.allclose(operation.undo(operation.apply(array)), array)
    assert operation.apply(array).shape == operation.shape(shape)


@pytest.mark.parametrize("operation", [Transpose(), PermuteRope(6), Add(1.0)])
@pytest.mark.parametrize("rows", [(0, 12), (6, 12), (3, 7), (11, 12), (5, 5)])
@pytest.mark.parametrize("columns", [(0, 5), (1, 4), (4, 5)])
def test_reading_a_part_gives_that_of_the_whole(
    operation: Operation, rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    stored = np.random.default_rng(0).standard_normal((5, 12) if isinstance(operation, Transpose) else (12, 5))
    table = WeightTable((rule("t", "w", operation),))
    (piece,) = bind(table, {"t": info("t", *stored.shape)}, {"w": WeightSpec((12, 5), ())})["w"]
    assert piece.rows(*rows) == (rows, (0, 5))
    part = (rows, columns)
    read = stored[tuple(slice(*span) for span in piece.source(part))]
    assert np.array_equal(piece.take(read, part), operation.apply(stored)[slice(*rows), slice(*columns)])
    if not isinstance(operation, PermuteRope):
        assert read.size == (rows[1] - rows[0]) * (columns[1] - columns[0]), "more was read than is needed"


def test_a_vector_is_not_turned() -> None:
    """Rules for a weight and its bias share their operations."""
    stored = np.arange(12.0)
    (piece,) = bind(WeightTable((rule("t", "w", Transpose()),)), {"t": info("t", 12)}, {"w": WeightSpec((12,), ())})[
        "w"
    ]
    assert piece.source(((3, 7),)) == ((3, 7),)
    assert np.array_equal(piece.take(stored[3:7], ((3, 7),)), stored[3:7])


def test_rope_permutation_is_pairs_to_halves() -> None:
    assert PermuteRope(6).apply(np.arange(12)).tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    with pytest.raises(CheckpointError, match="not whole heads"):
        bind(WeightTable((rule("t", "w", PermuteRope(6)),)), {"t": info("t", 13)}, {"w": WeightSpec((13,), ())})


@pytest.mark.parametrize("family", FAMILIES)
def test_tables_run_backwards(family: str) -> None:
    """Every family's file tensors come back exactly from the weights read with its table."""
    path = tiny_checkpoint(family)
    checkpoint = locate(str(path))
    spec = read_spec(checkpoint.config)
    table, stored = weight_table(spec, "safetensors"), load_file(path / "model.safetensors")
    ours: dict[str, Any] = {}
    for name, pieces in bind(table, checkpoint.tensors(), spec.tensors).items():
        (piece,) = pieces
        whole = piece.rows(0, piece.length)
        read = stored[piece.info.name][tuple(slice(*span) for span in piece.source(whole))]
        ours[name] = piece.take(read, whole)
        assert ours[name].shape == spec.tensors[name].shape
    back = export(table, ours, np.concatenate)
    names = {name: next((p for p in table.prefixes if name.startswith(p)), "") for name in stored}
    assert {name.removeprefix(prefix) for name, prefix in names.items()} == set(back)
    for name, prefix in names.items():
        assert np.allclose(back[name.removeprefix(prefix)], stored[name], atol=1e-6), name


def test_export_refuses_what_no_rule_covers() -> None:
    with pytest.raises(CheckpointError, match=r"No rule covers.*'odd.weight'"):
        export(TABLE, {"odd.weight": np.ones(1)}, np.concatenate)

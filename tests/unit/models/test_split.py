"""How a layer is cut: whole heads first, and then an inner width that brings every rank to its share."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.distributed.mesh import Mesh
from phalanx.distributed.partition import Partition
from phalanx.errors import ConfigError
from phalanx.models.registry import read_spec
from phalanx.models.shares import weight_bytes
from phalanx.models.spec import DecoderSpec, GatedMlp
from phalanx.models.split import Split, leveled


def spec_of(heads: int, kv_heads: int, hidden: int, inner: int, *, quantised: bool = False, **more: int) -> DecoderSpec:
    config = {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "num_hidden_layers": 2, "intermediate_size": inner,
        "max_position_embeddings": 4096, "rope_theta": 1e4, "torch_dtype": "bfloat16",
    } | more  # fmt: skip
    spec = read_spec(config)
    return replace(spec, checkpoint_dtype="quantized") if quantised else spec


def layer_numbers(spec: DecoderSpec, split: Split) -> list[int]:
    """Matrix entries that each rank holds of a layer, counted by hand."""
    layer, hidden = spec.layers[0], spec.hidden_size
    attention, mlp = layer.attention, layer.mlp
    heads, kv_heads, inner = split.heads(attention), split.kv_heads(attention), split.inner(layer)
    return [
        hidden * attention.head_dim * 2 * (heads.length(r) + kv_heads.length(r))
        + hidden * inner.length(r) * (3 if isinstance(mlp, GatedMlp) else 2)
        for r in range(split.tensor_ranks)
    ]


# 9 heads of the demo model, Qwen-14B-Chat's 40, Qwen2.5-7B's 28, and 52 heads of 128.
CASES = {
    "9/2": (spec_of(9, 3, 576, 1536), 2), "9/4": (spec_of(9, 3, 576, 1536), 4), "9/7": (spec_of(9, 3, 576, 1536), 7),
    "40/3": (spec_of(40, 40, 5120, 13696), 3), "40/6": (spec_of(40, 40, 5120, 13696), 6),
    "28/8": (spec_of(28, 4, 3584, 18944), 8), "52/3": (spec_of(52, 52, 6656, 17920), 3),
}  # fmt: skip


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize(("spec", "ranks"), CASES.values(), ids=CASES)
def test_equal_devices_hold_equal_layers(spec: DecoderSpec, ranks: int, quantised: bool) -> None:
    """Within one unit of the inner width: 8 columns, or a block of 32."""
    spec = replace(spec, checkpoint_dtype="quantized") if quantised else spec
    split, unit = Split.even(spec, Mesh(tp=ranks)), 32 if quantised else 8
    sizes = layer_numbers(spec, split)
    assert max(sizes) - min(sizes) <= unit * 3 * spec.hidden_size
    inner = split.inner(spec.layers[0])
    assert all(start % unit == 0 for start, _ in inner.ranges) and not inner.overlaps
    heads = split.heads(spec.layers[0].attention)
    assert max(heads.lengths) - min(heads.lengths) <= 1 and not heads.overlaps
    mesh = Mesh(tp=ranks)
    weights = [weight_bytes(spec, mesh, split, mesh.place(r), "bfloat16") for r in range(ranks)]
    rows = max(split.vocabulary(spec).lengths) - min(split.vocabulary(spec).lengths)
    assert rows <= 8
    assert max(weights) - min(weights) <= 2 * (2 * unit * 3 * spec.hidden_size + 2 * rows * spec.hidden_size)


def test_known_numbers() -> None:
    demo = replace(CASES["9/2"][0], checkpoint_dtype="quantized")
    split = Split.even(demo, Mesh(tp=2))
    assert split.heads(demo.layers[0].attention).lengths == (5, 4)
    assert split.inner(demo.layers[0]).lengths == (736, 800)
    qwen = CASES["40/3"][0]
    split = Split.even(qwen, Mesh(tp=3))
    assert split.heads(qwen.layers[0].attention).lengths == (14, 13, 13)
    # One head more is 4 · 128 columns of query, key, value and output: as much as 171 of gate, up and down.
    assert split.inner(qwen.layers[0]).lengths == (4448, 4624, 4624)


@pytest.mark.parametrize("weights", [(3.0, 1.0), (32.0, 20.0, 20.0), (1.0, 2.0, 3.0, 1.0)])
@pytest.mark.parametrize("name", ["9/2", "40/3", "28/8"])
def test_unequal_devices_hold_their_shares(name: str, weights: tuple[float, ...]) -> None:
    spec = CASES[name][0]
    split = Split.of(spec, Mesh(tp=len(weights)), 0, tensor_weights=[weights])
    sizes = layer_numbers(spec, split)
    for size, weight in zip(sizes, weights, strict=True):
        assert abs(size - sum(sizes) * weight / sum(weights)) <= 8 * 3 * spec.hidden_size


def test_a_rank_whose_heads_are_more_than_its_share_gets_the_least() -> None:
    """The others are level among themselves."""
    spec = spec_of(3, 3, 64, 96, head_dim=64)
    split = Split.even(spec, Mesh(tp=2))
    assert split.heads(spec.layers[0].attention).lengths == (2, 1)
    assert split.inner(spec.layers[0]).lengths == (8, 88)
    spec = spec_of(4, 4, 64, 96, head_dim=64)
    assert Split.even(spec, Mesh(tp=3)).inner(spec.layers[0]).lengths == (8, 48, 40)


@pytest.mark.parametrize(
    ("inner", "quantised", "ranks", "lengths"),
    [(67, False, 2, (34, 33)), (96, True, 4, None), (5, False, 5, (1,) * 5), (32, True, 2, (16, 16))],
)  # fmt: skip
def test_narrow_widths_are_cut_finer(inner: int, quantised: bool, ranks: int, lengths: tuple[int, ...] | None) -> None:
    """Fewer units than ranks, and widths that are no multiple of a unit."""
    spec = spec_of(20, 20, 40, inner, quantised=quantised, head_dim=2)
    got = Split.even(spec, Mesh(tp=ranks)).inner(spec.layers[0])
    assert got.size == inner and min(got.lengths) >= 1 and not got.overlaps
    assert lengths is None or got.lengths == lengths


def test_vocabulary() -> None:
    spec = spec_of(8, 8, 64, 128)
    assert Split.even(spec, Mesh(tp=3)).vocabulary(spec).lengths == (10672, 10664, 10664)
    assert Split.of(spec, Mesh(tp=2), 0, tensor_weights=[(3.0, 1.0)]).vocabulary(spec).lengths == (24000, 8000)
    odd = replace(spec, vocab_size=307)
    assert Split.even(odd, Mesh(tp=2)).vocabulary(odd).lengths == (154, 153)


def test_more_ranks_than_there_is_to_share() -> None:
    with pytest.raises(ConfigError, match="8 tensor ranks cannot share 5 columns of a feed-forward"):
        Split.even(spec_of(8, 8, 64, 5), Mesh(tp=8))
    with pytest.raises(ConfigError, match="8 tensor ranks cannot share 6 tokens"):
        Split.even(replace(spec_of(8, 8, 64, 128), vocab_size=6), Mesh(tp=8))


@given(
    size=st.integers(20, 5000),
    parts=st.lists(st.tuples(st.floats(0, 3000), st.floats(0.1, 10)), min_size=1, max_size=8),
)
@settings(max_examples=200)
def test_leveled(size: int, parts: list[tuple[float, float]]) -> None:
    """All of the size is shared, nobody gets less than the least, and those above it are level."""
    taken, weights = [t for t, _ in parts], [w for _, w in parts]
    shares = leveled(size, taken, weights, 1.0)
    assert sum(shares) == pytest.approx(size)
    assert min(shares) >= 1 - 1e-9
    level = [(s + t) / w for s, t, w in zip(shares, taken, weights, strict=True) if s > 1 + 1e-6]
    assert max(level) == pytest.approx(min(level))
    for s, t, w in zip(shares, taken, weights, strict=True):
        assert s > 1 + 1e-6 or (1 + t) / w >= min(level) * (1 - 1e-6)


def test_every_cut_covers_everything() -> None:
    for heads, ranks, quantised in product(range(1, 13), range(1, 9), (False, True)):
        if ranks <= heads:
            spec = spec_of(heads, max(1, heads // 3) if heads % max(1, heads // 3) == 0 else heads, 48, 96 * heads,
                           quantised=quantised, head_dim=16)  # fmt: skip
            split = Split.even(spec, Mesh(tp=ranks))
            for part in (split.heads(spec.layers[0].attention), split.inner(spec.layers[0]), split.vocabulary(spec)):
                assert isinstance(part, Partition) and not part.overlaps and min(part.lengths) >= 1

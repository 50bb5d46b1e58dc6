"""Layers against the plain formula, and what a split leaves on each rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from phalanx.distributed.collectives import SingleGroup
from phalanx.distributed.partition import Partition
from phalanx.errors import UnsupportedModel
from phalanx.kernels.matmul import packs
from phalanx.kernels.pointwise import activate
from phalanx.kernels.weight_memory import WeightMemory
from phalanx.layers.embedding import PositionTable, VocabularyTable
from phalanx.layers.linear import ColumnLinear, LinearContext, Output, ReplicatedLinear, RowLinear
from phalanx.layers.norm import Norm
from phalanx.layers.rotary import Rotary
from phalanx.layers.weights import Loadable
from phalanx.models.rope import frequencies
from phalanx.models.spec import DynamicPowerScaling, RopeSpec
from phalanx.quantization.base import Packed, Scheme, Unquantized, choose_scheme
from tests.helpers.lockstep import LockstepGroup, run_ranks

CPU = torch.device("cpu")
SCHEMES = [Unquantized(), *([Packed()] if packs(torch.float32, CPU) else [])]


def context(group: LockstepGroup | None = None, dtype: torch.dtype = torch.float32) -> LinearContext:
    rank = 0 if group is None else group.rank
    return LinearContext(rank, group or SingleGroup(), Unquantized(), dtype, WeightMemory())


def load(layer: Loadable, weights: dict[str, torch.Tensor]) -> None:
    for slot in layer.slots():
        data = weights[slot.name][slice(*slot.rows)]
        slot.target.copy_(data if slot.columns is None else data[:, slice(*slot.columns)])
    layer.finish()


def test_merged_columns_and_rows_over_uneven_ranks() -> None:
    weights = {
        "a.weight": torch.randn(7, 6), "a.bias": torch.randn(7), "b.weight": torch.randn(5, 6),
        "b.bias": torch.randn(5), "c.weight": torch.randn(4, 7), "c.bias": torch.randn(4),
    }  # fmt: skip
    x = torch.randn(3, 6)
    first, second = (
        F.linear(x, weights["a.weight"], weights["a.bias"]),
        F.linear(x, weights["b.weight"], weights["b.bias"]),
    )
    a, b = Partition(7, ((0, 4), (4, 7))), Partition(5, ((0, 3), (2, 5)))

    def body(group: LockstepGroup) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        merged = ColumnLinear((Output("a", a), Output("b", b)), 6, True, context(group))
        row = RowLinear("c", a, 4, True, context(group))
        load(merged, weights)
        load(row, weights)
        both = merged(x)
        mine = both[:, : a.length(group.rank)]
        return mine, both[:, a.length(group.rank) :], row(mine)

    for rank, (mine, other, result) in enumerate(run_ranks(2, body)):
        assert torch.allclose(mine, first[:, slice(*a.ranges[rank])], atol=1e-5)
        assert torch.allclose(other, second[:, slice(*b.ranges[rank])], atol=1e-5)
        assert torch.allclose(result, F.linear(first, weights["c.weight"], weights["c.bias"]), atol=1e-5)


def test_replicated_linear_is_whole() -> None:
    weight = torch.randn(4, 6)
    layer = ReplicatedLinear("w", 4, 6, context())
    load(layer, {"w.weight": weight})
    x = torch.randn(2, 6)
    assert torch.equal(layer(x), F.linear(x, weight)) and layer.nbytes == weight.nbytes


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_vocabulary_over_ranks(scheme: Scheme) -> None:
    weights = {"e.weight": torch.randn(11, 4), "e.bias": torch.randn(11)}
    ids, hidden = torch.tensor([0, 10, 5, 6, 3]), torch.randn(2, 4)
    partition = Partition.weighted(11, (3, 1, 2))

    def body(group: LockstepGroup) -> tuple[torch.Tensor, torch.Tensor]:
        table = VocabularyTable("e", partition, 4, replace(context(group), scheme=scheme), bias=True)
        load(table, weights)
        return table.embed(ids), table.whole(table.logits(hidden))

    for embedded, logits in run_ranks(3, body):
        assert torch.equal(embedded, weights["e.weight"][ids])
        assert torch.allclose(logits, F.linear(hidden, weights["e.weight"], weights["e.bias"]), atol=1e-6)


def test_position_table_offset() -> None:
    table = PositionTable("p", 6, 3, 2, torch.float32, WeightMemory())
    table.weight.copy_(torch.arange(18.0).view(6, 3))
    assert table(torch.tensor([0, 3]))[:, 0].tolist() == [6.0, 15.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype: torch.dtype) -> None:
    """Summed in float32 whatever the type; a wide weight is applied before rounding."""
    x, weight = (torch.randn(3, 40) * 30).to(dtype), torch.randn(40)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    for wide in (False, True):
        norm = Norm("n", 40, "rms", 1e-6, affine=True, wide=wide, dtype=dtype, memory=WeightMemory())
        load(norm, {"n.weight": weight})
        kept = weight.double() if wide else weight.to(dtype).double()
        assert norm.weight is not None and norm.weight.dtype == (torch.float32 if wide else dtype)
        result = norm(x)
        assert result.dtype == dtype
        tolerance = 1e-6 if dtype == torch.float32 else 2**-8 * (1 if wide else 2)
        assert ((result.double() - exact * kept).abs() <= tolerance * (exact * kept).abs() + 1e-6).all()


def test_layer_norm_with_and_without_weights() -> None:
    x = torch.randn(3, 8)
    norm = Norm("n", 8, "layer", 1e-5, affine=True, wide=False, dtype=torch.float32, memory=WeightMemory())
    weights = {"n.weight": torch.randn(8), "n.bias": torch.randn(8)}
    load(norm, weights)
    expected = F.layer_norm(x, (8,), weights["n.weight"], weights["n.bias"], 1e-5)
    assert torch.allclose(norm(x), expected, atol=1e-6)  # a number near the mean is what is left of two of size 1
    bare = Norm("n", 8, "layer", 1e-5, affine=False, wide=False, dtype=torch.float32, memory=WeightMemory())
    assert not list(bare.slots()) and torch.allclose(bare(x), F.layer_norm(x, (8,)), atol=1e-6)


def test_rotation_by_complex_numbers() -> None:
    """Halves as real and imaginary parts, turned by position × frequency; the rest of a head passes."""
    inverse = torch.tensor([[1.0, 0.1, 0.01], [0.5, 0.2, 0.03]])
    rotary = Rotary(inverse, [1.0, 2.0], torch.float32)
    positions, classes = torch.tensor([0, 3, 100, 7]), torch.tensor([0, 1, 0, 1])
    heads = torch.randn(4, 2, 8)
    turned = rotary.turn(positions, classes)(heads)
    angles = positions[:, None].double() * inverse.double()[classes]
    spin = torch.polar(torch.tensor([1.0, 2.0]).double()[classes][:, None].expand_as(angles), angles)[:, None]
    expected = torch.complex(heads[..., :3].double(), heads[..., 3:6].double()) * spin
    assert torch.allclose(turned[..., :3].double(), expected.real, atol=1e-4)
    assert torch.allclose(turned[..., 3:6].double(), expected.imag, atol=1e-4)
    assert torch.equal(turned[..., 6:], heads[..., 6:])
    first = rotary.turn(positions, None)(heads)
    assert torch.allclose(first[[0, 2]], turned[[0, 2]]) and not torch.allclose(first[1], turned[1])


@pytest.mark.parametrize(("length", "alpha"), [(1, 1), (100, 1), (101, 3), (200, 3), (201, 7), (801, 31)])
def test_qwen_growth_of_the_base(length: int, alpha: int) -> None:
    rope = RopeSpec(8, 1e4, DynamicPowerScaling(100))
    grown = RopeSpec(8, 1e4 * alpha ** (8 / 6))
    assert torch.allclose(frequencies(rope, length)[0], frequencies(grown, length)[0])


def test_activations() -> None:
    x = torch.linspace(-4, 4, 33)[None]
    assert torch.allclose(activate("silu", x), x * x.sigmoid(), atol=1e-6)
    assert torch.allclose(activate("gelu", x), x * 0.5 * (1 + torch.erf(x / 2**0.5)), atol=1e-6)
    inner = (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
    assert torch.allclose(activate("gelu_tanh", x), 0.5 * x * (1 + inner.tanh()), atol=1e-6)
    assert torch.equal(activate("relu", x), x.clamp(min=0))
    with pytest.raises(ValueError, match="no activation 'step'"):
        activate("step", x)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_schemes_multiply_and_look_up_alike(rows: int, dtype: torch.dtype, scheme: Scheme) -> None:
    weight, bias, x = torch.randn(33, 29).to(dtype), torch.randn(33).to(dtype), torch.randn(rows, 29).to(dtype)
    storage = scheme.create(33, 29, dtype, WeightMemory())
    scheme.rows(storage, 0, 33).copy_(weight)
    assert scheme.nbytes(storage) == weight.nbytes
    scheme.finish(storage)
    assert scheme.nbytes(storage) == weight.nbytes and ("weight" in storage) != ("packed" in storage)
    exact = x.double() @ weight.double().T + bias.double()
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    for wide in (False, True):
        result = scheme.apply(storage, x, bias, wide=wide)
        assert result.dtype == (torch.float32 if wide else dtype)
        assert (result.double() - exact).abs().max() < tolerance
        assert (scheme.apply(storage, x, None, wide=wide).double() - exact + bias.double()).abs().max() < tolerance
    ids = torch.tensor([32, 0, 5])
    assert torch.equal(scheme.look_up(storage, ids, None), weight[ids])
    rows_or_zeros = scheme.look_up(storage, ids, 5)
    assert torch.equal(rows_or_zeros, torch.stack((weight[27], torch.zeros(29).to(dtype), weight[0])))


def test_choice_of_scheme() -> None:
    assert type(choose_scheme(None, torch.float16, CPU)) is Unquantized
    assert type(choose_scheme("none", torch.bfloat16, torch.device("meta"))) is Unquantized
    for dtype in (torch.float32, torch.bfloat16):
        assert type(choose_scheme(None, dtype, CPU)) is (Packed if packs(dtype, CPU) else Unquantized)
    with pytest.raises(UnsupportedModel, match="'fp8' is not in this version"):
        choose_scheme("fp8", torch.bfloat16, CPU)

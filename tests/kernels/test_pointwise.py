import math

import pytest
import torch

from phalanx.kernels.pointwise import (
    activate,
    activate_gated,
    activate_gated_twin,
    activate_twin,
    add_norm,
    add_norm_twin,
    turns,
    turns_twin,
)

pytestmark = pytest.mark.usefixtures("instruction_set", "threads")

TYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]
ACTIVATIONS = ["silu", "gelu", "gelu_tanh", "relu"]
NAN, INF = math.nan, math.inf


def tolerances(dtype):
    return {"atol": 2e-6, "rtol": 2e-6} if dtype == torch.float32 else {"atol": 1e-5, "rtol": 1e-2}


@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize(("dtype", "kept"), TYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 2), (3, 15), (1, 16), (33, 17), (2, 64), (33, 576), (40, 1000)])
def test_norm_of_a_sum(layer, dtype, kept, rows, width):
    torch.manual_seed(0)
    x, delta = torch.randn(rows, width).to(dtype) * 3, torch.randn(rows, width).to(dtype)
    weight, bias = torch.randn(width).to(kept), torch.randn(width).to(kept) if layer else None
    for added, scale, shift in ((delta, weight, bias), (None, weight, None), (delta, None, None)):
        mine, theirs = x.clone(), x.clone()
        expected = add_norm_twin(theirs, added, scale, shift, 1e-5, layer)
        result = add_norm(mine, added, scale, shift, 1e-5, layer)
        assert torch.equal(mine, theirs) and result.dtype == dtype
        torch.testing.assert_close(result, expected, **tolerances(dtype))
        for i in range(rows):
            own = None if added is None else added[i : i + 1]
            alone = add_norm(x[i : i + 1].clone(), own, scale, shift, 1e-5, layer)
            assert torch.equal(result[i : i + 1], alone), "a row's result depends on no other"


@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_of_odd_values(layer, dtype):
    """What is not a number stays in its row; tiny and huge numbers come out right."""
    x = torch.randn(6, 40)
    x[0, 3], x[1, 39], x[2] = NAN, INF, 0
    x[3] *= 1e-40
    x[4] *= 1e18
    x = x.to(dtype)
    result, expected = (norm(x.clone(), None, None, None, 1e-5, layer) for norm in (add_norm, add_norm_twin))
    torch.testing.assert_close(result[2:], expected[2:], **tolerances(dtype))
    assert result[0].isnan().all() and result[1, 39].isnan() and result[2:].isfinite().all()


def test_norm_refuses_what_does_not_fit():
    x, weight = torch.randn(4, 8), torch.randn(8)
    refused = [
        (x.T, None, torch.randn(4), None), (x, torch.randn(4, 7), weight, None), (x, torch.randn(8, 4).T, weight, None),
        (x, x.double(), weight, None), (x, None, torch.randn(7), None), (x, None, weight, torch.randn(7)),
        (x, None, weight, weight.double()), (x, None, torch.randn(8, 2)[:, 0], None),
    ]  # fmt: skip
    for arguments in refused:
        with pytest.raises(ValueError, match="contiguous"):
            add_norm(*arguments, 1e-5, False)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 15), (1, 1536), (33, 17), (9, 4000), (4, 0), (0, 8)])
def test_activations(name, dtype, rows, width):
    torch.manual_seed(0)
    both = torch.randn(rows, 2 * width).to(dtype) * 4
    result = activate_gated(name, both)
    torch.testing.assert_close(
        result, activate_gated_twin(name, both), atol=1e-5, rtol=1e-5 if dtype == torch.float32 else 2e-2
    )
    gate = both[:, :width].contiguous()
    plain = activate(name, gate)
    torch.testing.assert_close(plain, activate_twin(name, gate), **tolerances(dtype))
    for i in range(rows):
        assert torch.equal(result[i : i + 1], activate_gated(name, both[i : i + 1]))
        assert torch.equal(plain[i : i + 1], activate(name, gate[i : i + 1]))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_over_all_magnitudes(name):
    size = torch.logspace(-44, 38, 4096, dtype=torch.float64)
    x = torch.cat((size, -size, torch.tensor([0.0, -0.0]))).float()[None]
    exact = activate_twin(name, x.double())
    assert ((activate(name, x) - exact).abs() <= 4e-7 * x.double().abs().clamp(min=1e-37)).all()
    odd = torch.tensor([[NAN, INF, -INF]])
    result = activate(name, odd)[0]
    assert result[0].isnan() and result[1] == INF and (result[2] <= 0 or result[2].isnan())


def test_rounding_to_bfloat16_over_all_magnitudes():
    size = torch.logspace(-80, 76, 4096, dtype=torch.float64).sqrt()  # the least products are no normal numbers
    gate = torch.cat((size, torch.tensor([0.0, NAN, INF, 1.0, 1.0]))).bfloat16()
    factor = torch.cat((size, torch.tensor([1.0, 1.0, 1.0, NAN, -INF]))).bfloat16()
    result = activate_gated("relu", torch.cat((gate, factor))[None])[0]
    assert torch.equal(result.nan_to_num(nan=7.0), (gate.float() * factor.float()).bfloat16().nan_to_num(nan=7.0))
    assert ((result != 0) & (result.abs() < torch.finfo(torch.float32).tiny)).any()


def test_activations_refuse_what_does_not_fit():
    for function, x in (
        (activate_gated, torch.randn(2, 7)),
        (activate_gated, torch.randn(4, 2).T),
        (activate, torch.randn(4, 2).T),
    ):
        with pytest.raises(ValueError, match="contiguous"):
            function("silu", x)
    for function in (activate, activate_gated):
        with pytest.raises(ValueError, match="no activation 'step'"):
            function("step", torch.randn(2, 4))


def ordered(x):
    """Neighbouring numbers of a type are neighbouring integers."""
    bits = x.view(torch.int32 if x.dtype == torch.float32 else torch.int16).long()
    return torch.where(bits < 0, -(bits & (0x7FFFFFFF if x.dtype == torch.float32 else 0x7FFF)), bits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "half"), [(1, 1), (3, 15), (1, 32), (1000, 33), (300, 128)])
def test_rotary_angles(dtype, tokens, half):
    """Those of PyTorch, but for one unit in the last place."""
    torch.manual_seed(0)
    positions = torch.randint(0, 131072, (tokens,))
    positions[0] = 0
    inverse = 10000.0 ** -(torch.arange(2 * half).view(2, half) / half)
    factors, kinds = torch.tensor([1.0, 1.19]), torch.randint(0, 2, (tokens,))
    for classes in (None, kinds):
        results = turns(positions, inverse, factors, classes, dtype)
        for mine, theirs in zip(results, turns_twin(positions, inverse, factors, classes, dtype), strict=True):
            assert mine.shape == (tokens, 1, 2 * half) and mine.dtype == dtype
            near = (mine.float() - theirs.float()).abs() < 1e-9  # next to zero
            units = 1 if classes is None else 2  # a factor moves what differs by one over a boundary
            assert (((ordered(mine) - ordered(theirs)).abs() <= units) | near).all()
    angles = (positions.float()[:, None] * inverse[0]).double()
    cos, sin = turns(positions, inverse, factors, None, torch.float32)
    assert torch.equal(cos[:, 0, :half], angles.cos().float()) or (cos[:, 0, :half] - angles.cos()).abs().max() < 6e-8
    assert (sin[:, 0, half:] - angles.sin()).abs().max() < 6e-8 and torch.equal(sin[:, 0, :half], -sin[:, 0, half:])


def test_rotary_angles_refuse_what_does_not_fit():
    positions, inverse, factors = torch.arange(4), torch.rand(2, 8), torch.ones(2)
    refused = [
        (positions.int(), inverse, factors, None), (torch.arange(8)[::2], inverse, factors, None),
        (positions, inverse.double(), factors, None), (positions, inverse, torch.ones(1), None),
        (positions, inverse, factors, torch.zeros(3, dtype=torch.int64)), (positions, inverse, factors, positions),
        (positions, inverse, factors, positions - 1),
    ]  # fmt: skip
    for arguments in refused:
        with pytest.raises(ValueError, match="contiguous"):
            turns(*arguments, torch.float32)

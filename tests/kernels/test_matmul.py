import math

import pytest
import torch

from phalanx.kernels.matmul import PackedMatrix, multiply_twin, pack_twin, packs, rows_twin
from phalanx.kernels.weight_memory import WeightMemory

pytestmark = pytest.mark.usefixtures("instruction_set", "threads")

TYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 1), (7, 6), (31, 5), (32, 64), (33, 29), (80, 96), (130, 577), (64, 2500)]


def packed(plain: torch.Tensor) -> PackedMatrix:
    matrix = PackedMatrix(*plain.shape, plain.dtype, WeightMemory())
    matrix.fill(plain)
    return matrix


def near(result: torch.Tensor, x: torch.Tensor, plain: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Within what float32 sums and one rounding may lose, by the size of what is added up."""
    added = 0.0 if bias is None else bias.double()
    exact = x.double() @ plain.double().T + added
    size = x.double().abs() @ plain.double().abs().T + (0.0 if bias is None else bias.double().abs())
    rounding = 2.0**-8 if result.dtype == torch.bfloat16 else 0.0
    lost = size * 2.0**-23 * math.sqrt(x.shape[1] + 4) * 2 + exact.abs() * rounding + 1e-30
    return bool(((result.double() - exact).abs() <= lost).all())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 14, 15, 37])
def test_products(dtype, outputs, inputs, rows):
    torch.manual_seed(outputs + inputs + rows)
    plain, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    x = torch.randn(rows, inputs).to(dtype)
    matrix = packed(plain)
    for added in (None, bias):
        for wide in (False, True):
            result = matrix.multiply(x, added, wide=wide)
            twin = multiply_twin(x, plain, added, wide=wide)
            assert result.dtype == twin.dtype and result.shape == twin.shape
            assert near(result, x, plain, added) and near(twin, x, plain, added)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(33, 29), (80, 96), (576, 576), (40, 4500)])
def test_a_row_depends_on_no_other(dtype, outputs, inputs):
    torch.manual_seed(1)
    matrix = packed(torch.randn(outputs, inputs).to(dtype))
    bias = torch.randn(outputs).to(dtype)
    x = torch.randn(260, inputs).to(dtype)
    for wide in (False, True):
        alone = torch.cat([matrix.multiply(row[None], bias, wide=wide) for row in x])
        for rows in (2, 3, 13, 14, 15, 29, 64, 113, 260):
            for start in (0, 260 - rows):
                several = matrix.multiply(x[start : start + rows], bias, wide=wide)
                assert torch.equal(several, alone[start : start + rows]), rows


def test_threads_and_places_change_nothing(threads):
    """Nor do the rows that other outputs lie in: the same matrix as part of a larger one."""
    torch.manual_seed(2)
    plain, x = torch.randn(96, 80).bfloat16(), torch.randn(50, 80).bfloat16()
    both = packed(torch.cat((plain, plain.flip(0), plain[:17]))).multiply(x)
    assert torch.equal(both[:, :96], packed(plain).multiply(x))
    assert torch.equal(both[:, 96:192].flip(1), both[:, :96])
    assert torch.equal(both[:, 192:], both[:, :17])


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_that_lie_apart(dtype):
    torch.manual_seed(3)
    plain, wider = torch.randn(40, 31).to(dtype), torch.randn(20, 63).to(dtype)
    for x in (wider[:, 1:32], wider[:1, 32:], wider[::2, :31], wider[:1, :31].expand(5, 31)):
        assert torch.equal(packed(plain).multiply(x), packed(plain).multiply(x.contiguous()))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("inputs", [9, 64])
def test_special_values(dtype, inputs):
    nan, infinite = math.nan, math.inf
    torch.manual_seed(4)
    for value in (nan, infinite, -infinite, 0.0, -0.0, 1e38, -1e38, 1e-40):
        plain, x = torch.randn(35, inputs).to(dtype), torch.randn(3, inputs).to(dtype)
        x[1, inputs - 1] = value
        plain[34, inputs // 2] = value
        result, twin = packed(plain).multiply(x), multiply_twin(x, plain)
        assert torch.equal(result.isnan(), twin.isnan())
        torch.testing.assert_close(result, twin, rtol=2e-2, atol=1e-4, equal_nan=True)
    zeros = packed(torch.zeros(3, inputs, dtype=dtype)).multiply(torch.zeros(2, inputs, dtype=dtype))
    assert torch.equal(zeros, torch.zeros(2, 3, dtype=dtype))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("outputs", "inputs", "rows"), [(0, 5, 2), (5, 0, 2), (5, 5, 0), (0, 0, 1)])
def test_nothing_to_do(dtype, outputs, inputs, rows):
    bias = torch.randn(outputs).to(dtype)
    x, matrix = torch.randn(rows, inputs).to(dtype), packed(torch.randn(outputs, inputs).to(dtype))
    result = matrix.multiply(x, bias)
    assert result.shape == (rows, outputs)
    if not inputs:
        assert torch.equal(result, bias.expand(rows, outputs))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_packing_and_looking_up(dtype, outputs, inputs):
    torch.manual_seed(5)
    wider = torch.randn(outputs, inputs + 3).to(dtype)
    for plain in (wider[:, :inputs].contiguous(), wider[:, :inputs]):
        matrix = packed(plain)
        assert torch.equal(matrix.data, pack_twin(plain)) and matrix.nbytes == plain.numel() * dtype.itemsize
        assert torch.equal(matrix.rows(torch.arange(outputs)), plain)
    ids = torch.tensor([0, outputs + 6, 7, outputs + 7, -1, 2**62, -(2**62), 6, 8])
    assert torch.equal(matrix.rows(ids, 7), rows_twin(plain, ids, 7))
    assert matrix.rows(ids[:0]).shape == (0, inputs)


def test_what_does_not_fit_is_refused():
    matrix, x = packed(torch.randn(8, 6)), torch.randn(2, 6)
    cpu = torch.device("cpu")
    assert (
        packs(torch.float32, cpu) and not packs(torch.float16, cpu) and not packs(torch.float32, torch.device("meta"))
    )
    with pytest.raises(ValueError, match="no packed form"):
        PackedMatrix(8, 6, torch.float16, WeightMemory())
    for wrong in (x[:, :5], x.bfloat16(), x.double(), torch.randn(6, 2).T, torch.empty(2, 6, device="meta")):
        with pytest.raises(ValueError, match="x has to be"):
            matrix.multiply(wrong)
    for bias in (torch.randn(7), torch.randn(8).bfloat16(), torch.randn(16)[::2]):
        with pytest.raises(ValueError, match="bias has to be"):
            matrix.multiply(x, bias)
    for plain in (torch.randn(7, 6), torch.randn(8, 6).bfloat16(), torch.randn(6, 8).T):
        with pytest.raises(ValueError, match="plain matrix has to be"):
            matrix.fill(plain)
    for ids in (torch.tensor([1.0]), torch.tensor([[1]]), torch.arange(8)[::2], torch.arange(4, dtype=torch.int32)):
        with pytest.raises(ValueError, match="ids have to be"):
            matrix.rows(ids)


def test_memory_is_taken_in_lines_and_outlives_its_source():
    memory = WeightMemory()
    first, second = memory.empty((3, 5), torch.bfloat16), memory.empty((7,), torch.float32)
    big = memory.empty((1 << 25, 4), torch.uint8)
    del memory
    for tensor in (first, second, big):
        assert tensor.data_ptr() % 64 == 0 and tensor.is_contiguous()
    first.fill_(1.0), second.fill_(2.0), big[-1].fill_(3)
    assert (first == 1).all() and (second == 2).all() and (big[-1] == 3).all()

"""Products with quantised weights against de-quantised ones, for every kind, shape and instruction set."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from phalanx.kernels.block_layout import KINDS, packed_bytes
from phalanx.kernels.block_matmul import (
    BlockProduct,
    IntegerRows,
    PackedBlocks,
    block_matmul_twin,
    pack_blocks,
    pack_integers,
)
from phalanx.kernels.library import native
from phalanx.loading.gguf_blocks import dequantize

FILE_KINDS = [kind for kind in KINDS if not kind.startswith("INT")]
GROUPED = {"INT4/32": 32, "INT4/64": 64, "INT4/96": 32, "INT4/128": 128, "INT4/256": 256}
"""INT4 with scales for so many inputs, and the columns that a set of scales is kept for."""
ALL_KINDS = [*KINDS, *GROUPED]
CPU_TYPES = [torch.float32, torch.bfloat16, torch.float16]


def matrix(kind: str, outputs: int, inputs: int, columns: tuple[int, int] | None = None) -> tuple[PackedBlocks, Tensor]:
    """A random matrix, packed and as float32."""
    rng = np.random.default_rng(outputs * 1000 + inputs)
    columns = columns or (0, inputs)
    if kind == "INT8":
        numbers = torch.from_numpy(rng.integers(-128, 128, (outputs, columns[1]), dtype=np.int8))
        scales = torch.from_numpy(rng.normal(0, 0.01, (outputs, 1)).astype(np.float32))
        return pack_integers(IntegerRows(kind, numbers, scales)), (numbers * scales)[:, slice(*columns)]
    if kind.startswith("INT4"):
        rows, values = int4(kind, outputs, inputs, columns, rng)
        return pack_integers(rows), values
    layout = KINDS[kind]
    width = -(-inputs // layout.elements) * layout.elements
    raw = rng.integers(0, 256, (outputs * width // layout.elements, layout.nbytes), dtype=np.uint8)
    for at in (208,) if kind == "Q6_K" else (0, 2) if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (0,):
        raw[:, at : at + 2] = rng.normal(0, 0.01, (len(raw), 1)).astype(np.float16).view(np.uint8)
    blocks = torch.from_numpy(raw).view(outputs, width // layout.elements * layout.nbytes)
    values = dequantize(blocks.reshape(-1), kind, (outputs, width))[:, slice(*columns)]
    return pack_blocks(kind, blocks, columns), values


def int4(
    kind: str, outputs: int, inputs: int, columns: tuple[int, int], rng: np.random.Generator
) -> tuple[IntegerRows, Tensor]:
    group = int(kind.partition("/")[2] or 0)
    width, unit, (start, stop) = group or inputs, GROUPED.get(kind, inputs), columns
    integers = torch.from_numpy(rng.integers(0, 16, (outputs, inputs), dtype=np.uint8))
    sets = -(-inputs // width)
    scales = torch.from_numpy(rng.normal(0, 0.01, (outputs, sets)).astype(np.float32))
    zeros = torch.from_numpy(rng.integers(0, 16, (outputs, sets), dtype=np.uint8))
    of = torch.arange(inputs) // width
    values = (scales[:, of] * (integers.float() - zeros[:, of]))[:, start:stop]
    taken = torch.arange(start // unit * unit, stop, unit) // width
    first = start // 32 * 32 if group else start
    rows = IntegerRows("INT4", integers[:, first:stop], scales[:, taken], zeros[:, taken], group, start)
    return rows, values


def cuts(kind: str) -> list[tuple[int, tuple[int, int]]]:
    """(Inputs in the file, the columns taken): whole, and with both ends inside a block."""
    if kind in GROUPED:
        return [(256, (0, 256)), (768, (64, 700)), (768, (200, 711)), (96, (32, 96))]
    wide = KINDS[kind].elements == 256
    return [(256, (0, 256)), (768, (64, 700)), (768, (40, 711))] if wide else [(96, (0, 96)), (160, (0, 131))]


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_rows_come_back(kind: str) -> None:
    for inputs, columns in [*cuts(kind), *([(64, (8, 50)), (64, (3, 3))] if kind in FILE_KINDS else [])]:
        for outputs in (0, 1, 16, 37):
            packed, values = matrix(kind, outputs, inputs, columns)
            name, _, group = kind.partition("/")
            assert packed.data.numel() == packed_bytes(name, outputs, columns, int(group or 0))
            more, other = matrix(kind, 5, inputs, columns)
            product, both = BlockProduct([packed, more]), torch.cat([values, other])
            order = torch.randperm(outputs + 5)
            for dtype in CPU_TYPES:
                assert torch.equal(product.rows(order + 3, 3, dtype), both[order].to(dtype))
            assert not product.rows(torch.tensor([-1, outputs + 5, 2**40]), 0).any()


def test_sizes_are_the_librarys() -> None:
    for kind in ALL_KINDS:
        name, _, group = kind.partition("/")
        layout, unit = KINDS[name], GROUPED.get(kind, 256)
        shift = 31 if kind == "INT4" else (unit // 32).bit_length() - 1
        for outputs, columns in ((1, (0, 32)), (50, (0, 768)), (16, (0, 33)), (17, (64, 400))):
            start, stop = columns
            if start and layout.elements == 32 and kind not in GROUPED:
                continue
            blocks, phase = -(-stop // 32) - start // 32, start % unit // 32
            assert packed_bytes(name, outputs, columns, int(group or 0)) == native().block_packed_bytes(
                layout.number, outputs, blocks, phase, shift
            )


@pytest.mark.usefixtures("instruction_set", "threads")
@pytest.mark.parametrize("kind", ALL_KINDS)
class TestProducts:
    def test_near_the_dequantised_product(self, kind: str) -> None:
        """As the twin computes; and within what rounding activations to a 254th of their block's range can change."""
        torch.manual_seed(0)
        for inputs, columns in cuts(kind):
            parts = [matrix(kind, outputs, inputs, columns) for outputs in (37, 16, 1)]
            weight = torch.cat([values for _, values in parts])
            product = BlockProduct([packed for packed, _ in parts])
            for dtype in CPU_TYPES:
                x = torch.randn(5, weight.shape[1]).to(dtype)
                bias = torch.randn(54)
                result = product(x, bias, torch.float32)
                lead = product.lead
                expected = block_matmul_twin(x, weight, bias, lead=lead, dtype=torch.float32)
                torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5 * float(weight.abs().max()) * 30)
                held = torch.nn.functional.pad(x.float(), (lead, -(lead + x.shape[1]) % 32)).view(5, -1, 32)
                half_unit = (held.abs().amax(-1, keepdim=True) / 254).expand_as(held).reshape(5, -1)
                bound = half_unit[:, lead : lead + x.shape[1]] @ weight.abs().T
                exact = x.double() @ weight.double().T + bias
                assert ((result - exact).abs() <= bound * 1.001 + 1e-4 * bound.max()).all()
                own = product(x, bias.to(dtype))
                assert torch.equal(own, product(x, bias.to(dtype).float(), torch.float32).to(dtype))
                apart = torch.randn(5, 2 * weight.shape[1]).to(dtype)[:, : weight.shape[1]]
                assert torch.equal(product(apart, None), product(apart.contiguous(), None))

    def test_a_row_depends_on_no_other(self, kind: str) -> None:
        torch.manual_seed(1)
        inputs, columns = cuts(kind)[-1]
        product = BlockProduct([matrix(kind, outputs, inputs, columns)[0] for outputs in (80, 23)])
        x = torch.randn(150, product.inputs).bfloat16()
        whole = product(x, None, torch.float32)
        for rows in (1, 2, 3, 4, 7, 8, 9, 31, 64):
            for start in (0, 1, 150 - rows):
                part = product(x[start : start + rows].clone(), None, torch.float32)
                assert torch.equal(part, whole[start : start + rows]), (rows, start)
        assert torch.equal(product(x.flip(0).contiguous(), None, torch.float32).flip(0), whole)

    def test_special_activations(self, kind: str) -> None:
        inputs = 256
        packed, values = matrix(kind, 20, inputs)
        product = BlockProduct([packed])
        x = torch.randn(8, inputs)
        x[0], x[1], x[2, 5], x[3, 255], x[4, 0] = 0.0, -0.0, math.nan, math.inf, -math.inf
        x[5] = 1e-42
        x[6, 7], x[7, 3] = 3e38, -1e-35
        y = product(x, None)
        assert not y[:2].any() and not y[5].abs().gt(1e-28).any()
        assert y[2:5].isnan().all(), "what is not finite is not lost"
        assert y[6:].isfinite().all() or values.abs().max() > 1
        assert product(x[:0], None).shape == (0, 20)


@pytest.mark.usefixtures("instruction_set")
def test_kinds_stand_side_by_side() -> None:
    kinds = ["Q4_1", "Q8_0", "Q4_K", "Q6_K", "Q5_0"]
    parts = [matrix(kind, 18 + i, 256) for i, kind in enumerate(kinds)]
    product = BlockProduct([packed for packed, _ in parts])
    x = torch.randn(9, 256)
    alone = [BlockProduct([packed])(x, None) for packed, _ in parts]
    assert torch.equal(product(x, None), torch.cat(alone, 1))


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("gaps", [False, True])
def test_inputs_in_another_order(gaps: bool) -> None:
    """The same as of activations that were put in that order before; and rows come back as they were."""
    rows, values = int4("INT4/32", 21, 160, (0, 160), np.random.default_rng(3))
    order = torch.randperm(160)
    if gaps:
        order = torch.where(order < 130, order, -1)
        values = values.where(order >= 0, 0.0)
        zeros = rows.zeros.repeat_interleave(32, 1)
        rows = replace(rows, integers=rows.integers.where(order >= 0, zeros))
    width = int(order.max()) + 1
    product, plain = BlockProduct([pack_integers(replace(rows, order=order))]), BlockProduct([pack_integers(rows)])
    assert product.inputs == width
    x = torch.randn(5, width)
    put = torch.cat([x, torch.zeros(5, 1)], 1)[:, order]
    assert torch.equal(product(x, None), plain(put, None))
    back = torch.zeros(21, width + 1).index_copy_(1, order % (width + 1), values)[:, :width]
    assert torch.equal(product.rows(torch.arange(21)), back)
    with pytest.raises(ValueError, match="x has to be"):
        product(torch.zeros(5, width + 1), None)


@pytest.mark.usefixtures("instruction_set")
def test_float16_results_round_as_torch_does() -> None:
    """One weight of 1 and scales that are exact: results are the activations, over the whole range of float16."""
    product = BlockProduct([pack_integers(IntegerRows("INT8", torch.ones(1, 1, dtype=torch.int8), torch.ones(1, 1)))])
    x = torch.cat([torch.logspace(-9, 6, 4001), torch.tensor([65504.0, 65519.9, 65520.0, 6e-8, 2.9e-8, 0.0])])
    x = torch.cat([x, -x])[:, None].contiguous()
    exact = product(x, None, torch.float32)
    assert torch.equal(product(x, None, torch.float16).view(torch.int16), exact.half().view(torch.int16))


def test_what_does_not_fit_is_refused() -> None:
    packed, _ = matrix("Q8_0", 20, 96)
    product = BlockProduct([packed])
    for x in (torch.zeros(2, 95), torch.zeros(2, 96, dtype=torch.int32), torch.zeros(96, 2).T):
        with pytest.raises(ValueError, match="x has to be"):
            product(x, None)
    with pytest.raises(ValueError, match="bias has to be"):
        product(torch.zeros(2, 96), torch.zeros(19))
    with pytest.raises(ValueError, match="same columns"):
        BlockProduct([packed, matrix("Q8_0", 20, 64)[0]])
    raw = torch.zeros(4, 34, dtype=torch.uint8)
    for columns in ((0, 33), (-1, 3), (32, 32)):
        with pytest.raises(ValueError, match="column"):
            pack_blocks("Q8_0", raw, columns)
    with pytest.raises(ValueError, match="bytes"):
        pack_blocks("Q8_0", raw[:, :33], (0, 32))
    byte, one = torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 1)
    zeros = torch.zeros(4, 1, dtype=torch.uint8)
    for rows, match in (
        (IntegerRows("INT8", byte.view(torch.int8), one[:3]), "1 float32 scale"),
        (IntegerRows("INT8", byte, one), "int8"),
        (IntegerRows("INT8", byte.view(torch.int8), one, zeros), "INT8 none"),
        (IntegerRows("INT4", byte.view(torch.int8), one, zeros), "uint8"),
        (IntegerRows("INT4", byte, one), "INT4 has zeros"),
        (IntegerRows("INT4", byte, one, zeros, 32), "2 float32 scale"),
        (IntegerRows("INT4", byte, one, zeros, 24), "multiple of 32"),
        (IntegerRows("INT4", byte, one, zeros.int()), "zeros are uint8"),
        (IntegerRows("INT4", byte, one, zeros, order=torch.zeros(63, dtype=torch.int64)), "for each input"),
    ):
        with pytest.raises(ValueError, match=match):
            pack_integers(rows)
    for ids in (torch.zeros(2), torch.zeros(2, 2, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)[::2]):
        with pytest.raises(ValueError, match="ids have to be"):
            product.rows(ids)

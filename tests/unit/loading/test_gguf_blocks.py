"""Every block format equals the `gguf` library's values, bit for bit."""

import time

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from phalanx.checkpoint.locate import locate
from phalanx.checkpoint.tensor_info import BLOCK_TYPES
from phalanx.errors import FormatError, UnsupportedModel
from phalanx.loading.gguf_blocks import FORMATS, dequantize
from phalanx.loading.tensors import TensorReader

KINDS = ["F32", "F16", "BF16", *FORMATS]
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2),
          "Q6_K": (208,)}  # fmt: skip
EXTREME = [0.0, -0.0, 65504.0, -65504.0, 6e-8, -6e-8, 6.1e-5, 1.0, -1.0, float("inf"), float("-inf"), float("nan")]


def sizes(kind):
    return (FORMATS[kind].elements, FORMATS[kind].nbytes) if kind in FORMATS else (1, 4 if kind == "F32" else 2)


def reference(raw, kind):
    with np.errstate(all="ignore"):
        return quants.dequantize(raw, GGMLQuantizationType[kind])


def check(raw, kind):
    expected = reference(raw, kind)
    got = dequantize(torch.from_numpy(raw).view(-1), kind, expected.shape).numpy()
    assert got.shape == expected.shape
    assert got.dtype == np.float32
    unknown = np.isnan(expected)
    assert np.array_equal(np.isnan(got), unknown)
    assert np.array_equal(got.view(np.uint32)[~unknown], expected.view(np.uint32)[~unknown])
    return got


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_random_bytes(kind, seed):
    """Random bytes are valid blocks, with scales from every corner: infinite, not a number, denormal."""
    _, nbytes = sizes(kind)
    rows = np.random.default_rng(seed).integers(0, 256, (7, 96 * nbytes), dtype=np.uint8)
    check(rows, kind)


@pytest.mark.parametrize("kind", FORMATS)
def test_extreme_scales(kind):
    rng = np.random.default_rng(7)
    blocks = rng.integers(0, 256, (len(EXTREME) ** 2, FORMATS[kind].nbytes), dtype=np.uint8)
    first, second = (grid.ravel() for grid in np.meshgrid(EXTREME, EXTREME))
    for at, scales in zip(HALVES[kind], (first, second), strict=False):
        blocks[:, at : at + 2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    got = check(blocks, kind)
    assert np.isnan(got).any()
    assert np.isfinite(got).any()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_values_that_were_quantised_come_back(kind):
    """Not only equal to a library: close to the numbers that went in."""
    values = np.random.default_rng(1).normal(size=(5, 64)).astype(np.float32)
    raw = quants.quantize(values, GGMLQuantizationType[kind])
    got = check(raw, kind)
    assert np.abs(got - values).max() < {"Q4_0": 0.4, "Q4_1": 0.25, "Q5_0": 0.2, "Q5_1": 0.15, "Q8_0": 0.02}[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16])
def test_other_targets_are_the_rounded_float32(kind, target):
    """Also over the borders of the pieces that the work is done in."""
    elements, nbytes = sizes(kind)
    count = (1 << 18) // elements + 3
    raw = torch.from_numpy(np.random.default_rng(2).integers(0, 256, count * nbytes, dtype=np.uint8))
    shape = (count, elements)
    full = dequantize(raw, kind, shape)
    assert torch.equal(dequantize(raw, kind, shape, target=target).nan_to_num(7), full.to(target).nan_to_num(7))
    out = torch.empty(shape, dtype=target)
    assert dequantize(raw, kind, shape, out) is out
    assert torch.equal(out.nan_to_num(7), full.to(target).nan_to_num(7))


def test_bytes_must_fit_the_shape():
    for kind in KINDS:
        elements, nbytes = sizes(kind)
        with pytest.raises(FormatError, match="are not"):
            dequantize(torch.zeros(3 * nbytes, dtype=torch.uint8), kind, (2, elements))
    with pytest.raises(FormatError, match="are not"):
        dequantize(torch.zeros(18, dtype=torch.uint8), "Q4_0", (33,))
    with pytest.raises(UnsupportedModel, match=r"IQ4_NL.*Supported: F32"):
        dequantize(torch.zeros(18, dtype=torch.uint8), "IQ4_NL", (32,))


def test_formats_are_those_that_the_checkpoint_layer_lets_through():
    assert set(FORMATS) == BLOCK_TYPES


def test_the_demo_model_is_read_quickly():
    """The whole model in bf16 on one core. (What memory that takes: test_tensors.py.)"""
    checkpoint = locate(None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = []
        for _ in range(2):
            begin = time.process_time()
            with TensorReader() as reader:
                for info in checkpoint.tensors().values():
                    reader.read(info, dtype=torch.bfloat16)
            times.append(time.process_time() - begin)
    finally:
        torch.set_num_threads(threads)
    assert reader.bytes_read == sum(info.nbytes for info in checkpoint.tensors().values())
    assert min(times) < 1.5

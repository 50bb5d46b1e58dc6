"""What config.json says of quantised checkpoints, and what their tensors are put together to. No torch, no file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx.checkpoint.quantized import Form, QuantizedInfo, fold, read_layout
from phalanx.checkpoint.tensor_info import TensorInfo
from phalanx.errors import FormatError, UnsupportedModel

FILE = Path("model.safetensors")
SIZES = {"I32": 4, "I64": 8, "F16": 2, "BF16": 2, "F32": 4, "I8": 1}

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
FOUR = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64, "dynamic": False}
EIGHT = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def compressed(weights: Any, inputs: Any = None, stored: str = "pack-quantized", **more: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    return {"quant_method": "compressed-tensors", "format": stored, "config_groups": groups, **more}


W4, W8 = compressed(FOUR), compressed(EIGHT, TOKEN, "int-quantized")


@pytest.mark.parametrize(
    ("section", "form"),
    [
        (GPTQ, Form("gptq", 64)),
        (GPTQ | {"checkpoint_format": "gptq_v2", "group_size": -1, "desc_act": True}, Form("gptq_v2", 0)),
        (GPTQ | {"group_size": 128, "desc_act": True, "dynamic": {"-:.*down.*": {}}}, Form("gptq", 128, ordered=True)),
        (AWQ, Form("awq", 64)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"}, Form("awq", 32)),
        (W4, Form("packed", 64)),
        (compressed(FOUR | {"actorder": "group", "symmetric": False}), Form("packed", 64, True, False)),
        (compressed(FOUR | {"actorder": "static"}), Form("packed", 64)),
        (compressed(FOUR | {"strategy": "channel", "group_size": None}), Form("packed", 0)),
        (compressed(FOUR | {"strategy": None, "group_size": -1}), Form("packed", 0)),
        (W8, Form("int8", 0)),
        (compressed(EIGHT, TOKEN | {"symmetric": False}, "int-quantized"), Form("int8", 0)),
    ],
)
def test_what_is_read(section: dict[str, Any], form: Form) -> None:
    layout = read_layout({"quantization_config": section})
    assert layout is not None
    assert (layout.method, layout.forms) == (section["quant_method"], (form,))
    assert read_layout({"compression_config": section}) == layout


def test_plain_models() -> None:
    assert read_layout({}) is None and read_layout({"quantization_config": None}) is None


@pytest.mark.parametrize(
    ("section", "found"),
    [
        ("gptq", "'an unknown method'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "'fp8'"),
        (GPTQ | {"bits": 8}, "GPTQ in 8 bits"),
        (GPTQ | {"bits": 3}, "GPTQ in 3 bits"),
        (GPTQ | {"checkpoint_format": "marlin"}, "GPTQ in the format 'marlin'"),
        (GPTQ | {"is_marlin_format": True}, "GPTQ in the format 'marlin'"),
        (GPTQ | {"pack_dtype": "int8"}, "GPTQ packed into int8"),
        (GPTQ | {"group_size": 16}, "GPTQ in groups of 16"),
        (GPTQ | {"group_size": True}, "GPTQ in groups of True"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, "GPTQ with another `bits` for some layers"),
        (GPTQ | {"adapter": {"name": "lora"}}, "GPTQ and an adapter"),
        (AWQ | {"version": "gemv"}, "AWQ in the version 'gemv'"),
        (AWQ | {"bits": 8}, "AWQ in 8 bits"),
        (AWQ | {"zero_point": False}, "AWQ without zero points"),
        (compressed(EIGHT), "int8 channel weights and plain activations"),
        (compressed({"num_bits": 8, "type": "float", "strategy": "tensor"}, {"num_bits": 8, "type": "float"},
                    "float-quantized"), "float8 tensor weights and float8 activations, stored as 'float-quantized'"),
        (compressed({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
                    stored="nvfp4-pack-quantized"), "float4 tensor_group weights"),
        (compressed(FOUR, TOKEN), "int4 group weights and int8 token dynamic activations"),
        (compressed(FOUR, TOKEN | {"num_bits": 4}, "int-quantized"), "int4 token dynamic activations"),
        (compressed(EIGHT, TOKEN | {"dynamic": False, "strategy": "tensor"}, "int-quantized"),
         "int8 tensor activations"),
        (compressed(EIGHT | {"symmetric": False}, TOKEN, "int-quantized"), "int8 channel asymmetric weights"),
        (compressed(EIGHT | {"strategy": "tensor"}, TOKEN, "int-quantized"), "int8 tensor weights"),
        (compressed(FOUR, stored="marlin-24"), "'marlin-24'"),
        (compressed(FOUR | {"group_size": 48}), "compressed-tensors in groups of 48"),
        (compressed(FOUR, kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (compressed(FOUR, sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask"),
        (compressed(FOUR, transform_config={"config_groups": {}}), "transform_config"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "without `config_groups`"),
        (compressed("W4A16"), "plain weights"),
    ],
)  # fmt: skip
def test_what_is_refused(section: Any, found: str) -> None:
    with pytest.raises(UnsupportedModel) as refused:
        read_layout({"quantization_config": section})
    assert found in refused.value.message
    assert "These work: GPTQ in 4 bits" in (refused.value.fix or "")


def tensors(**parts: tuple[str, tuple[int, ...]]) -> dict[str, TensorInfo]:
    """Of the matrix "up" [40, 192], and a norm."""
    found = {"norm.weight": ("F16", (192,))} | {f"up.{last}": part for last, part in parts.items()}
    infos, offset = {}, 100
    for name, (dtype, shape) in found.items():
        count = SIZES[dtype]
        for extent in shape:
            count *= extent
        infos[name] = TensorInfo(name, dtype, shape, FILE, offset, count)
        offset += count
    return infos


OF_GPTQ = {
    "qweight": ("I32", (24, 40)),
    "qzeros": ("I32", (3, 5)),
    "scales": ("F16", (3, 40)),
    "g_idx": ("I32", (192,)),
}
OF_AWQ = {"qweight": ("I32", (192, 5)), "qzeros": ("I32", (3, 5)), "scales": ("F16", (3, 40))}
OF_W4 = {"weight_packed": ("I32", (40, 24)), "weight_scale": ("BF16", (40, 3)), "weight_shape": ("I64", (2,))}
OF_W8 = {"weight": ("I8", (40, 192)), "weight_scale": ("BF16", (40, 1))}


@pytest.mark.parametrize(
    ("section", "parts", "kind"),
    [
        (GPTQ, OF_GPTQ, "INT4"),
        (AWQ, OF_AWQ, "INT4"),
        (W4, OF_W4, "INT4"),
        (compressed(FOUR | {"symmetric": False}), OF_W4 | {"weight_zero_point": ("I32", (5, 3))}, "INT4"),
        (W8, OF_W8, "INT8"),
    ],
)
def test_a_matrix_is_one_record(section: dict[str, Any], parts: dict[str, Any], kind: str) -> None:
    given = tensors(**parts)
    folded = fold(given, read_layout({"quantization_config": section}))
    assert set(folded) == {"norm.weight", "up.weight"}
    matrix = folded["up.weight"]
    assert isinstance(matrix, QuantizedInfo)
    assert (matrix.name, matrix.dtype, matrix.shape, matrix.file) == ("up.weight", kind, (40, 192), FILE)
    assert matrix.nbytes == sum(info.nbytes for name, info in given.items() if name.startswith("up."))


def test_schemes_of_several_groups() -> None:
    """Each matrix has the one that its tensors fit."""
    groups = {
        "a": {"weights": FOUR, "format": "pack-quantized"},
        "b": {"weights": FOUR | {"strategy": "channel", "group_size": None}, "format": "pack-quantized"},
        "c": {"weights": EIGHT, "input_activations": TOKEN, "format": "int-quantized"},
    }
    layout = read_layout({"quantization_config": W4 | {"format": "mixed-precision", "config_groups": groups}})
    assert layout is not None and len(layout.forms) == 3
    for parts, form in (
        (OF_W4, Form("packed", 64)),
        (OF_W4 | {"weight_scale": ("F16", (40, 1))}, Form("packed", 0)),
        (OF_W8, Form("int8", 0)),
    ):
        matrix = fold(tensors(**parts), layout)["up.weight"]
        assert isinstance(matrix, QuantizedInfo) and matrix.form == form


@pytest.mark.parametrize(
    ("section", "parts", "wrong"),
    [
        (GPTQ, {k: v for k, v in OF_GPTQ.items() if k != "scales"}, r"'up\.scales' is missing"),
        (GPTQ, {k: v for k, v in OF_GPTQ.items() if k != "qzeros"}, r"'up\.qzeros' is missing"),
        (GPTQ | {"desc_act": True}, {k: v for k, v in OF_GPTQ.items() if k != "g_idx"}, r"'up\.g_idx' is missing"),
        (GPTQ | {"group_size": 128}, OF_GPTQ, r"'up\.scales' is F16 \[3, 40\] .* F16 or BF16 or F32 \[2, 40\]"),
        (GPTQ, OF_GPTQ | {"qzeros": ("I32", (3, 10))}, r"'up\.qzeros' is I32 \[3, 10\] .* I32 \[3, 5\]"),
        (GPTQ, OF_GPTQ | {"qweight": ("F16", (24, 40))}, r"'up\.qweight' is F16 \[24, 40\]"),
        (GPTQ, OF_GPTQ | {"qweight": ("I32", (960,))}, r"'up\.qweight' is I32 \[960\]"),
        (GPTQ, OF_GPTQ | {"g_idx": ("I32", (24,))}, r"'up\.g_idx' is I32 \[24\]"),
        (GPTQ, OF_GPTQ | {"weight": ("F16", (40, 192))}, "'up' has a plain weight and a quantised one"),
        (AWQ, OF_GPTQ, r"'up\.scales' is F16 \[3, 40\] .* \[1, 320\]"),
        (W4, {k: v for k, v in OF_W4.items() if k != "weight_shape"}, r"'up\.weight_shape' is missing"),
        (W4, OF_W4 | {"weight_scale": ("BF16", (40, 6))}, r"'up\.weight_scale' is BF16 \[40, 6\] .* \[40, 3\]"),
        (W4, OF_W4 | {"weight_zero_point": ("I32", (5, 3))}, "zero points, which the config says it has not"),
        (compressed(FOUR | {"symmetric": False}), OF_W4, r"'up\.weight_zero_point' is missing"),
        (compressed(FOUR | {"group_size": 128}), OF_W4 | {"weight_scale": ("F16", (40, 2))}, "not whole groups of 128"),
        (W8, OF_W8 | {"weight_scale": ("F16", (40, 3))}, r"'up\.weight_scale' is F16 \[40, 3\]"),
        (W8, OF_W8 | {"input_scale": ("F16", (1,))}, "'input_scale', which the config does not provide for"),
        (GPTQ, {"weight": ("F16", (40, 192))}, r"no tensor is '\*\.qweight'"),
        (W4, OF_W8, r"no tensor is '\*\.weight_packed'"),
    ],
)
def test_tensors_that_contradict(section: dict[str, Any], parts: dict[str, Any], wrong: str) -> None:
    with pytest.raises(FormatError, match=wrong):
        fold(tensors(**parts), read_layout({"quantization_config": section}))


def test_a_config_that_says_nothing() -> None:
    with pytest.raises(FormatError, match=r"'up\.qweight' is quantised, but config\.json has no `quantization_config`"):
        fold(tensors(**OF_GPTQ), None)
    plain = tensors(weight=("F16", (40, 192)))
    assert fold(plain, None) == plain

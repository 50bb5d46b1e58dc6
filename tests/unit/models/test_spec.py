"""What recipes make of configs, and the numbers a spec gives."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file

from phalanx.checkpoint.locate import locate
from phalanx.errors import CheckpointError, UnsupportedModel
from phalanx.kernels.library import native
from phalanx.models.registry import read_spec, supported, weight_table
from phalanx.models.spec import DynamicPowerScaling, LongRopeScaling, RopeSpec
from tests.helpers.decoders import decoder_of
from tests.helpers.tiny_models import FAMILIES, tiny_checkpoint

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_hidden_layers": 32, "intermediate_size": 14336, "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16", "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
}  # fmt: skip


def test_known_sizes() -> None:
    """Llama 3 8B, and the shape of Qwen-14B-Chat, as published."""
    spec = read_spec(LLAMA)
    assert spec.num_parameters == 8_030_261_248
    assert spec.kv_bytes_per_token("bfloat16") == 131_072
    assert spec.weight_bytes("bfloat16") == 2 * spec.num_parameters
    assert (spec.max_positions, spec.checkpoint_dtype, spec.num_layers) == (131072, "bfloat16", 32)
    qwen = read_spec({
        "model_type": "qwen", "vocab_size": 152064, "hidden_size": 5120, "num_attention_heads": 40, "kv_channels": 128,
        "num_hidden_layers": 40, "intermediate_size": 27392, "max_position_embeddings": 8192, "seq_length": 2048,
        "use_dynamic_ntk": True, "use_logn_attn": True, "bf16": True, "no_bias": True, "tie_word_embeddings": False,
        "rotary_emb_base": 10000, "rotary_pct": 1.0, "layer_norm_epsilon": 1e-6,
    })  # fmt: skip
    assert qwen.num_parameters == 14_167_290_880
    assert qwen.prompt_classes == (2048, 4096) and qwen.checkpoint_dtype == "bfloat16"


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_are_real(family: str) -> None:
    """Parameters, weight bytes and cache bytes equal what is stored and what is allocated."""
    path = tiny_checkpoint(family)
    spec = read_spec(locate(str(path)).config)
    stored = load_file(path / "model.safetensors")
    assert spec.num_parameters == sum(array.size for array in stored.values())
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        decoder = decoder_of(path, dtype=dtype)
        assert decoder.nbytes == spec.weight_bytes(name)
        caches = decoder.allocate_caches(3, 4)
        assert sum(c.key.nbytes + c.value.nbytes for c in caches) == 12 * spec.kv_bytes_per_token(name)
    if native() is not None:
        caches = decoder.allocate_caches(3, 4, torch.int8)
        assert sum(c.key.nbytes + c.value.nbytes for c in caches) == 12 * spec.kv_bytes_per_token("int8")


def test_every_family_has_its_tables() -> None:
    for family in supported():
        name = {"gemma3_text": "gemma3", "qwen": "qwen1"}.get(family.model_types[0], family.model_types[0])
        spec = read_spec(locate(str(tiny_checkpoint(name))).config)
        assert weight_table(spec, "safetensors").rules
        if family.gguf:
            assert weight_table(spec, "gguf").rules
        else:
            with pytest.raises(UnsupportedModel, match="not supported as GGUF"):
                weight_table(spec, "gguf")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model_type": "mamba"}, UnsupportedModel, "type 'mamba' are not supported.*gemma2.*qwen3"),
        ({"model_type": None}, CheckpointError, "no `model_type`"),
        ({"hidden_size": None}, CheckpointError, "no `hidden_size`"),
        ({"hidden_size": "big"}, CheckpointError, "`hidden_size`.*'big'.*whole number"),
        ({"hidden_size": -4}, CheckpointError, "`hidden_size`"),
        ({"num_hidden_layers": 10**9}, CheckpointError, "`num_hidden_layers`"),
        ({"vocab_size": True}, CheckpointError, "`vocab_size`"),
        ({"num_key_value_heads": 5}, CheckpointError, "not a multiple of `num_key_value_heads` = 5"),
        ({"hidden_size": 4095}, CheckpointError, "does not divide into 32 heads"),
        ({"hidden_act": "xielu"}, UnsupportedModel, "activation function 'xielu'"),
        ({"rope_scaling": {"type": "mrope"}}, UnsupportedModel, "rotary scaling 'mrope'"),
        ({"rope_scaling": {"type": "linear"}}, CheckpointError, "no `factor`"),
        ({"rope_scaling": 3}, CheckpointError, "`rope_scaling`.*a section"),
        ({"rope_theta": float("nan")}, CheckpointError, "`rope_theta`"),
        ({"rms_norm_eps": 0}, CheckpointError, "`rms_norm_eps`"),
        ({"attention_bias": "yes"}, CheckpointError, "`attention_bias`.*true or false"),
        ({"torch_dtype": "int4"}, UnsupportedModel, "type 'int4'"),
        ({"quantization_config": {"quant_method": "fp8"}}, UnsupportedModel, "quantised with 'fp8'"),
        ({"partial_rotary_factor": 1.7}, CheckpointError, "`partial_rotary_factor`"),
    ],
)
def test_bad_configs(change: dict[str, Any], error: type[CheckpointError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        read_spec(LLAMA | change)
    assert "\n" not in str(caught.value)


def test_long_hostile_values_are_cut() -> None:
    with pytest.raises(UnsupportedModel) as caught:
        read_spec({"model_type": "x" * 100_000})
    assert len(str(caught.value)) < 400


def test_prompt_classes() -> None:
    assert RopeSpec(8, 1e4).prompt_classes(4096) == ()
    assert RopeSpec(8, 1e4, DynamicPowerScaling(100)).prompt_classes(500) == (100, 200, 400)
    longrope = LongRopeScaling((1.0,) * 4, (2.0,) * 4, 64, 1.0)
    assert RopeSpec(8, 1e4, longrope).prompt_classes(64) == ()
    assert RopeSpec(8, 1e4, longrope).prompt_classes(65) == (64,)


def test_no_torch() -> None:
    """Planner and CLI read specs on machines without torch."""
    families = ", ".join(f"phalanx.models.families.{family.module}" for family in supported())
    imports = f"import sys, phalanx.models.registry, phalanx.models.split, phalanx.distributed.mesh, {families}"
    code = f"{imports}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

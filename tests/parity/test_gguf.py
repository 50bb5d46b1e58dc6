"""A GGUF file, written by the `gguf` library, gives the same model as the safetensors checkpoint it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.decoders import decoder_of, random_ids, reference
from tests.helpers.stepping import Driver
from tests.helpers.tiny_gguf import to_gguf
from tests.helpers.tiny_models import tiny_checkpoint

# What GGUF does not carry is at the value that the format implies. Rows are whole blocks of 32 for Q8_0.
_WIDE = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "intermediate_size": 96}
_FACTORS = {
    "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.1 * i for i in range(12)], "long_factor": [1.0 + i for i in range(12)],
    "original_max_position_embeddings": 24,
}  # fmt: skip
MODELS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {}, _WIDE | {"num_key_value_heads": 2}),
    ("llama-biased", {"rope_parameters": {
        "rope_theta": 5000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }}, _WIDE),
    ("mistral", {}, _WIDE | {"num_key_value_heads": 4}),
    ("qwen2", {"use_sliding_window": False}, _WIDE),
    ("qwen3", {}, _WIDE),
    ("qwen1", {"use_dynamic_ntk": False, "use_logn_attn": False, "seq_length": 256},
     {"hidden_size": 64, "kv_channels": 16, "num_attention_heads": 4, "intermediate_size": 192}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": False}, {"n_embd": 64, "n_head": 4, "n_inner": 96}),
    ("phi3", {}, {"hidden_size": 96, "intermediate_size": 96}),
    ("phi3", {"rope_parameters": _FACTORS | {"short_factor": [1.0 + 0.1 * i for i in range(6)],
                                             "long_factor": [1.0 + i for i in range(6)]},
              "original_max_position_embeddings": 24, "max_position_embeddings": 96},
     {"hidden_size": 96, "intermediate_size": 96, "rope_parameters": _FACTORS}),
    ("gemma2", {"query_pre_attn_scalar": 10}, _WIDE | {"query_pre_attn_scalar": 16}),
    ("gemma3", {"query_pre_attn_scalar": 10}, _WIDE | {"query_pre_attn_scalar": 16}),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize(("family", "overrides", "wide"), MODELS, ids=lambda v: v if isinstance(v, str) else "")
def test_same_model(family: str, overrides: dict[str, Any], wide: dict[str, Any], kind: str, tmp_path: Path) -> None:
    source = tiny_checkpoint(family, **(overrides | wide if kind == "Q8_0" else overrides))
    path, twin = to_gguf(source, kind, tmp_path)
    decoder, plain = decoder_of(path), decoder_of(twin)
    ids = random_ids(37)
    logits = Driver(decoder).prefill(Driver(decoder).stream(ids))
    expected = Driver(plain).prefill(Driver(plain).stream(ids))
    assert (logits - expected).abs().max() < 1e-5
    assert (expected - reference(twin).logits(ids)).abs().max() < 1e-4
    assert decoder.spec.num_parameters == plain.spec.num_parameters
    assert decoder.spec.checkpoint_dtype == "quantized"

"""Every family against its reference, on tiny random checkpoints: logits, and greedy text through the paged cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.decoders import decoder_of, random_ids, reference
from tests.helpers.stepping import Driver
from tests.helpers.tiny_models import FAMILIES, tiny_checkpoint

TOLERANCE = 1e-4

VARIANTS: list[tuple[str, dict[str, Any]]] = [(family, {}) for family in FAMILIES]
VARIANTS += [
    ("llama", {"tie_word_embeddings": False, "num_key_value_heads": 9}),
    ("qwen1", {"use_dynamic_ntk": False, "use_logn_attn": False, "tie_word_embeddings": True}),
    ("gpt2", {"n_inner": None, "scale_attn_by_inverse_layer_idx": False, "tie_word_embeddings": False}),
    ("opt", {"layer_norm_elementwise_affine": False, "enable_bias": False}),
    ("opt", {"word_embed_proj_dim": 12, "tie_word_embeddings": False}),
    ("phi3", {"sliding_window": None, "partial_rotary_factor": 1.0, "tie_word_embeddings": True}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None, "num_key_value_heads": 1}),
    ("gemma3", {"rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }}),
]  # fmt: skip
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn with mscale": {
        "rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16.0,
        "original_max_position_embeddings": 64, "truncate": False,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": {
        "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.4, 2.0], "factor": 4.0,
        "long_factor": [1.0, 1.5, 3.0, 5.0, 9.0], "original_max_position_embeddings": 128,
    },
}  # fmt: skip
VARIANTS += [("llama", {"rope_parameters": {"rope_theta": 5000.0, **scaling}}) for scaling in SCALINGS.values()]


def _name(variant: tuple[str, dict[str, Any]]) -> str:
    return "-".join(
        [variant[0], *(str(v.get("rope_type", k)) if isinstance(v, dict) else k for k, v in variant[1].items())]
    )


@pytest.fixture(scope="module", params=VARIANTS, ids=_name)
def checkpoint(request: pytest.FixtureRequest) -> Path:
    family, overrides = request.param
    return tiny_checkpoint(family, **overrides)


def test_logits(checkpoint: Path) -> None:
    """In one piece, in uneven chunks, and token by token: each equal to the reference at every position."""
    ids = random_ids(41)
    expected = reference(checkpoint).logits(ids)
    assert expected.std() > 0.2, "the reference says too little to compare with"
    decoder = decoder_of(checkpoint)
    for chunks in (None, [5, 1, 17, 3, 9], [1]):
        driver = Driver(decoder)
        logits = driver.prefill(driver.stream(ids), chunks)
        assert logits.dtype == torch.float32 and logits.shape == expected.shape
        assert (logits - expected).abs().max() < TOLERANCE, f"chunks {chunks}"


def test_greedy(checkpoint: Path) -> None:
    """64 greedy tokens after a prompt of 23 (within the trained length of every variant) are the reference's."""
    ids = random_ids(23, seed=1)
    driver = Driver(decoder_of(checkpoint))
    assert driver.greedy(driver.stream(ids, room=64), 64) == reference(checkpoint).greedy(ids, 64)


@pytest.mark.parametrize("prompt", [16, 32, 64])
def test_dynamic_scaling_at_class_limits(prompt: int) -> None:
    """At 1, 2 and 4 times the trained length, our steps of the base meet transformers' continuous growth."""
    rope = {"rope_theta": 5000.0, "rope_type": "dynamic", "factor": 4.0}
    path = tiny_checkpoint("llama", rope_parameters=rope, max_position_embeddings=16)
    decoder = decoder_of(path)
    assert decoder.spec.max_positions == 64
    ids = random_ids(prompt, seed=2)
    driver = Driver(decoder)
    logits = driver.prefill(driver.stream(ids), [9])
    assert (logits - reference(path).logits(ids)).abs().max() < TOLERANCE


@pytest.mark.parametrize("prompt", [24, 25, 60])
def test_longrope_by_prompt_length(prompt: int) -> None:
    """Prompts up to the trained length take the short factors, longer ones the long factors, chunked or not."""
    half = 48 // 3 * 3 // 4 // 2
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
        "short_factor": [1.0 + 0.1 * i for i in range(half)], "long_factor": [1.0 + i for i in range(half)],
        "original_max_position_embeddings": 24,
    }  # fmt: skip
    path = tiny_checkpoint(
        "phi3", rope_parameters=rope, original_max_position_embeddings=24, max_position_embeddings=96
    )
    decoder = decoder_of(path)
    assert decoder.spec.prompt_classes == (24,)
    ids = random_ids(prompt, seed=3)
    driver = Driver(decoder)
    expected = reference(path).logits(ids)
    assert (driver.prefill(driver.stream(ids), [7, 13]) - expected).abs().max() < TOLERANCE


def test_old_config_names() -> None:
    """Configs from before `rope_parameters` say the same thing."""
    from phalanx.models.registry import read_spec

    old = {
        "model_type": "llama", "vocab_size": 9, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1,
        "intermediate_size": 4, "max_position_embeddings": 64, "rope_theta": 5e5, "torch_dtype": "bfloat16",
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }  # fmt: skip
    new = {k: v for k, v in old.items() if not k.startswith("rope") and k != "torch_dtype"}
    new |= {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}, "dtype": "bfloat16"}
    assert read_spec(old) == read_spec(new)
    gemma = {
        "model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 2e4, "sliding_window_pattern": 2,
        "num_hidden_layers": 4, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }  # fmt: skip
    nested = {k: v for k, v in gemma.items() if not k.startswith("rope")} | {"rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }}  # fmt: skip
    assert read_spec(gemma) == read_spec(nested)

"""A complete model of a few kilobytes (weights, tokenizer, chat template) for tests that go from text to text.

Drawn at random and wide, so that its answers wander through the whole vocabulary: bytes that are parts of characters,
words, special tokens. It means nothing by them.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.helpers.byte_tokenizer import CHAT_TEMPLATE, byte_tokenizer

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS, POSITIONS = 32, 5, 1, 8, 48, 2, 256
PADDING = 5
"""Rows of the output head beyond the tokenizer's vocabulary."""
KV_BYTES_PER_TOKEN = LAYERS * 2 * KV_HEADS * HEAD_DIM * 4


def write_tiny_model(
    folder: Path, *, generation_config: dict | None = None, layers: int = LAYERS, positions: int = POSITIONS
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    vocab = tokenizer.size + PADDING
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": tokenizer.eos_token_ids[0],
    }
    save_file(_weights(vocab, layers), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<eos>", "bos_token": "<bos>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return folder


def _weights(vocab: int, layers: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(7)

    def matrix(rows: int, columns: int, gain: float = 1.5) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) * gain / columns**0.5

    def norm() -> torch.Tensor:
        return torch.rand(HIDDEN, generator=random) + 0.5

    tensors = {
        "model.embed_tokens.weight": matrix(vocab, HIDDEN, 6.0),
        "model.norm.weight": norm(),
        "lm_head.weight": matrix(vocab, HIDDEN, 2.5),
    }
    for i in range(layers):
        layer = f"model.layers.{i}."
        tensors |= {
            layer + "self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            layer + "mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            layer + "mlp.up_proj.weight": matrix(INNER, HIDDEN),
            layer + "mlp.down_proj.weight": matrix(HIDDEN, INNER),
            layer + "input_layernorm.weight": norm(),
            layer + "post_attention_layernorm.weight": norm(),
        }
    return tensors

"""A Llama checkpoint of a few kilobytes for worker and executor tests, and the configuration that runs it.

Written without transformers, whose import alone takes seconds. The weights are drawn wide, so that contexts lead to
clearly different tokens.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from phalanx.attention.sdpa import SdpaAttention
from phalanx.checkpoint.locate import locate
from phalanx.config import EngineConfig, resolve
from phalanx.distributed.collectives import Groups
from phalanx.distributed.mesh import Mesh
from phalanx.loading.loader import load_decoder
from phalanx.models.decoder import Decoder
from phalanx.models.registry import read_spec

VOCAB = 131
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS, POSITIONS = 40, 6, 2, 12, 52, 3, 96


@dataclass(frozen=True)
class Facts:
    """What `resolve` asks of model and machine."""

    max_positions: int = POSITIONS
    checkpoint_dtype: str = "float32"
    device: str = "cpu"
    native_bfloat16: bool = False


def write_model(folder: Path) -> Path:
    """config.json and model.safetensors; 6 query heads of 12 on 2 KV heads, an odd vocabulary, untied."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    random = torch.Generator().manual_seed(20)

    def matrix(rows: int, columns: int, gain: float = 1.5) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) * gain / columns**0.5

    tensors = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN, 6.0),
        "model.norm.weight": torch.rand(HIDDEN, generator=random) + 0.5,
        "lm_head.weight": matrix(VOCAB, HIDDEN, 2.5),
    }
    for i in range(LAYERS):
        tensors |= {
            f"model.layers.{i}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"model.layers.{i}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"model.layers.{i}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"model.layers.{i}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            f"model.layers.{i}.mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            f"model.layers.{i}.mlp.up_proj.weight": matrix(INNER, HIDDEN),
            f"model.layers.{i}.mlp.down_proj.weight": matrix(HIDDEN, INNER),
            f"model.layers.{i}.input_layernorm.weight": torch.rand(HIDDEN, generator=random) + 0.5,
            f"model.layers.{i}.post_attention_layernorm.weight": torch.rand(HIDDEN, generator=random) + 0.5,
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def retrain(model: Path) -> None:
    """Other weights in a checkpoint: the same names, shapes and sizes, other numbers."""
    weights = load_file(model / "model.safetensors")
    save_file({name: tensor * 1.25 for name, tensor in weights.items()}, model / "new")
    os.replace(model / "new", model / "model.safetensors")


def engine_config(folder: Path, **options: Any) -> EngineConfig:
    """Resolved, small, float32."""
    values = {
        "model": str(folder),
        "dtype": "float32",
        "max_model_len": 80,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "kv_cache_memory_bytes": "1M",
        **options,
    }
    return resolve(EngineConfig.from_options(**values), Facts(device=values.get("device", "cpu")), Facts())


def reference_decoder(folder: Path) -> Decoder:
    """The model in float32 with the reference attention."""
    checkpoint = locate(str(folder))
    return load_decoder(
        checkpoint,
        read_spec(checkpoint.config),
        mesh=Mesh(),
        rank=0,
        groups=Groups(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        backend=SdpaAttention(),
    )

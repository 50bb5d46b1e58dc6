"""Tiny random checkpoints of every family, in awkward shapes: real folders with config, safetensors and tokenizer.

    tiny_checkpoint("llama", num_hidden_layers=3) -> Path

Deterministic: a weight depends on its name and shape alone. Made once per process and arguments, removed at exit.
"""

from __future__ import annotations

import atexit
import json
import math
import shutil
import tempfile
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCAB = 307

_COMMON = {"vocab_size": VOCAB, "num_hidden_layers": 2, "max_position_embeddings": 512, "dtype": "float32"}
_GROUPED = {
    "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 42, "head_dim": 10, "intermediate_size": 67,
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        **_COMMON, **_GROUPED, "hidden_size": 45, "num_attention_heads": 9, "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "llama-biased": {
        **_COMMON, **_GROUPED, "hidden_size": 45, "num_attention_heads": 5, "num_key_value_heads": 1,
        "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False,
    },
    "mistral": {
        **_COMMON, **_GROUPED, "num_attention_heads": 7, "num_key_value_heads": 7, "sliding_window": 9,
        "tie_word_embeddings": False,
    },
    "qwen2": {
        **_COMMON, "hidden_size": 42, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 51,
        "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {**_COMMON, **_GROUPED, "tie_word_embeddings": True},
    "qwen1": {
        "vocab_size": VOCAB, "num_hidden_layers": 2, "hidden_size": 30, "num_attention_heads": 3, "kv_channels": 10,
        "intermediate_size": 74, "max_position_embeddings": 256, "seq_length": 24, "use_dynamic_ntk": True,
        "use_logn_attn": True, "tie_word_embeddings": False,
    },
    "gpt2": {
        "vocab_size": VOCAB, "n_layer": 2, "n_embd": 35, "n_head": 5, "n_inner": 61, "n_positions": 256,
        "scale_attn_by_inverse_layer_idx": True, "dtype": "float32",
    },
    "opt": {
        **_COMMON, "hidden_size": 33, "num_attention_heads": 3, "ffn_dim": 57, "word_embed_proj_dim": 33,
    },
    "opt-post-norm": {
        **_COMMON, "hidden_size": 36, "num_attention_heads": 3, "ffn_dim": 57, "word_embed_proj_dim": 20,
        "do_layer_norm_before": False,
    },
    "phi3": {
        **_COMMON, "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 53,
        "sliding_window": 11, "partial_rotary_factor": 0.75, "tie_word_embeddings": False,
    },
    "gemma2": {
        **_COMMON, **_GROUPED, "num_hidden_layers": 3, "sliding_window": 8, "query_pre_attn_scalar": 13,
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "hidden_size": 42,
    },
    "gemma3": {
        **_COMMON, **_GROUPED, "num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 44, "sliding_window": 8,
        "query_pre_attn_scalar": 13, "sliding_window_pattern": 3,
    },
}  # fmt: skip
"""Name to config overrides. "qwen1" has no class in transformers."""

_CLASSES = {
    "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gpt2": "GPT2", "opt": "OPT",
    "phi3": "Phi3", "gemma2": "Gemma2", "gemma3": "Gemma3Text",
}  # fmt: skip

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="phalanx-tiny-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def tiny_checkpoint(family: str, **overrides: Any) -> Path:
    """The folder of a tiny checkpoint. `overrides` are config keys; nested values must be JSON."""
    return _make(family, json.dumps(overrides, sort_keys=True))


@cache
def _make(family: str, overrides_json: str) -> Path:
    config = FAMILIES[family] | json.loads(overrides_json)
    folder = _root() / f"{family}-{zlib.crc32(overrides_json.encode()):08x}"
    folder.mkdir()
    if family == "qwen1":
        _save_qwen1(folder, config)
    else:
        import transformers

        name = _CLASSES[family.partition("-")[0]]
        dtype = getattr(torch, config.get("dtype", "float32"))
        hf_config = getattr(transformers, f"{name}Config")(
            bos_token_id=256, eos_token_id=257, pad_token_id=257, **config
        )
        causal = "GPT2LMHeadModel" if name == "GPT2" else f"{name.removesuffix('Text')}ForCausalLM"
        with torch.device("meta"):
            model = getattr(transformers, causal)(hf_config)
        model = model.to_empty(device="cpu")
        model.tie_weights()
        fill(dict(model.named_parameters()))
        model.to(dtype).save_pretrained(folder)
    write_tokenizer(folder, config["vocab_size"])
    return folder


def fill(weights: dict[str, torch.Tensor]) -> None:
    """Random numbers such that activations stay near one and no two logits tie: by name, norms near one."""
    with torch.no_grad():
        for name, weight in weights.items():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name}{tuple(weight.shape)}".encode()))
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 2:
                weight.copy_(noise * (0.5 if "emb" in name or "wte" in name else 1 / math.sqrt(min(weight.shape))))
            elif "norm" in name or "ln_" in name:
                weight.copy_(noise * 0.2 + (1.0 if name.endswith("weight") else 0.0))
            else:
                weight.copy_(noise * 0.2)


def _save_qwen1(folder: Path, config: dict[str, Any]) -> None:
    config = {
        "architectures": ["QWenLMHeadModel"], "model_type": "qwen", "layer_norm_epsilon": 1e-6, "no_bias": True,
        "rotary_emb_base": 10000, "rotary_pct": 1.0, "scale_attn_weights": True, "fp32": True, **config,
    }  # fmt: skip
    hidden, projection = config["hidden_size"], config["num_attention_heads"] * config["kv_channels"]
    inner, vocab = config["intermediate_size"] // 2, config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (vocab, hidden),
        "transformer.ln_f.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        at = f"transformer.h.{i}."
        shapes |= {
            at + "ln_1.weight": (hidden,), at + "ln_2.weight": (hidden,),
            at + "attn.c_attn.weight": (3 * projection, hidden), at + "attn.c_attn.bias": (3 * projection,),
            at + "attn.c_proj.weight": (hidden, projection), at + "mlp.w1.weight": (inner, hidden),
            at + "mlp.w2.weight": (inner, hidden), at + "mlp.c_proj.weight": (hidden, inner),
        }  # fmt: skip
    weights = {name: torch.empty(shape) for name, shape in shapes.items()}
    fill(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level tokenizer of exactly `vocab_size` tokens: 256 bytes, five special ones, and merges of two bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    vocab |= {name: 256 + i for i, name in enumerate(special)}
    letters = [c for c in "etaoinshrdlu" if c in vocab]
    merges = [(a, b) for a in letters for b in letters][: vocab_size - len(vocab)]
    vocab |= {a + b: len(vocab) + i for i, (a, b) in enumerate(merges)}
    if len(vocab) != vocab_size:
        raise ValueError(f"no tiny tokenizer of {vocab_size} tokens; choose 261 to {261 + len(letters) ** 2}")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": special[0], "eos_token": special[1],
        "pad_token": special[4], "chat_template": CHAT_TEMPLATE, "model_max_length": 512,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))

"""Writes a tiny checkpoint as a GGUF file with the `gguf` library, as llama.cpp's converter would.

Names come from the library's own tables; what is done to the values (rotary pairs of Llama, GPT-2's transposed
matrices, Gemma's norms plus one) is written here by hand, from the converter's rules and not from ours.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file, save_file

KINDS = {kind: gguf.GGMLQuantizationType[kind] for kind in ("F32", "F16", "Q8_0")}
ARCHS = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen": "qwen", "gpt2": "gpt2",
         "phi3": "phi3", "gemma2": "gemma2", "gemma3_text": "gemma3"}  # fmt: skip


def to_gguf(folder: Path, kind: str, out: Path, kinds: Callable[[str], str] | None = None) -> tuple[Path, Path]:
    """(GGUF file with its matrices in `kind`, safetensors folder with exactly the values that file stands for).

    `kinds` may give each matrix a type of its own, by its name in the file; the folder is then only roughly the same,
    and not at all where the library cannot quantise to that type: such matrices are random.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHS[config["model_type"]]
    out.mkdir(parents=True, exist_ok=True)
    stored = {
        name: rounded(array.T, kind).T.copy() if turned(arch, name) else rounded(array, kind)
        for name, array in load_file(folder / "model.safetensors").items()
    }
    twin = out / ("qwen1-twin" if arch == "qwen" else "twin")
    twin.mkdir()
    save_file(stored, twin / "model.safetensors", metadata={"format": "pt"})
    (twin / "config.json").write_text(json.dumps(config))
    path = out / f"model-{kind}.gguf"
    writer = gguf.GGUFWriter(path, arch)
    write_metadata(writer, arch, config)
    layers = config.get("num_hidden_layers") or config["n_layer"]
    names = gguf.get_tensor_name_map(next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch), layers)
    for name, array in stored.items():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise ValueError(f"the gguf library does not know {name}")
        values = converted(arch, config, name, array)
        if values.ndim == 2 and (kind != "F32" or kinds is not None):
            own = gguf.GGMLQuantizationType[kind if kinds is None else kinds(target)]
            writer.add_tensor(target, quantized(values, own), raw_dtype=own)
        else:
            writer.add_tensor(target, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, twin


def in_blocks(model: Path, out: Path) -> Path:
    """A GGUF file of the tiny model in blocks of 4 and 8 bits; the matrices whose rows are not whole blocks stay."""
    kinds = {"attn_output": "F32", "ffn_down": "F32", "token_embd": "Q8_0"}
    return to_gguf(model, "F32", out, lambda name: kinds.get(name.split(".")[-2], "Q4_0"))[0]


def quantized(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        return random_blocks(kind.name, *values.shape, size=float(values.std()))


def random_blocks(kind: str, rows: int, columns: int, size: float) -> np.ndarray:
    """uint8 [rows, bytes]: random K-quants, whose values are about `size`."""
    rng = np.random.default_rng(rows * columns)
    elements, nbytes = gguf.constants.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = rng.integers(0, 256, (rows * columns // elements, nbytes), dtype=np.uint8)
    largest = {"Q4_K": 63 * 15, "Q5_K": 63 * 31, "Q6_K": 128 * 32}[kind]
    scale = np.full((len(raw), 1), 3 * size / largest, np.float16)
    if kind == "Q6_K":
        raw[:, 208:210] = scale.view(np.uint8)
    else:
        raw[:, 0:2] = scale.view(np.uint8)
        raw[:, 2:4] = (scale * (7.5 if kind == "Q4_K" else 15.5)).astype(np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


def rounded(array: np.ndarray, kind: str) -> np.ndarray:
    """Matrices as they come back from `kind`."""
    if array.ndim != 2 or kind == "F32":
        return array
    return gguf.quants.dequantize(gguf.quants.quantize(array, KINDS[kind]), KINDS[kind])


def turned(arch: str, name: str) -> bool:
    return arch == "gpt2" and any(part in name for part in ("c_attn.weight", "c_proj.weight", "c_fc.weight"))


def converted(arch: str, config: dict[str, Any], name: str, array: np.ndarray) -> np.ndarray:
    if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
        heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
    if turned(arch, name):
        return np.ascontiguousarray(array.T)
    if arch.startswith("gemma") and "norm" in name:
        return array + 1
    return array


def write_metadata(writer: gguf.GGUFWriter, arch: str, config: dict[str, Any]) -> None:
    heads = config.get("num_attention_heads") or config["n_head"]
    hidden = config.get("hidden_size") or config["n_embd"]
    writer.add_block_count(config.get("num_hidden_layers") or config["n_layer"])
    writer.add_context_length(config.get("max_position_embeddings") or config["n_positions"])
    writer.add_embedding_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    head_dim = config.get("head_dim") or config.get("kv_channels") or hidden // heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_feed_forward_length(config.get("intermediate_size") or config["n_inner"])
    if arch == "gpt2":
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config["layer_norm_epsilon"])
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta") or config.get("rotary_emb_base")}
    if arch == "gemma3":
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if arch == "gemma3":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if rope.get("rope_type") == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        for which in ("long", "short"):
            name = gguf.TENSOR_NAMES[gguf.MODEL_TENSOR[f"ROPE_FACTORS_{which.upper()}"]] + ".weight"
            writer.add_tensor(name, np.array(rope[f"{which}_factor"], dtype=np.float32))
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, head_dim))


def llama3_divisors(rope: dict[str, Any], dim: int) -> np.ndarray:
    """One divisor per frequency, as the converter writes Llama 3's scaling."""
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    context, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = (context / waves - low) / (high - low)
    divisors = 1 / ((1 - smooth) / rope["factor"] + smooth)
    divisors = np.where(waves < context / high, 1.0, np.where(waves > context / low, rope["factor"], divisors))
    return divisors.astype(np.float32)

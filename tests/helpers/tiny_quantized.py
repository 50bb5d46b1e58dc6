"""Writes a tiny checkpoint as quantising tools do: GPTQ, AWQ and compressed-tensors, in the layouts that they publish.

Every word is put together here by hand, from what AutoGPTQ, GPTQModel, AutoAWQ and compressed-tensors write, and not
from our reader; beside it stands the same model as plain float32 numbers, scale · (integer - zero).
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""The output of eight that each nibble of a word belongs to."""


@dataclass(frozen=True)
class Quantised:
    """What a checkpoint is to be."""

    method: str
    """gptq, gptq_v2, awq, w4a16 or w8a8."""
    group: int = 128
    symmetric: bool = True
    ordered: bool = False

    @property
    def name(self) -> str:
        return "compressed-tensors" if self.method[0] == "w" else self.method.removesuffix("_v2")


def quantised(
    folder: Path, out: Path, how: Quantised, plain: Callable[[str], bool] = lambda name: False,
) -> tuple[Path, Path]:  # fmt: skip
    """(The checkpoint of `folder` quantised, the same in plain numbers.) Layers' matrices are quantised unless `plain`
    says otherwise of their names."""
    config = json.loads((folder / "config.json").read_text())
    stored: dict[str, np.ndarray] = {}
    twin: dict[str, np.ndarray] = {}
    for name, array in load_file(folder / "model.safetensors").items():
        base, _, last = name.rpartition(".")
        inner = ".layers." in name or ".h." in name
        if array.ndim != 2 or not inner or last != "weight" or plain(base):
            stored[name] = array.astype(np.float16)
            twin[name] = stored[name].astype(np.float32)
            continue
        turned = config["model_type"] == "gpt2"  # whose layers are stored [inputs, outputs]
        tensors, numbers = quantise(array.T if turned else array, how, base)
        stored |= {f"{base}.{part}": tensor for part, tensor in tensors.items()}
        twin[name] = np.ascontiguousarray(numbers.T if turned else numbers)
    for path, tensors, changes in (
        (out / "quantised", stored, {"dtype": "float16", "quantization_config": section(how)}),
        (out / "plain", twin, {}),
    ):
        path.mkdir(parents=True)
        save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(config | changes))
        for file in folder.glob("tokenizer*"):
            shutil.copy(file, path)
    return out / "quantised", out / "plain"


def section(how: Quantised) -> dict[str, Any]:
    """`quantization_config` as the tools write it."""
    match how.method:
        case "gptq" | "gptq_v2":
            return {
                "bits": 4, "group_size": how.group, "desc_act": how.ordered, "sym": how.symmetric, "lm_head": False,
                "quant_method": "gptq", "checkpoint_format": how.method, "pack_dtype": "int32",
                "meta": {"quantizer": ["gptqmodel:2.0.0"]},
            }  # fmt: skip
        case "awq":
            return {
                "bits": 4, "group_size": how.group, "modules_to_not_convert": None, "quant_method": "awq",
                "version": "gemm", "zero_point": True,
            }  # fmt: skip
    four = how.method == "w4a16"
    weights: dict[str, Any] = {
        "num_bits": 4 if four else 8, "type": "int", "symmetric": how.symmetric, "dynamic": False,
        "strategy": "group" if four and how.group > 0 else "channel", "group_size": how.group if four else None,
        "actorder": "group" if how.ordered else None, "block_structure": None, "observer": "minmax",
    }  # fmt: skip
    if how.group < 0:
        weights["group_size"] = None
    dynamic = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None if four else dynamic,
                        "output_activations": None},
        },
        "format": "pack-quantized" if four else "int-quantized", "ignore": ["lm_head"], "kv_cache_scheme": None,
        "quant_method": "compressed-tensors", "quantization_status": "compressed",
    }  # fmt: skip


def quantise(weight: np.ndarray, how: Quantised, name: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The tensors for a matrix [outputs, inputs], and the float32 numbers that they stand for."""
    if how.method == "w8a8":
        scales = (np.abs(weight).max(1, keepdims=True) / 127).astype(np.float16)
        whole = np.clip(np.rint(weight / scales.astype(np.float32)), -128, 127).astype(np.int8)
        return {"weight": whole, "weight_scale": scales}, whole * scales.astype(np.float32)
    outputs, inputs = weight.shape
    group = how.group if how.group > 0 else inputs
    g_idx = np.arange(inputs) // group
    if how.ordered:  # query, key and value mostly see the same order, and here the value another
        seed = f"{inputs}" if "v_proj" not in name else name
        g_idx = np.random.default_rng(zlib.crc32(seed.encode())).permutation(g_idx)
    groups = int(g_idx.max()) + 1
    scales, zeros = np.zeros((outputs, groups), np.float16), np.zeros((outputs, groups), np.int64)
    for g in range(groups):
        part = weight[:, g_idx == g]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if how.symmetric:
            scales[:, g], zeros[:, g] = np.abs(part).max(1) / 7.5, 8
        else:
            scales[:, g] = (high - low) / 15
            zeros[:, g] = np.clip(np.rint(-low / scales[:, g].astype(np.float32)), 0, 15)
            zeros[:2, g] = 0, 15  # both ends, which GPTQ's subtracted one carries over
    wide = scales.astype(np.float32)
    integers = np.clip(np.rint(weight / wide[:, g_idx]) + zeros[:, g_idx], 0, 15).astype(np.int64)
    numbers = wide[:, g_idx] * (integers - zeros[:, g_idx]).astype(np.float32)
    return _pack(how, integers, scales, zeros, g_idx.astype(np.int32)), numbers


def _pack(
    how: Quantised, integers: np.ndarray, scales: np.ndarray, zeros: np.ndarray, g_idx: np.ndarray
) -> dict[str, np.ndarray]:
    match how.method:
        case "gptq" | "gptq_v2":
            words = _words(zeros.T)
            if how.method == "gptq":
                words = ((words.astype(np.int64) - 0x11111111) & 0xFFFFFFFF).astype(np.uint32).view(np.int32)
            return {"qweight": _words(integers).T, "qzeros": words, "scales": scales.T, "g_idx": g_idx}
        case "awq":
            return {
                "qweight": _words(integers.T, AWQ_ORDER), "qzeros": _words(zeros.T, AWQ_ORDER), "scales": scales.T
            }  # fmt: skip
    tensors = {
        "weight_packed": _words(integers), "weight_scale": scales, "weight_shape": np.array(integers.shape, np.int64)
    }  # fmt: skip
    if not how.symmetric:
        tensors["weight_zero_point"] = _words(zeros.T).T
    if how.ordered:
        tensors["weight_g_idx"] = g_idx
    return tensors


def _words(numbers: np.ndarray, order: list[int] | None = None) -> np.ndarray:
    """Eight neighbours of a row in each int32: nibble i is number order[i] of the eight."""
    rows, columns = numbers.shape
    padded = np.zeros((rows, -(-columns // 8) * 8), np.int64)
    padded[:, :columns] = numbers
    words = np.zeros((rows, padded.shape[1] // 8), np.int64)
    for i, place in enumerate(order or range(8)):
        words |= padded[:, place::8] << (4 * i)
    return words.astype(np.uint32).view(np.int32)

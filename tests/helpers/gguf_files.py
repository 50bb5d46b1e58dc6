"""Writes tiny GGUF files: valid ones, and, where a test says so, ones that lie.

Written from the format's description, independently of `phalanx.checkpoint.gguf_header`; test_gguf_header.py checks
what is written here with the `gguf` library.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMATS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}


@dataclass(frozen=True)
class Typed:
    """A metadata value whose type is not the one that `kind_of` would choose; for an array, its elements' type."""

    kind: int
    value: Any


@dataclass(frozen=True)
class Raw:
    """A tensor as bytes of a ggml type. `shape` is in torch order."""

    kind: str
    shape: tuple[int, ...]
    data: bytes


def kind_of(value: Any) -> int:
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int):
        return U32 if 0 <= value < 2**32 else I64
    if isinstance(value, float):
        return F32
    if isinstance(value, str | bytes):
        return STRING
    return ARRAY


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind: int, value: Any) -> bytes:
    return string(value) if kind == STRING else struct.pack("<" + _FORMATS[kind], value)


def value(item: Any) -> bytes:
    """Type and value, as they follow a key."""
    if isinstance(item, Typed) and not isinstance(item.value, list):
        return struct.pack("<I", item.kind) + scalar(item.kind, item.value)
    if isinstance(item, Typed):
        return struct.pack("<I", ARRAY) + _array(item.value, item.kind)
    kind = kind_of(item)
    return struct.pack("<I", kind) + (_array(item) if kind == ARRAY else scalar(kind, item))


def _array(items: list[Any], kind: int | None = None) -> bytes:
    kind = kind if kind is not None else (kind_of(items[0]) if items else U32)
    body = b"".join(_array(item) if kind == ARRAY else scalar(kind, item) for item in items)
    return struct.pack("<IQ", kind, len(items)) + body


def pair(key: str | bytes, item: Any) -> bytes:
    return string(key) + value(item)


def tensor_record(name: str | bytes, kind: int, extents: tuple[int, ...], offset: int) -> bytes:
    """`extents` in the file's order: the length of a row first."""
    return string(name) + struct.pack(f"<I{len(extents)}QIQ", len(extents), *extents, kind, offset)


def start(tensors: int, pairs: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)


def padded(data: bytes, alignment: int = 32) -> bytes:
    return data + bytes(-len(data) % alignment)


def raw_tensor(array: np.ndarray, kind: str = "F32") -> Raw:
    """`array`, quantised by the `gguf` library."""
    data = quants.quantize(np.ascontiguousarray(array, dtype=np.float32), GGMLQuantizationType[kind])
    return Raw(kind, tuple(array.shape), data.tobytes())


def random_blocks(kind: str, shape: tuple[int, ...], seed: int = 0) -> Raw:
    """Random bytes of the right number: any bytes are valid blocks."""
    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    count = int(np.prod(shape)) // elements * size
    return Raw(kind, shape, np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8).tobytes())


def gguf_bytes(
    metadata: dict[str, Any], tensors: dict[str, np.ndarray | Raw], *, version: int = 3, alignment: int | None = None
) -> bytes:
    """A whole valid file. Arrays are written as float32."""
    if alignment is not None:
        metadata = {**metadata, "general.alignment": alignment}
    step = alignment or 32
    head = start(len(tensors), len(metadata), version) + b"".join(pair(key, item) for key, item in metadata.items())
    data = b""
    for name, tensor in tensors.items():
        raw = tensor if isinstance(tensor, Raw) else raw_tensor(tensor)
        head += tensor_record(name, GGMLQuantizationType[raw.kind].value, raw.shape[::-1], len(data))
        data = padded(data + raw.data, step)
    return padded(head, step) + data


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, np.ndarray | Raw], **options: Any) -> Path:
    path.write_bytes(gguf_bytes(metadata, tensors, **options))
    return path


def decoder_metadata(arch: str, **changes: Any) -> dict[str, Any]:
    """Metadata of a tiny decoder (2 layers, width 64, 4 heads, 2 KV heads, 8 tokens); None leaves a key out."""
    keys = {
        "block_count": 2,
        "context_length": 128,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    } | changes
    return {
        "general.architecture": arch,
        **{f"{arch}.{key}": item for key, item in keys.items() if item is not None},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(8)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def decoder_tensors(seed: int = 0, **extra: np.ndarray | Raw) -> dict[str, np.ndarray | Raw]:
    """Tensors that fit `decoder_metadata`, in several types; `extra` names have `__` for `.`."""
    random = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray | Raw] = {
        "token_embd.weight": raw_tensor(random.normal(size=(8, 64)), "Q8_0"),
        "output_norm.weight": np.ones(64, np.float32),
    }
    for layer in range(2):
        tensors |= {
            f"blk.{layer}.attn_norm.weight": np.ones(64, np.float32),
            f"blk.{layer}.attn_q.weight": raw_tensor(random.normal(size=(64, 64)), "Q4_1"),
            f"blk.{layer}.ffn_gate.weight": raw_tensor(random.normal(size=(96, 64)), "F16"),
        }
    return tensors | {name.replace("__", "."): tensor for name, tensor in extra.items()}

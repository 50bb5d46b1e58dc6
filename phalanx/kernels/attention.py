"""Attention over a paged cache: norm and rotation of query and key, the write of the cache and the reading of it.

The twin in plain PyTorch is `attention.sdpa`. The cache's order, and the order of computation that makes a token's
result independent of batch, chunk and threads, are described in native/attention.hpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from phalanx.kernels.library import native

_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_CACHE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
SCALE_BYTES = 4
"""Beside each token's head in an int8 cache."""


class HeadNorm(Protocol):
    """An RMS norm over the numbers of a head."""

    weight: torch.Tensor | None
    eps: float


class Rotation(Protocol):
    """cos and signed sin [T, 1, dim] of a step's tokens."""

    cos: torch.Tensor
    signed_sin: torch.Tensor


class PagedLayer:
    """One layer's cache and what its attention computes. `key` and `value` are of `cache_shape`, zero at first."""

    def __init__(
        self, key: torch.Tensor, value: torch.Tensor, *, kv_head_of: Sequence[int], num_kv_heads: int, head_dim: int,
        scale: float, window: int | None, soft_cap: float | None, blocks: int, block_size: int,
    ):  # fmt: skip
        """Raises ValueError for tensors of another shape or type, and for a query head without its KV head."""
        library = native()
        if library is None:
            raise ValueError("there is no native library")
        for tensor in (key, value):
            expected = cache_shape(tensor.dtype, blocks, block_size, num_kv_heads, head_dim)
            if tuple(tensor.shape) != expected or not tensor.is_contiguous() or tensor.device.type != "cpu":
                raise ValueError(f"a cache has to be contiguous, on the CPU and of shape {expected}")
        if key.dtype != value.dtype or not all(0 <= kv < num_kv_heads for kv in kv_head_of):
            raise ValueError("keys and values have to have one type, and query heads their KV head")
        if window is not None and window < 1:
            raise ValueError("a window has to be 1 or more")
        self.heads, self.kv_heads, self.dim = len(kv_head_of), num_kv_heads, head_dim
        self.width = (self.heads + 2 * num_kv_heads) * head_dim
        self.library = library
        self.tensors = (key, value)
        self.layer = library.AttentionLayer(
            list(kv_head_of), num_kv_heads, head_dim, scale, window or 0, soft_cap or 0.0, _CACHE_TYPES[key.dtype],
            _tiled(block_size, head_dim), block_size, blocks, key.data_ptr(), value.data_ptr(),
        )  # fmt: skip


class PagedStep:
    """A step's rows, for all layers. Arguments as in `attention.base.StepLayout`; raises ValueError where they do not
    fit together."""

    def __init__(
        self, query_start: list[int], context_lens: list[int], block_tables: torch.Tensor, slot_mapping: torch.Tensor,
        block_size: int,
    ):  # fmt: skip
        library = native()
        if library is None:
            raise ValueError("there is no native library")
        tables, slots = block_tables.contiguous(), slot_mapping.contiguous()
        if tables.dtype != torch.int32 or slots.dtype != torch.int64 or tables.device.type != "cpu":
            raise ValueError("block tables have to be int32, and slots int64, on the CPU")
        if tables.dim() != 2 or tables.shape[0] != len(context_lens) or slots.shape != (query_start[-1],):
            raise ValueError("a table is needed for each row, and a slot for each token")
        self.tokens = query_start[-1]
        self.tensors = (tables, slots)
        self._rotations: dict[Rotation, tuple[int, int, int, int]] = {}
        self._results: dict[tuple[int, torch.dtype], tuple[torch.Tensor, int]] = {}
        self.plan = library.AttentionPlan(
            query_start, context_lens, tables.data_ptr(), tables.shape[1], slots.data_ptr(), block_size
        )

    def rotation(self, rotation: Rotation, head_dim: int) -> tuple[int, int, int, int]:
        """Addresses of its tables, their type, and how many numbers of a head they rotate."""
        found = self._rotations.get(rotation)
        if found is None:
            cos, sin = rotation.cos, rotation.signed_sin
            if (
                cos.shape[0] != self.tokens or cos.shape != sin.shape or cos.dtype != sin.dtype
                or cos.dtype not in _TYPES or not (cos.is_contiguous() and sin.is_contiguous())
            ):  # fmt: skip
                raise ValueError("the tables of a rotation have to be contiguous, a row for each token")
            found = (cos.data_ptr(), sin.data_ptr(), _TYPES[cos.dtype], cos.shape[-1])
            self._rotations[rotation] = found
        if found[3] > head_dim:
            raise ValueError("the tables of a rotation are wider than a head")
        return found

    def result(self, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        """[T, width], which all layers of the step write to, and its address: a tensor takes longer to make than a
        layer's call."""
        found = self._results.get((width, dtype))
        if found is None:
            made = torch.empty((self.tokens, width), dtype=dtype)
            found = self._results[width, dtype] = made, made.data_ptr()
        return found


def _tiled(block_size: int, head_dim: int) -> bool:
    return block_size % 16 == 0 and head_dim % 16 == 0


def cache_shape(dtype: torch.dtype, blocks: int, block_size: int, kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """Of the keys, and of the values. Raises ValueError for a type that no kernel serves."""
    if dtype not in _CACHE_TYPES:
        raise ValueError(f"a cache of {dtype} is not served; it can be {', '.join(map(str, _CACHE_TYPES))}")
    numbers = head_dim + (SCALE_BYTES if dtype == torch.int8 else 0)
    if _tiled(block_size, head_dim):
        return (blocks, kv_heads, block_size * numbers)
    return (blocks, block_size, kv_heads, numbers)


def attend_merged(
    qkv: torch.Tensor, layer: PagedLayer, step: PagedStep, query_norm: HeadNorm | None, key_norm: HeadNorm | None,
    rotation: Rotation | None, query_factor: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """[T, (heads + 2 · kv heads) · head_dim] -> [T, heads · head_dim]; keys and values are in the cache then. The next
    layer of the step overwrites the result.

    `qkv` is float32 or bfloat16, as is the result; inside, all is float32, rounded to bfloat16 where the products take
    it. Both norms or none. `query_factor` [T, 1, 1] has the type of `qkv`. A token's result depends on its own request
    only, and on no batch, chunk or number of threads.
    """
    dtype = qkv.dtype
    if qkv.shape != (step.tokens, layer.width) or not qkv.is_contiguous() or dtype not in _TYPES:
        raise ValueError(f"qkv has to be contiguous, [{step.tokens}, {layer.width}], float32 or bfloat16")
    out, address = step.result(layer.heads * layer.dim, dtype)
    norms = head_norms(query_norm, key_norm, layer.dim)
    rotated = _NO_ROTATION if rotation is None else step.rotation(rotation, layer.dim)
    factor = 0
    if query_factor is not None:
        if query_factor.numel() != step.tokens or query_factor.dtype != dtype or not query_factor.is_contiguous():
            raise ValueError("a factor is needed for each token, of the queries' type")
        factor = query_factor.data_ptr()
    layer.library.attend_merged(
        layer.layer, step.plan, qkv.data_ptr(), _TYPES[dtype], *norms, *rotated, factor, address
    )  # fmt: skip
    return out


_NO_NORMS = (0, 0, -1, 0.0)
_NO_ROTATION = (0, 0, -1, 0)


def head_norms(query: HeadNorm | None, key: HeadNorm | None, dim: int) -> tuple[int, int, int, float]:
    """Addresses of their weights, the weights' type (-1: no norms), epsilon. Raises ValueError where they misfit."""
    if query is None or key is None:
        return _NO_NORMS
    if query.weight is None or key.weight is None:
        return 0, 0, 0, query.eps
    if query.weight.shape != (dim,) or key.weight.shape != (dim,) or query.weight.dtype != key.weight.dtype:
        raise ValueError(f"the norms' weights have to have {dim} numbers of one type")
    return query.weight.data_ptr(), key.weight.data_ptr(), _TYPES[query.weight.dtype], query.eps


def attend_cached(query: torch.Tensor, layer: PagedLayer, step: PagedStep) -> tuple[torch.Tensor, torch.Tensor]:
    """query [T, heads, head_dim], ready -> the same shape, and log-sum-exp float32 [T, heads]. The step's keys and
    values are in the cache already."""
    if query.shape != (step.tokens, layer.heads, layer.dim) or query.dtype not in _TYPES:
        raise ValueError(f"query has to be [{step.tokens}, {layer.heads}, {layer.dim}], float32 or bfloat16")
    query = query.contiguous()
    out, lse = torch.empty_like(query), torch.empty(query.shape[:2], dtype=torch.float32)
    layer.library.attend_cached(
        layer.layer, step.plan, query.data_ptr(), _TYPES[query.dtype], out.data_ptr(), lse.data_ptr()
    )
    return out, lse


def write_cache(key: torch.Tensor, value: torch.Tensor, layer: PagedLayer, slot_mapping: torch.Tensor) -> None:
    """Store [T, kv heads, head_dim] at `slot_mapping` int64 [T]."""
    expected = (len(slot_mapping), layer.kv_heads, layer.dim)
    if key.shape != expected or value.shape != expected or key.dtype != value.dtype or key.dtype not in _TYPES:
        raise ValueError(f"key and value have to be {list(expected)}, float32 or bfloat16")
    key, value, slots = key.contiguous(), value.contiguous(), slot_mapping.contiguous()
    layer.library.write_cache(
        layer.layer, slots.data_ptr(), len(slots), key.data_ptr(), value.data_ptr(), layer.kv_heads * layer.dim,
        _TYPES[key.dtype],
    )  # fmt: skip

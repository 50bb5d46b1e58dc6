"""The seam between the decoder and the code that reads and writes the KV cache.

A backend is chosen once per worker (`attention.registry`). Once per step `plan` turns the step's shape into whatever
the backend wants to precompute; then every layer calls `attend_merged` with it, which does all that stands between the
product of query, key and value and the product behind attention. `write` and `attend` are its parts. `attend` returns
the log-sum-exp of the scores beside the output, so that partial results over parts of a context can be merged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class AttentionShape:
    """What one layer's attention computes, on this rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_head_of: tuple[int, ...]
    """For each local query head, the local KV head it reads. Groups may have unequal sizes."""
    scale: float
    window: int | None = None
    """Sliding window in tokens: position p sees p - window + 1 … p. None sees everything before."""
    soft_cap: float | None = None
    """Scores become soft_cap * tanh(scores / soft_cap) before the mask."""


@dataclass(frozen=True)
class StepLayout:
    """The rows of one step, packed along one axis of T tokens; row i owns query_start[i] to query_start[i + 1]."""

    query_start: list[int]
    """rows + 1 entries."""
    context_lens: list[int]
    """Per row, tokens in the cache once this step's are written (so its last query has position context_len - 1)."""
    block_tables: torch.Tensor
    """int32 [rows, max blocks of any row], padded with 0."""
    slot_mapping: torch.Tensor
    """int64 [T]: block * block_size + offset, where each token's key and value go."""
    block_size: int
    prompt_lens: list[int] | None = None
    """Per row, tokens of the request's prompt: it decides the rotary frequencies of models that stretch long prompts
    (`DecoderSpec.prompt_classes`), so that chunking and preemption change nothing. None: all prompts are short."""


@dataclass(frozen=True)
class LayerCache:
    """One layer's KV cache: two tensors [blocks, block_size, kv heads, head_dim], or in the backend's own order."""

    key: torch.Tensor
    value: torch.Tensor


class HeadNorm(Protocol):
    """A norm over the numbers of each head."""

    layer: bool
    """A layer norm, not an RMS norm."""
    weight: torch.Tensor | None
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, heads, head_dim] -> the same."""
        ...


class Rotation(Protocol):
    """The rotary positions of a step's tokens."""

    cos: torch.Tensor
    """[T, 1, dim]: the first `dim` numbers of each head are rotated."""
    signed_sin: torch.Tensor
    """[T, 1, dim], its first half negated."""

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """[T, heads, head_dim] -> the same."""
        ...


class AttentionBackend(Protocol):
    name: str
    plays: bool
    """Its caches have a `layer`, and its plans are steps, that a tape (`phalanx.kernels.tape`) is played with."""

    def allocate(
        self, shape: AttentionShape, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> LayerCache: ...

    def plan(self, layout: StepLayout) -> Any:
        """Work that all layers of a step share. The result is passed to `attend` unchanged."""
        ...

    def write(self, cache: LayerCache, key: torch.Tensor, value: torch.Tensor, layout: StepLayout) -> None:
        """Store key and value, [T, kv heads, head_dim]."""
        ...

    def attend(
        self, query: torch.Tensor, cache: LayerCache, layout: StepLayout, plan: Any, shape: AttentionShape
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """query [T, heads, head_dim] -> output of the same shape and log-sum-exp [T, heads] in float32."""
        ...

    def attend_merged(
        self, qkv: torch.Tensor, cache: LayerCache, layout: StepLayout, plan: Any, shape: AttentionShape,
        q_norm: HeadNorm | None, k_norm: HeadNorm | None, turn: Rotation | None, query_factor: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """qkv [T, (heads + 2 · kv heads) · head_dim], as the product wrote it -> [T, heads · head_dim], which is valid
        until the next call with this plan.

        Query and key heads are normed (both or none), then rotated; queries are multiplied by `query_factor` [T, 1, 1];
        keys and values are stored, and attended to.
        """
        ...

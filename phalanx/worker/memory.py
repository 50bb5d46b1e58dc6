"""From bytes to KV-cache blocks: how much one rank needs, what it may use, and what to say when that is too little.

Pure: measured figures come in as arguments (`phalanx.worker.limits`, or the device), so the planner can use the same
formula for machines it only knows by description. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.config import CacheConfig
from phalanx.errors import NotEnoughMemory
from phalanx.models.spec import BYTES_PER_ELEMENT, DecoderSpec, GatedMlp
from phalanx.worker.limits import Memory

GPU_SHARE = 0.9
"""Default of `--gpu-memory-utilization` on a GPU."""

CPU_SHARE = 0.25
"""Share of the free memory that the KV cache takes on a CPU unless told otherwise: other programs live there too."""


@dataclass(frozen=True)
class Needs:
    """What one rank needs, in bytes, and the sizes that decide it."""

    weights: int
    activations: int
    kv_bytes_per_token: int
    block_size: int
    max_model_len: int
    max_num_seqs: int

    @property
    def bytes_per_block(self) -> int:
        return self.kv_bytes_per_token * self.block_size

    @property
    def blocks_per_request(self) -> int:
        """Of a request of `max_model_len` tokens."""
        return -(-self.max_model_len // self.block_size)


def activation_bytes(spec: DecoderSpec, dtype: str, *, tokens: int, rows: int) -> int:
    """An estimate, from above, of what a step of `tokens` tokens allocates besides weights and cache when `rows` of
    them are sampled: the widest layer's intermediate tensors, and logits with the sampler's copies."""
    widest = 0
    for layer in spec.layers:
        attention = layer.attention
        heads = (2 * attention.num_heads + 4 * attention.num_kv_heads) * attention.head_dim
        matrices = 3 if isinstance(layer.mlp, GatedMlp) else 2
        widest = max(widest, heads, matrices * layer.mlp.intermediate_size)
    per_token = 4 * spec.hidden_size + widest
    return tokens * per_token * BYTES_PER_ELEMENT[dtype] + min(rows, tokens) * spec.vocab_size * 4 * 3


def cache_budget(memory: Memory, activations: int, config: CacheConfig, *, device: str) -> tuple[int, str]:
    """Bytes that the KV cache may take, and what decided them. `memory` is what is left beside the weights; below zero,
    or explicit bytes above what is there, nothing fits.

    Explicit bytes win; else a GPU's share of the device less what is used; else a quarter of a host's free memory.
    """
    room = memory.available - activations
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes, "--kv-cache-memory-bytes"
    if device != "cpu" or config.gpu_memory_utilization is not None:
        share = GPU_SHARE if config.gpu_memory_utilization is None else config.gpu_memory_utilization
        used = memory.total - memory.available
        return min(int(share * memory.total) - used - activations, room), f"{share:g} of the {device} memory"
    return min(int(memory.available * CPU_SHARE), room), "a quarter of the free memory"


def cache_size(needs: Needs, memory: Memory, config: CacheConfig, *, device: str) -> int:
    """How many blocks the KV cache gets once the weights are loaded. `memory` is what is left then.

    Never more than all requests at full length can use. Raises NotEnoughMemory when no request of `max_model_len`
    tokens fits, with the largest that would.
    """
    room = memory.available - needs.activations
    budget, reason = cache_budget(memory, needs.activations, config, device=device)
    if config.kv_cache_memory_bytes is not None and budget > room:
        raise NotEnoughMemory(
            f"--kv-cache-memory-bytes asks for {readable(budget)}, but beside the weights "
            f"({readable(needs.weights)}) and activations ({readable(needs.activations)}) only "
            f"{readable(max(room, 0))} of the {device} memory are free.",
            fix="Ask for less, or free some memory.",
        )
    enough = needs.max_num_seqs * needs.blocks_per_request
    blocks = max(budget, 0) // needs.bytes_per_block
    if blocks < needs.blocks_per_request:
        raise _too_small(needs, memory, blocks, max(budget, 0), reason, device)
    return min(blocks, enough)


def check_before_loading(needs: Needs, memory: Memory, config: CacheConfig, *, device: str, dtype: str) -> None:
    """Refuse a model that cannot fit before its weights are read. `memory` is what is free now.

    Raises NotEnoughMemory.
    """
    if needs.weights + needs.activations + needs.bytes_per_block > memory.available:
        one = needs.blocks_per_request * needs.bytes_per_block
        raise NotEnoughMemory(
            f"The model needs {readable(needs.weights)} for its weights in {dtype}, {readable(needs.activations)} "
            f"for activations and {readable(one)} for the KV cache of one request of {needs.max_model_len} tokens, "
            f"but only {readable(memory.available)} of the {readable(memory.total)} of {device} memory are free; "
            "no --max-model-len fits.",
            fix="Free some memory, use a smaller model, or a narrower --dtype.",
        )
    cache_size(needs, replace(memory, available=memory.available - needs.weights), config, device=device)


def _too_small(needs: Needs, memory: Memory, blocks: int, budget: int, reason: str, device: str) -> NotEnoughMemory:
    fits = blocks * needs.block_size
    one = needs.blocks_per_request * needs.bytes_per_block
    smaller = f"Use --max-model-len {fits} or less, or give" if fits else "No --max-model-len fits; give"
    return NotEnoughMemory(
        f"One request of --max-model-len {needs.max_model_len} tokens needs {readable(one)} of KV cache "
        f"(in blocks of {needs.block_size} tokens), but there are {readable(budget)} for it ({reason}): beside the "
        f"weights ({readable(needs.weights)}) and with "
        f"{readable(needs.activations)} for activations, {readable(memory.available)} of the "
        f"{readable(memory.total)} of {device} memory are free.",
        fix=f"{smaller} the cache more with --kv-cache-memory-bytes.",
    )


def readable(size: int) -> str:
    """`1.5 GiB`."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"

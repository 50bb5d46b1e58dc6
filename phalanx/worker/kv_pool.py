"""The KV cache of one rank: one pair of tensors a layer, cut into blocks that the engine hands out.

Holds memory, not contents: which block belongs to whom is the engine's business, and a block's old values stay until it
is written again. So nothing may read a position that its request has not written (the attention backends see to it).
Memory is reserved whole and becomes resident block by block, as it is first written or a little before
(`phalanx.worker.residency`).
"""

from __future__ import annotations

import torch

from phalanx.attention.base import LayerCache
from phalanx.errors import NotEnoughMemory
from phalanx.models.decoder import Decoder
from phalanx.worker.limits import untouched


class KVPool:
    def __init__(self, decoder: Decoder, *, blocks: int, block_size: int, dtype: torch.dtype):
        """Raises NotEnoughMemory when the device refuses the memory."""
        self.blocks = blocks
        self.block_size = block_size
        try:
            self.caches: list[LayerCache] = decoder.allocate_caches(blocks, block_size, dtype)
        except (RuntimeError, MemoryError) as error:  # torch's allocators raise RuntimeError and its kin
            raise NotEnoughMemory(
                f"The KV cache of {blocks} blocks of {block_size} tokens could not be allocated.",
                fix="Ask for a smaller cache with --kv-cache-memory-bytes.",
            ) from error

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for cache in self.caches for t in (cache.key, cache.value))

    @property
    def untouched(self) -> int:
        """Bytes that are not resident yet, of a host's memory."""
        return sum(untouched(t.data_ptr(), t.nbytes) for t in self.host_tensors())

    def host_tensors(self) -> list[torch.Tensor]:
        """Those in a host's memory, [blocks, ...] each."""
        return [t for cache in self.caches for t in (cache.key, cache.value) if t.device.type == "cpu"]

    @property
    def bytes_per_block(self) -> int:
        return self.nbytes // self.blocks

"""What each rank of a layout needs of its device, what is left for the KV cache, and which device decides its size.

The formula is the worker's own (`phalanx.worker.memory`), on devices that may only be described. Every block of the
cache has a part on every rank, so the rank with room for the fewest blocks decides for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from phalanx.config import CacheConfig, EngineConfig
from phalanx.distributed.mesh import Mesh, Place
from phalanx.models.shares import kv_bytes_per_token, weight_bytes
from phalanx.models.spec import DecoderSpec
from phalanx.models.split import Split
from phalanx.planner.devices import Device
from phalanx.worker.limits import Memory
from phalanx.worker.memory import activation_bytes, cache_budget

TYPICAL = 1024


@dataclass(frozen=True)
class Layout:
    """Which rank holds what. Even where `tensor_weights` or `stage_layers` is empty."""

    widths: tuple[int, ...]
    """Tensor ranks of each pipeline stage."""
    tensor_weights: tuple[tuple[float, ...], ...] = ()
    stage_layers: tuple[int, ...] = ()

    @property
    def mesh(self) -> Mesh:
        return Mesh.of_widths(self.widths)

    @property
    def world_size(self) -> int:
        return sum(self.widths)

    def split(self, spec: DecoderSpec, stage: int) -> Split:
        """Raises ConfigError when the model cannot be cut like this."""
        return Split.of(spec, self.mesh, stage, stage_layers=self.stage_layers, tensor_weights=self.tensor_weights)


@dataclass(frozen=True, eq=False)
class Demand:
    """What is asked of the devices, whatever the layout."""

    spec: DecoderSpec
    dtype: str
    cache: CacheConfig
    """Resolved."""
    max_model_len: int
    max_num_seqs: int
    activations: int
    """Bytes on each rank; an estimate from above, as the worker makes it."""

    @classmethod
    def of(cls, spec: DecoderSpec, config: EngineConfig) -> Demand:
        """`config` is resolved."""
        scheduler, dtype = config.scheduler, config.model.dtype
        tokens, rows = scheduler.max_num_batched_tokens, scheduler.max_num_sampled
        activations = activation_bytes(spec, dtype, tokens=tokens, rows=rows)
        length = config.model.max_model_len or spec.max_positions
        return cls(spec, dtype, config.cache, length, rows, activations)

    @property
    def blocks_per_request(self) -> int:
        """Of a request of `max_model_len` tokens."""
        return -(-self.max_model_len // self.cache.block_size)

    @property
    def enough(self) -> int:
        """Blocks that all requests at full length fill; more are never allocated."""
        return self.max_num_seqs * self.blocks_per_request

    @property
    def typical(self) -> int:
        """Tokens of a typical request, prompt and answer: few are as long as the longest."""
        return min(TYPICAL, self.max_model_len)

    @property
    def plenty(self) -> int:
        """Blocks with which memory is no concern: for all requests at typical length, and one at full length."""
        typical = self.max_num_seqs * -(-self.typical // self.cache.block_size)
        return max(typical, self.blocks_per_request)

    def kv_budget(self, device: Device, weights: int) -> int:
        """Bytes that the cache may take on `device` beside `weights`; below zero by what is missing."""
        memory = Memory(device.memory.total, device.memory.available - weights)
        room = memory.available - self.activations
        budget, _ = cache_budget(memory, self.activations, self.cache, device=device.kind)
        return budget if budget <= room else room - budget


@dataclass(frozen=True)
class RankMemory:
    """One rank on its device, in bytes."""

    rank: int
    place: Place
    device: Device
    layers: tuple[int, int]
    """Half-open range."""
    heads: int
    weights: int
    activations: int
    kv_bytes_per_block: int
    kv_budget: int
    """Bytes that the cache may take here; negative by what is missing."""

    @property
    def capacity(self) -> int:
        """Blocks that fit here."""
        return max(self.kv_budget, 0) // self.kv_bytes_per_block

    def missing(self, blocks: int) -> int:
        """Bytes that are missing here for `blocks` blocks; 0 when they fit."""
        return max(0, blocks * self.kv_bytes_per_block - self.kv_budget)


@dataclass(frozen=True, eq=False)
class Budget:
    """A layout on its devices."""

    demand: Demand
    layout: Layout
    ranks: tuple[RankMemory, ...]

    @cached_property
    def binding(self) -> RankMemory:
        """The rank whose device has room for the fewest blocks; the first of them."""
        return min(self.ranks, key=lambda rank: rank.kv_budget / rank.kv_bytes_per_block)

    @property
    def capacity(self) -> int:
        """Blocks that fit on every device, however many can be used."""
        return min(rank.capacity for rank in self.ranks)

    @property
    def blocks(self) -> int:
        """Of the KV cache."""
        return min(self.capacity, self.demand.enough)

    @property
    def is_bound(self) -> bool:
        """Whether memory decides the size of the cache, rather than what requests can use."""
        return self.capacity < self.demand.enough

    @property
    def tokens(self) -> int:
        return self.blocks * self.demand.cache.block_size

    @property
    def concurrency(self) -> float:
        """Requests of full length that fit at the same time."""
        return self.tokens / self.demand.max_model_len

    @property
    def fits(self) -> bool:
        """Whether one request of full length fits."""
        return self.capacity >= self.demand.blocks_per_request

    def kv_bytes(self, rank: RankMemory) -> int:
        return self.blocks * rank.kv_bytes_per_block

    @property
    def taken(self) -> int:
        """Weights and KV cache of all ranks."""
        return sum(rank.weights + self.kv_bytes(rank) for rank in self.ranks)

    @property
    def usable(self) -> int:
        """Bytes that weights, activations and cache may take in all."""
        return sum(rank.weights + rank.activations + max(rank.kv_budget, 0) for rank in self.ranks)


def budget(demand: Demand, layout: Layout, devices: Sequence[Device]) -> Budget:
    """`devices` are those of the ranks, in rank order. Raises ConfigError when the model cannot be cut like this."""
    spec, mesh, block_size = demand.spec, layout.mesh, demand.cache.block_size
    splits = [layout.split(spec, stage) for stage in range(mesh.pp)]
    ranks = []
    for rank, device in zip(range(mesh.world_size), devices, strict=True):
        place = mesh.place(rank)
        split = splits[place.pp]
        first, last = split.layers.ranges[place.pp]
        weights = weight_bytes(spec, mesh, split, place, demand.dtype)
        per_token = kv_bytes_per_token(spec, split, place, demand.cache.kv_cache_dtype)
        ranks.append(
            RankMemory(
                rank=rank,
                place=place,
                device=device,
                layers=(first, last),
                heads=max(split.heads(layer.attention).length(place.tp) for layer in spec.layers[first:last]),
                weights=weights,
                activations=demand.activations,
                kv_bytes_per_block=per_token * block_size,
                kv_budget=demand.kv_budget(device, weights),
            )
        )
    return Budget(demand, layout, tuple(ranks))

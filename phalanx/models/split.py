"""How one model is cut over a mesh: layers by pipeline stage; heads, inner width and vocabulary by tensor rank.

Pure data, for the decoder, the loader and the planner. Query heads are cut in whole heads; a rank also holds every KV
head its query heads read, so a KV head may be on two ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.distributed.mesh import Mesh
from phalanx.distributed.partition import Partition
from phalanx.errors import ConfigError
from phalanx.models.spec import AttentionSpec, DecoderSpec


@dataclass(frozen=True)
class Split:
    layers: Partition
    """Over the pipeline stages."""
    tensor_weights: tuple[float, ...]
    """The share of each tensor rank, up to a common factor."""

    @classmethod
    def even(cls, spec: DecoderSpec, mesh: Mesh) -> Split:
        """Raises ConfigError when the model has fewer layers or heads than the mesh wants to share."""
        heads = min(layer.attention.num_heads for layer in spec.layers)
        if mesh.tp > heads:
            raise ConfigError(
                f"{mesh.tp} tensor ranks cannot share {heads} attention heads.",
                fix=f"Use at most {heads} tensor ranks.",
            )
        if mesh.pp > spec.num_layers:
            raise ConfigError(
                f"{mesh.pp} pipeline stages cannot share {spec.num_layers} layers.",
                fix=f"Use at most {spec.num_layers} stages.",
            )
        return cls(Partition.even(spec.num_layers, mesh.pp), (1.0,) * mesh.tp)

    @property
    def tensor_ranks(self) -> int:
        return len(self.tensor_weights)

    def cut(self, size: int, unit: int = 1) -> Partition:
        """A dimension cut by the ranks' shares: inner width or vocabulary."""
        return Partition.weighted(size, self.tensor_weights, unit)

    def heads(self, attention: AttentionSpec) -> Partition:
        return self.cut(attention.num_heads)

    def kv_heads(self, attention: AttentionSpec) -> Partition:
        """Per rank, the KV heads that its query heads read; ranges may overlap."""
        ranges = ((attention.kv_head_of(a), attention.kv_head_of(b - 1) + 1) for a, b in self.heads(attention).ranges)
        return Partition(attention.num_kv_heads, tuple(ranges))

    def kv_head_map(self, attention: AttentionSpec, rank: int) -> tuple[int, ...]:
        """For each query head of `rank`, the place of its KV head among the rank's."""
        start, stop = self.heads(attention).ranges[rank]
        first = self.kv_heads(attention).ranges[rank][0]
        return tuple(attention.kv_head_of(head) - first for head in range(start, stop))

"""How one model is cut over a mesh: layers by pipeline stage; heads, inner width and vocabulary by tensor rank.

Pure data, for the decoder, the loader and the planner. Query heads are cut in whole heads; a rank also holds every KV
head its query heads read, so a KV head may be on two ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """The share of each tensor rank of the stage, up to a common factor."""

    @classmethod
    def of(
        cls, spec: DecoderSpec, mesh: Mesh, stage: int, *,
        stage_layers: Sequence[int] = (), tensor_weights: Sequence[Sequence[float]] = (),
    ) -> Split:  # fmt: skip
        """The cut that ranks of `stage` see. `stage_layers` are the layers of each stage and `tensor_weights` the
        shares of each stage's tensor ranks; both are even when empty. Raises ConfigError when the model has fewer
        layers or heads than the mesh wants to share, or the numbers do not fit the mesh.
        """
        widest, heads = max(mesh.widths), min(layer.attention.num_heads for layer in spec.layers)
        if widest > heads:
            raise ConfigError(
                f"{widest} tensor ranks cannot share {heads} attention heads.", fix=f"Use at most {heads} tensor ranks."
            )
        if mesh.pp > spec.num_layers:
            raise ConfigError(
                f"{mesh.pp} pipeline stages cannot share {spec.num_layers} layers.",
                fix=f"Use at most {spec.num_layers} stages.",
            )
        weights = tuple(tensor_weights[stage]) if tensor_weights else (1.0,) * mesh.widths[stage]
        if len(weights) != mesh.widths[stage] or min(weights) <= 0:
            raise ConfigError(
                f"The tensor split {','.join(f'{w:g}' for w in weights)} does not name a share above zero for each of "
                f"{mesh.widths[stage]} ranks."
            )
        return cls(_stages(spec.num_layers, mesh.pp, stage_layers), weights)

    @classmethod
    def even(cls, spec: DecoderSpec, mesh: Mesh, stage: int = 0) -> Split:
        """As `of`, with equal shares."""
        return cls.of(spec, mesh, stage)

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


def _stages(layers: int, stages: int, stage_layers: Sequence[int]) -> Partition:
    if not stage_layers:
        return Partition.even(layers, stages)
    if len(stage_layers) != stages or sum(stage_layers) != layers or min(stage_layers) < 1:
        raise ConfigError(
            f"The pipeline split {','.join(map(str, stage_layers))} does not share {layers} layers over {stages} "
            "stages.",
            fix=f"Name {stages} numbers of layers that add up to {layers}.",
        )
    ends = [sum(stage_layers[: i + 1]) for i in range(stages)]
    return Partition(layers, tuple((end - n, end) for end, n in zip(ends, stage_layers, strict=True)))

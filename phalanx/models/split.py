"""How one model is cut over a mesh: layers by pipeline stage; heads, inner width and vocabulary by tensor rank.

Pure data, for the decoder, the loader and the planner. Query heads are cut in whole heads; a rank also holds every KV
head its query heads read, so a KV head may be on two ranks. The inner width of the same layer's feed-forward part is
then cut so that every rank has its share of the layer as a whole: who got more heads gets fewer columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.distributed.mesh import Mesh
from phalanx.distributed.partition import Partition
from phalanx.errors import ConfigError
from phalanx.models.spec import AttentionSpec, DecoderSpec, GatedMlp, LayerSpec

ALIGNED = 8
"""Columns and rows are cut at multiples of this where the width is one: matrix units read so many numbers at once."""

BLOCK = 32
"""The smallest block of the quantised formats. A longer block that is cut is read by both ranks."""


@dataclass(frozen=True)
class Split:
    layers: Partition
    """Over the pipeline stages."""
    tensor_weights: tuple[float, ...]
    """The share of each tensor rank of the stage, up to a common factor."""
    block: int = 1
    """Numbers in a quantisation block of the checkpoint: inner widths are cut between blocks."""

    @classmethod
    def of(
        cls, spec: DecoderSpec, mesh: Mesh, stage: int, *,
        stage_layers: Sequence[int] = (), tensor_weights: Sequence[Sequence[float]] = (),
    ) -> Split:  # fmt: skip
        """The cut that ranks of `stage` see. `stage_layers` are the layers of each stage and `tensor_weights` the
        shares of each stage's tensor ranks; both are even when empty. Raises ConfigError when the model has fewer
        layers or heads than the mesh wants to share, or the numbers do not fit the mesh.
        """
        widest = max(mesh.widths)
        for size, what in (
            (min(layer.attention.num_heads for layer in spec.layers), "attention heads"),
            (min(layer.mlp.intermediate_size for layer in spec.layers), "columns of a feed-forward layer"),
            (spec.vocab_size, "tokens of the vocabulary"),
        ):
            if widest > size:
                raise ConfigError(
                    f"{widest} tensor ranks cannot share {size} {what}.", fix=f"Use at most {size} tensor ranks."
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
        block = BLOCK if spec.checkpoint_dtype == "quantized" else 1
        return cls(_stages(spec.num_layers, mesh.pp, stage_layers), weights, block)

    @classmethod
    def even(cls, spec: DecoderSpec, mesh: Mesh, stage: int = 0) -> Split:
        """As `of`, with equal shares."""
        return cls.of(spec, mesh, stage)

    @property
    def tensor_ranks(self) -> int:
        return len(self.tensor_weights)

    def vocabulary(self, spec: DecoderSpec) -> Partition:
        """Rows of the token table and of the output head."""
        return self._cut(spec.vocab_size, self.tensor_weights, ALIGNED)

    def heads(self, attention: AttentionSpec) -> Partition:
        return Partition.weighted(attention.num_heads, self.tensor_weights)

    def inner(self, layer: LayerSpec, unit: int = 1) -> Partition:
        """Columns of the layer's feed-forward part, at multiples of `unit` (a scheme's) where there are enough."""
        mlp, attention = layer.mlp, layer.attention
        heads, kv_heads = self.heads(attention).lengths, self.kv_heads(attention).lengths
        # What a rank holds and computes of a layer, in matrix columns of the hidden size: query and output, key and
        # value for each head, gate, up and down for each inner column.
        taken = [2 * attention.head_dim * (q + kv) for q, kv in zip(heads, kv_heads, strict=True)]
        each = 3 if isinstance(mlp, GatedMlp) else 2
        unit = max(unit, self.block, ALIGNED)
        least = min(unit, mlp.intermediate_size / self.tensor_ranks)
        shares = leveled(mlp.intermediate_size, [t / each for t in taken], self.tensor_weights, least)
        return self._cut(mlp.intermediate_size, shares, unit)

    def _cut(self, size: int, shares: Sequence[float], unit: int) -> Partition:
        """In units where they fit; narrow dimensions in smaller ones."""
        while unit > 1 and (-(-size // unit) < self.tensor_ranks or (size % unit and unit <= ALIGNED)):
            unit //= 2
        return Partition.weighted(size, shares, unit)

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


def leveled(size: int, taken: Sequence[float], weights: Sequence[float], least: float) -> list[float]:
    """Shares of `size` that bring every rank to its part, by `weights`, of all there is: what it has `taken` already
    and its share. A rank that has taken more than its part gets `least`, and the others are brought level without it.
    """
    open_ranks = set(range(len(weights)))
    shares = [least] * len(weights)
    while open_ranks:
        room = size - least * (len(weights) - len(open_ranks))
        total = room + sum(taken[r] for r in open_ranks)
        weight = sum(weights[r] for r in open_ranks)
        for r in open_ranks:
            shares[r] = total * weights[r] / weight - taken[r]
        full = {r for r in open_ranks if shares[r] < least}
        if not full:
            break
        for r in full:
            shares[r] = least
        open_ranks -= full
    return shares

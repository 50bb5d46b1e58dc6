"""The layout of ranks: four axes, coordinates, and who talks with whom. Pure data; starts nothing.

    rank = ((dp · PP + pp) · CP + cp) · TP + tp

so the ranks of a tensor group are neighbours. Pipeline stages may have tensor groups of different widths
(`stage_tp`); ranks are then counted in the same order, with each stage's own width. The groups of one kind cut the
world into disjoint sets, and two groups of different kinds meet in exactly one rank or none. Expert parallelism is no
axis but a view of these (`experts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Axis = Literal["dp", "pp", "cp", "tp"]
AXES: tuple[Axis, ...] = ("dp", "pp", "cp", "tp")


@dataclass(frozen=True)
class Place:
    """A rank's coordinates."""

    dp: int
    pp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Mesh:
    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    """Tensor ranks of a stage; of the widest one where they differ."""
    stage_tp: tuple[int, ...] = ()
    """Tensor ranks of each pipeline stage, where they differ; empty when all have `tp`."""

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise ValueError(f"axis {axis} has size {getattr(self, axis)}")
        if self.stage_tp and (len(self.stage_tp) != self.pp or max(self.stage_tp) != self.tp or min(self.stage_tp) < 1):
            raise ValueError(f"stage widths {self.stage_tp} do not fit pp {self.pp} and tp {self.tp}")

    @classmethod
    def of_widths(cls, widths: Sequence[int]) -> Mesh:
        """Pipeline stages with so many tensor ranks each."""
        return cls(pp=len(widths), tp=max(widths), stage_tp=tuple(widths) if len(set(widths)) > 1 else ())

    @property
    def widths(self) -> tuple[int, ...]:
        """Tensor ranks of each stage."""
        return self.stage_tp or (self.tp,) * self.pp

    @property
    def world_size(self) -> int:
        return self.dp * self.cp * sum(self.widths)

    @property
    def reporter(self) -> int:
        """The rank whose results are the step's: the first of the last stage."""
        return self.rank(Place(0, self.pp - 1, 0, 0))

    def has(self, place: Place) -> bool:
        return place.tp < self.widths[place.pp]

    def rank(self, place: Place) -> int:
        """Raises ValueError for a place that the mesh does not have."""
        if not self.has(place):
            raise ValueError(f"stage {place.pp} has no tensor rank {place.tp}")
        widths = self.widths
        before = (place.dp * sum(widths) + sum(widths[: place.pp])) * self.cp
        return before + place.cp * widths[place.pp] + place.tp

    def place(self, rank: int) -> Place:
        """Raises ValueError for a rank that the mesh does not have."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in a mesh of {self.world_size}")
        dp, rest = divmod(rank, self.cp * sum(self.widths))
        for pp, width in enumerate(self.widths):
            if rest < self.cp * width:
                cp, tp = divmod(rest, width)
                return Place(dp, pp, cp, tp)
            rest -= self.cp * width
        raise ValueError(f"rank {rank} has no place")

    def group(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axis` only, in the order of that axis. Stages that are too narrow
        have no member in the pipeline group of a high tensor rank."""
        own = self.place(rank)
        size = self.widths[own.pp] if axis == "tp" else getattr(self, axis)
        places = (
            Place(
                i if axis == "dp" else own.dp,
                i if axis == "pp" else own.pp,
                i if axis == "cp" else own.cp,
                i if axis == "tp" else own.tp,
            )
            for i in range(size)
        )
        return tuple(self.rank(place) for place in places if self.has(place))

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """All groups of one kind, by their lowest rank."""
        return tuple(sorted({self.group(axis, rank) for rank in range(self.world_size)}))

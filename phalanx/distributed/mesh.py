"""The layout of ranks: four axes, coordinates, and who talks with whom. Pure data; starts nothing.

    rank = ((dp · PP + pp) · CP + cp) · TP + tp

so the ranks of a tensor group are neighbours. The groups of one kind cut the world into disjoint sets, and two groups
of different kinds meet in exactly one rank or none. Expert parallelism is a view: the ranks of one pipeline stage
over all other axes, which hold different experts of the same layers.
"""

from __future__ import annotations

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

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise ValueError(f"axis {axis} has size {getattr(self, axis)}")

    @property
    def world_size(self) -> int:
        return self.dp * self.pp * self.cp * self.tp

    def rank(self, place: Place) -> int:
        return ((place.dp * self.pp + place.pp) * self.cp + place.cp) * self.tp + place.tp

    def place(self, rank: int) -> Place:
        """Raises ValueError for a rank that the mesh does not have."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in a mesh of {self.world_size}")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        dp, pp = divmod(rest, self.pp)
        return Place(dp, pp, cp, tp)

    def group(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axis` only, in the order of that axis."""
        place = self.place(rank)
        return tuple(
            self.rank(Place(**{a: i if a == axis else getattr(place, a) for a in AXES}))
            for i in range(getattr(self, axis))
        )

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """All groups of one kind, by their lowest rank."""
        return tuple(sorted({self.group(axis, rank) for rank in range(self.world_size)}))

    def expert_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same layers, in rank order."""
        stage = self.place(rank).pp
        return tuple(r for r in range(self.world_size) if self.place(r).pp == stage)

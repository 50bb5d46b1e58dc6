"""Who owns which part of one dimension: rows, heads, layers, experts or vocabulary. Pure data.

A `Partition` gives every rank one contiguous range. Uneven is the normal case. Ranges may overlap where a part lives
on several ranks (replicated KV heads); `Partition.whole` is the extreme, where every rank has everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Partition:
    size: int
    ranges: tuple[tuple[int, int], ...]
    """Per rank, half-open."""

    def __post_init__(self) -> None:
        covered = 0
        for start, stop in sorted(self.ranges):
            if not 0 <= start <= stop <= self.size or start > covered:
                raise ValueError(f"ranges {self.ranges} do not cover 0 to {self.size} in order")
            covered = max(covered, stop)
        if covered != self.size:
            raise ValueError(f"ranges {self.ranges} do not cover 0 to {self.size}")

    @classmethod
    def whole(cls, size: int, ranks: int = 1) -> Partition:
        """Every rank has everything."""
        return cls(size, ((0, size),) * ranks)

    @classmethod
    def even(cls, size: int, ranks: int, unit: int = 1) -> Partition:
        """As equal as whole units allow; the first ranks get the larger shares. The last unit may be short."""
        return cls.weighted(size, (1.0,) * ranks, unit)

    @classmethod
    def weighted(cls, size: int, weights: Sequence[float], unit: int = 1) -> Partition:
        """Shares in proportion to `weights`, in whole units, by largest remainder (ties to the first rank).

        Raises ValueError when the weights are not positive, or when there are fewer units than ranks.
        """
        units = -(-size // unit)
        if not weights or min(weights) <= 0:
            raise ValueError(f"weights {tuple(weights)} are not all above zero")
        if units < len(weights):
            raise ValueError(f"{units} units cannot be shared by {len(weights)} ranks")
        total = sum(weights)
        spare = units - len(weights)
        # Every rank gets one unit, so that none is idle; the rest follows the weights as closely as whole units allow.
        ideal = [max(units * w / total - 1, 0.0) for w in weights]
        scale = spare / sum(ideal) if sum(ideal) else 0.0
        shares = [int(i * scale + 1e-9) for i in ideal]
        order = sorted(range(len(weights)), key=lambda r: (shares[r] - ideal[r] * scale, r))
        for r in order[: spare - sum(shares)]:
            shares[r] += 1
        ranges, start = [], 0
        for share in shares:
            stop = start + share + 1
            ranges.append((min(start * unit, size), min(stop * unit, size)))
            start = stop
        return cls(size, tuple(ranges))

    @property
    def ranks(self) -> int:
        return len(self.ranges)

    @property
    def is_whole(self) -> bool:
        """Every rank has everything, so nothing needs to be exchanged."""
        return all(r == (0, self.size) for r in self.ranges)

    @property
    def overlaps(self) -> bool:
        return sum(self.lengths) != self.size

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.ranges)

    def length(self, rank: int) -> int:
        start, stop = self.ranges[rank]
        return stop - start

    def scaled(self, factor: int) -> Partition:
        """The same split of a dimension that is `factor` times as long: heads to their rows."""
        return Partition(self.size * factor, tuple((a * factor, b * factor) for a, b in self.ranges))

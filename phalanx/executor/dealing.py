"""How many ranks each node gets: whole tensor groups where there are enough of them, so that only stages cross nodes.

Pure: starts nothing and asks nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

from phalanx.errors import ConfigError


def deal(groups: Sequence[int], capacity: Sequence[int]) -> tuple[int, ...]:
    """Ranks for each node, at least one, dealt in order: ranks 0, 1, … to node 0, the next ones to node 1, and so on.

    `groups` are the sizes of the tensor groups in rank order; `capacity` are the nodes' cores or devices. Whole groups
    are dealt when there is one for each node, single ranks otherwise; then evenly if that goes, and else so that the
    fullest node is as little full as can be. Raises ConfigError when there are fewer ranks than nodes.
    """
    nodes, ranks = len(capacity), sum(groups)
    if ranks < nodes:
        raise ConfigError(
            f"{nodes} nodes cannot share {ranks} rank(s).",
            fix="Set --tensor-parallel-size or --pipeline-parallel-size so that each node has a rank.",
        )
    units = list(groups) if len(groups) >= nodes else [1] * ranks
    if len(units) % nodes == 0 and len(set(units)) == 1:
        return (ranks // nodes,) * nodes
    return _fewest_per_core(tuple(units), tuple(max(1, cores) for cores in capacity))


def _fewest_per_core(units: tuple[int, ...], capacity: tuple[int, ...]) -> tuple[int, ...]:
    before = (0, *accumulate(units))

    @cache
    def best(node: int, first: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """Loads (fullest first) and counts of the best way to deal the units from `first` on to the nodes from `node`
        on."""
        if node == len(capacity) - 1:
            count = before[-1] - before[first]
            return (count / capacity[node],), (count,)
        options = []
        for end in range(first + 1, len(units) - (len(capacity) - node - 1) + 1):
            loads, counts = best(node + 1, end)
            count = before[end] - before[first]
            ordered = tuple(sorted((count / capacity[node], *loads), reverse=True))
            options.append((ordered, (count, *counts)))
        return min(options, key=lambda option: (option[0], tuple(-count for count in option[1])))

    return best(0, 0)[1]


def crossing(groups: Sequence[int], counts: Sequence[int]) -> list[tuple[int, int]]:
    """First and last rank of each tensor group that lies on more than one node."""
    ends = list(accumulate(counts))
    crossed = []
    first = 0
    for size in groups:
        last = first + size - 1
        if any(first < end <= last for end in ends):
            crossed.append((first, last))
        first = last + 1
    return crossed

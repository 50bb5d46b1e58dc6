"""Who owns which part of a dimension."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.distributed.partition import Partition


@given(st.integers(1, 500), st.lists(st.floats(0.05, 20), min_size=1, max_size=8), st.integers(1, 16))
@settings(max_examples=300)
def test_weighted_covers_in_whole_units(size: int, weights: list[float], unit: int) -> None:
    units = -(-size // unit)
    if units < len(weights):
        with pytest.raises(ValueError, match="cannot be shared"):
            Partition.weighted(size, weights, unit)
        return
    partition = Partition.weighted(size, weights, unit)
    assert partition.ranges[0][0] == 0 and partition.ranges[-1][1] == size
    for (_, stop), (start, _) in zip(partition.ranges, partition.ranges[1:], strict=False):
        assert stop == start and stop % unit == 0
    assert min(partition.lengths) >= 1 and not partition.overlaps
    total = sum(weights)
    for length, weight in zip(partition.lengths, weights, strict=True):
        # No rank is further from its share than the one unit everyone is given moves it.
        assert abs(-(-length // unit) - units * weight / total) <= len(weights)


def test_known_splits() -> None:
    assert Partition.even(9, 2).ranges == ((0, 5), (5, 9))
    assert Partition.even(9, 4).lengths == (3, 2, 2, 2)
    assert Partition.even(100, 3, unit=32).ranges == ((0, 64), (64, 96), (96, 100))
    assert Partition.weighted(12, (1, 3)).lengths == (3, 9)
    assert Partition.weighted(30, (2, 1)).scaled(64).ranges == ((0, 1280), (1280, 1920))
    assert Partition.whole(7, 3).is_whole and Partition.whole(7, 3).overlaps


def test_overlap_is_allowed_and_gaps_are_not() -> None:
    shared = Partition(3, ((0, 2), (1, 3)))
    assert shared.overlaps and shared.lengths == (2, 2)
    for ranges in (((0, 1), (2, 3)), ((1, 3),), ((0, 2),), ((0, 4),), ((2, 1), (0, 3))):
        with pytest.raises(ValueError, match="cover"):
            Partition(3, ranges)
    with pytest.raises(ValueError, match="above zero"):
        Partition.weighted(4, (1, 0))

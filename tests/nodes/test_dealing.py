"""How ranks are dealt to nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import ConfigError
from phalanx.executor.dealing import crossing, deal


@pytest.mark.parametrize(
    ("groups", "capacity", "counts"),
    [
        ((1, 1), (2, 2), (1, 1)),
        ((2,), (8, 8), (1, 1)),  # one tensor group over two nodes
        ((4,), (8, 2), (2, 2)),  # it divides: evenly
        ((3,), (2, 1), (2, 1)),  # it does not: by cores
        ((3,), (1, 2), (1, 2)),
        ((2, 2, 2), (4, 4), (4, 2)),  # whole groups, though 3 + 3 would be even
        ((2, 2, 2), (2, 4), (2, 4)),
        ((2, 1), (4, 4), (2, 1)),  # stages of unequal width
        ((1, 2), (4, 4), (1, 2)),
        ((1, 1, 1, 1), (1, 1, 6), (1, 1, 2)),
    ],
)
def test_deal(groups: tuple[int, ...], capacity: tuple[int, ...], counts: tuple[int, ...]) -> None:
    assert deal(groups, capacity) == counts


def test_more_nodes_than_ranks() -> None:
    with pytest.raises(ConfigError, match=r"3 nodes cannot share 2 rank"):
        deal((1, 1), (1, 1, 1))


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=6),
    st.lists(st.integers(0, 64), min_size=1, max_size=5),
)
def test_every_rank_is_dealt_once(groups: list[int], capacity: list[int]) -> None:
    if sum(groups) < len(capacity):
        return
    counts = deal(groups, capacity)
    assert sum(counts) == sum(groups)
    assert len(counts) == len(capacity)
    assert min(counts) >= 1
    if len(groups) >= len(capacity) and not (len(set(groups)) == 1 and len(groups) % len(capacity) == 0):
        assert crossing(groups, counts) == [], "there were enough tensor groups for all nodes"


def test_crossing() -> None:
    assert crossing((2, 2), (2, 2)) == []
    assert crossing((2, 2), (1, 3)) == [(0, 1)]
    assert crossing((4,), (1, 3)) == [(0, 3)]
    assert crossing((2, 2), (1, 2, 1)) == [(0, 1), (2, 3)]

"""Counts of proposed tokens: of several engines, of several lives, and between two moments."""

from __future__ import annotations

from phalanx.metrics.speculation import SpeculationCounts


def test_counts_add_up_and_are_told_apart() -> None:
    one, two = SpeculationCounts(accepted_at=[0, 0, 0]), SpeculationCounts()
    one.note(3, 2)
    before = one + SpeculationCounts()
    one.note(2, 0)
    one.note(3, 3)
    assert one == SpeculationCounts(3, 8, 5, [2, 2, 1])
    assert before == SpeculationCounts(1, 3, 2, [1, 1, 0])
    assert one.since(before) == SpeculationCounts(2, 5, 3, [1, 1, 1])
    assert sum([one, two, before]) == SpeculationCounts(4, 11, 7, [3, 3, 1])
    assert sum([two, two]) == two == SpeculationCounts()

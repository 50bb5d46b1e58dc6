"""The layout of ranks: coordinates and groups."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.distributed.mesh import AXES, Mesh

sizes = st.integers(1, 3)
even = st.builds(Mesh, dp=sizes, pp=sizes, cp=sizes, tp=sizes)
uneven = st.builds(
    lambda dp, cp, widths: replace(Mesh.of_widths(widths), dp=dp, cp=cp), sizes, sizes, st.lists(sizes, min_size=2)
)
meshes = even | uneven


@given(meshes)
@settings(max_examples=30)
def test_ranks_and_places_are_one_to_one(mesh: Mesh) -> None:
    places = [mesh.place(rank) for rank in range(mesh.world_size)]
    assert len(set(places)) == mesh.world_size
    assert [mesh.rank(place) for place in places] == list(range(mesh.world_size))


@given(meshes)
@settings(max_examples=30)
def test_groups(mesh: Mesh) -> None:
    """Groups of one kind cut the world into disjoint sets; groups of different kinds meet in one rank at most."""
    for axis in AXES:
        groups = mesh.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
        for rank in range(mesh.world_size):
            place, group = mesh.place(rank), mesh.group(axis, rank)
            line = [replace(place, **{axis: i}) for i in range(getattr(mesh, axis))]
            assert [mesh.place(member) for member in group] == [each for each in line if mesh.has(each)]
            assert rank in group
    for first, second in product(AXES, AXES):
        if first < second:
            for rank in range(mesh.world_size):
                assert set(mesh.group(first, rank)) & set(mesh.group(second, rank)) == {rank}
            assert all(len(set(a) & set(b)) <= 1 for a in mesh.groups(first) for b in mesh.groups(second))


def test_rank_order() -> None:
    """Tensor ranks are neighbours, then context, then stages, then replicas."""
    mesh = Mesh(dp=2, pp=3, cp=2, tp=4)
    assert mesh.group("tp", 5) == (4, 5, 6, 7)
    assert mesh.group("cp", 1) == (1, 5)
    assert mesh.group("pp", 0) == (0, 8, 16)
    assert mesh.group("dp", 3) == (3, 27)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="axis tp"):
        Mesh(tp=0)
    with pytest.raises(ValueError, match="rank 4"):
        Mesh(tp=4).place(4)

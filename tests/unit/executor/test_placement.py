"""Where ranks go: strategies, labels, groups kept together, and refusals that say what to do."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.distributed.mesh import Mesh
from phalanx.executor.placement import (
    STRATEGIES,
    Demand,
    NoRoom,
    Site,
    Taker,
    arrange,
    ray_strategy,
    refusal,
)

ONE = Demand({"CPU": 1.0})


def node(name: str, cpus: float, *, free: float | None = None, **more) -> Site:
    labels = more.pop("labels", {})
    return Site(name, f"host-{name}", {"CPU": cpus if free is None else free, **more}, {"CPU": cpus, **more}, labels)


def names(mesh: Mesh, sites: list[Site], strategy: str = "PACK", demand: Demand = ONE, home: str = "") -> str:
    """The node of each rank, in a word."""
    return "".join(sites[i].node for i in arrange(mesh, demand, sites, strategy, home=home).sites)


class TestPack:
    def test_all_ranks_go_to_one_node_that_they_fit_best(self):
        assert names(Mesh(tp=2, pp=2), [node("a", 16), node("b", 4), node("c", 8)]) == "bbbb"

    def test_the_own_node_comes_first(self):
        assert names(Mesh(tp=2), [node("a", 2), node("b", 8)], home="b") == "bb"

    def test_a_tensor_group_stays_on_one_node_and_stages_go_across(self):
        assert names(Mesh(tp=2, pp=2), [node("a", 2), node("b", 3)]) in ("aabb", "bbaa")
        found = arrange(Mesh(tp=2, pp=2), ONE, [node("a", 3), node("b", 3)], "PACK")
        assert not found.split_groups

    def test_a_group_that_fits_nowhere_is_spread_and_that_is_said(self):
        found = arrange(Mesh(tp=3), ONE, [node("a", 2), node("b", 1)], "PACK")
        assert found.split_groups == ((0, 1, 2),)

    def test_nodes_of_unequal_size_take_stages_of_unequal_width(self):
        sites = [node("a", 1), node("b", 2)]
        assert names(Mesh.of_widths((1, 2)), sites) == "abb"
        assert names(Mesh.of_widths((2, 1)), sites) == "bba"


class TestSpread:
    def test_stages_go_to_different_nodes_though_one_would_do(self):
        assert names(Mesh(tp=2, pp=2), [node("a", 8), node("b", 8)], "SPREAD") in ("aabb", "bbaa")

    def test_the_ranks_of_the_only_tensor_group_do(self):
        assert sorted(names(Mesh(tp=2), [node("a", 8), node("b", 8)], "SPREAD")) == ["a", "b"]

    def test_on_one_node_it_is_no_demand(self):
        assert names(Mesh(tp=2), [node("a", 8)], "SPREAD") == "aa"

    def test_more_units_than_nodes_are_shared_out_evenly(self):
        assert Counter(names(Mesh(pp=4), [node("a", 8), node("b", 8)], "SPREAD")) == {"a": 2, "b": 2}


class TestStrict:
    def test_strict_pack_takes_one_node_or_none(self):
        assert names(Mesh(tp=3), [node("a", 2), node("b", 3)], "STRICT_PACK") == "bbb"
        with pytest.raises(NoRoom, match="no single node has room for 4 ranks; the roomiest takes 3"):
            arrange(Mesh(tp=4), ONE, [node("a", 2), node("b", 3)], "STRICT_PACK")

    def test_strict_spread_gives_each_unit_a_node_of_its_own_or_refuses(self):
        sites = [node("a", 2), node("b", 2)]
        assert sorted(names(Mesh(tp=2), sites, "STRICT_SPREAD")) == ["a", "b"]
        assert names(Mesh(tp=2, pp=2), sites, "STRICT_SPREAD") in ("aabb", "bbaa")
        with pytest.raises(NoRoom, match="STRICT_SPREAD needs 3 nodes"):
            arrange(Mesh(tp=3), ONE, sites, "STRICT_SPREAD")

    def test_ray_is_told_the_strategy_unless_its_unit_contradicts(self):
        sites = [node("a", 2), node("b", 2)]
        for mesh, told in ((Mesh(tp=2), "STRICT_SPREAD"), (Mesh(tp=2, pp=2), "SPREAD")):
            assert ray_strategy("STRICT_SPREAD", arrange(mesh, ONE, sites, "STRICT_SPREAD"), sites) == told


class TestSpan:
    """`--nnodes`: exactly so many nodes."""

    def over(self, mesh: Mesh, cpus: list[int], span: int, strategy: str = "PACK") -> str:
        sites = [node(chr(97 + i), c) for i, c in enumerate(cpus)]
        return "".join(sites[i].node for i in arrange(mesh, ONE, sites, strategy, span=span).sites)

    def test_it_is_met_evenly_with_whole_groups_where_there_are_enough(self):
        assert self.over(Mesh(tp=2, pp=2), [9, 9, 1], 2) in ("aabb", "bbaa")
        assert sorted(self.over(Mesh(tp=2), [9, 1, 9], 2)) == ["a", "c"]
        assert sorted(self.over(Mesh(tp=4), [9, 1, 9], 3)) == ["a", "a", "b", "c"]

    @pytest.mark.parametrize(("cpus", "strategy"), [([9], "PACK"), ([9, 0], "PACK"), ([9, 9], "STRICT_PACK")])
    def test_or_refused(self, cpus, strategy):
        with pytest.raises(NoRoom, match="--nnodes asks for 2 nodes"):
            self.over(Mesh(tp=2), cpus, 2, strategy)


class TestDemand:
    def test_labels_choose_nodes(self):
        sites = [node("a", 8), node("b", 8, labels={"zone": "x"})]
        assert names(Mesh(tp=2), sites, demand=Demand({"CPU": 1.0}, {"zone": "x"})) == "bb"

    def test_custom_resources_and_fractions_count(self):
        sites = [node("a", 8), node("b", 8, fast=1.0)]
        half = Demand({"CPU": 1.0, "fast": 0.5})
        assert names(Mesh(tp=2), sites, demand=half) == "bb"
        with pytest.raises(NoRoom):
            arrange(Mesh(tp=3), half, sites, "PACK")

    def test_tenths_add_up(self):
        assert node("a", 1.0).room(Demand({"CPU": 0.1})) == 10
        assert node("a", 0.3).room(Demand({"CPU": 0.1})) == 3

    def test_what_is_taken_counts_only_when_somebody_may_let_go(self):
        sites = [node("a", 4, free=1)]
        with pytest.raises(NoRoom, match="room for 1 of 2 ranks"):
            arrange(Mesh(tp=2), ONE, sites, "PACK")
        assert arrange(Mesh(tp=2), ONE, sites, "PACK", when_empty=True).sites == (0, 0)


def test_bundles_of_a_group_are_filled_in_their_order():
    sites = [
        Site(n, f"host-{n}", {"CPU": free}, {"CPU": 2.0}, bundle=i)
        for i, (n, free) in enumerate([("a", 0.0), ("a", 1.0), ("b", 2.0), ("a", 2.0)])
    ]
    found = arrange(Mesh(tp=2, pp=2), ONE, sites, "PACK")
    assert found.sites in ((1, 3, 2, 2), (2, 2, 1, 3))


@given(
    widths=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    cpus=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    strategy=st.sampled_from(STRATEGIES),
)
def test_every_rank_has_a_place_no_node_is_overfull_and_strategies_hold(widths, cpus, strategy):
    mesh = Mesh.of_widths(widths)
    sites = [node(chr(97 + i), c) for i, c in enumerate(cpus)]
    groups = mesh.groups("tp")
    units = groups if len(groups) > 1 else tuple((rank,) for rank in groups[0])
    try:
        found = arrange(mesh, ONE, sites, strategy)
    except NoRoom:
        if strategy == "STRICT_PACK":
            assert max(cpus) < mesh.world_size
        elif strategy == "STRICT_SPREAD":
            wide = sorted(map(len, units), reverse=True)
            fits = all(c >= w for c, w in zip(sorted(cpus, reverse=True), wide, strict=False))
            assert len(cpus) < len(units) or not fits
        else:
            assert sum(cpus) < mesh.world_size
        return
    used = Counter(found.sites)
    assert len(found.sites) == mesh.world_size
    assert all(count <= cpus[site] for site, count in used.items())
    if strategy == "STRICT_PACK":
        assert len(used) == 1
    if strategy == "PACK" and max(cpus) >= mesh.world_size:
        assert len(used) == 1
    if strategy == "STRICT_SPREAD":
        assert len({found.sites[unit[0]] for unit in units}) == len(units)
        assert all(len({found.sites[rank] for rank in unit}) == 1 for unit in units)
    apart = {group for group in groups if len({found.sites[rank] for rank in group}) > 1}
    assert set(found.split_groups) == apart


class TestRefusal:
    sites: tuple[Site, ...] = (node("aaaabbbbcccc", 2, free=0.5), node("ddddeeeeffff", 1, free=1))

    def text(self, mesh: Mesh, strategy: str = "PACK", demand: Demand = ONE) -> str:
        takers = [Taker("actor Trainer (pid 4711)", "aaaabbbbcccc", {"CPU": 1.5})]
        return str(refusal(mesh, demand, self.sites, strategy, takers, "there is no room", within="The Ray cluster"))

    def test_says_what_is_asked_what_exists_and_who_has_it(self):
        text = self.text(Mesh(tp=3))
        for part in (
            "no place for 3 ranks",
            "Asked: 3 × CPU 1, strategy PACK",
            "host-aaaabbbbcccc (aaaabbbb): CPU 0.5 of 2 free",
            "host-ddddeeeeffff (ddddeeee): CPU 1 of 1 free",
            "actor Trainer (pid 4711) holds CPU 1.5 on host-aaaabbbbcccc",
            "End what holds them",
        ):
            assert part in text
        assert "\n" not in text

    def test_the_remedy_fits_the_case(self):
        assert "ask for fewer ranks" in self.text(Mesh(tp=4))
        assert "--placement-strategy PACK" in self.text(Mesh(tp=3), "STRICT_PACK")
        missing = self.text(Mesh(tp=2), demand=Demand({"CPU": 1.0}, {"zone": "x"}))
        assert "no label zone" in missing and "or change --worker-labels" in missing
        assert "fast 0 of 0 free" in self.text(Mesh(tp=1), demand=Demand({"CPU": 1.0, "fast": 1.0}))

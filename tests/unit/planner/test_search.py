"""Which split is found: exact layers, shares by memory and speed, layouts, and the complaints of users about others."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config import ParallelConfig
from phalanx.errors import ConfigError
from phalanx.planner import cost, search
from phalanx.planner.devices import declared
from phalanx.planner.memory import Layout, budget
from phalanx.planner.search import partition, resolved
from tests.helpers.planning import chosen, demand_of, llama, plan_for, qwen_14b

A10 = "name=a10,memory=24G"
MIXED = ("name=large,memory=32G", "name=small,memory=20G,count=2")


# -- layers, exactly


def test_no_cut_of_whole_layers_uses_more_than_the_documented_part():
    """Every cut in which each stage might have room, in every order of the devices: what the documentation says cannot
    be had."""
    spec, (demand, _) = qwen_14b(), demand_of(qwen_14b(), device="cuda")
    best = 0.0
    for order in set(itertools.permutations(declared(MIXED))):
        for first, second in itertools.product(range(6, 24), repeat=2):
            if 6 <= (third := spec.num_layers - first - second) < 24:
                found = budget(demand, Layout((1, 1, 1), ((1.0,),) * 3, (first, second, third)), order)
                best = max(best, found.taken / found.usable)
    chosen_one = plan_for(spec, *MIXED, pipeline_parallel_size=3, device="cuda").budget
    assert 0.947 <= chosen_one.taken / chosen_one.usable <= best < 0.9485


@given(st.data(), st.integers(1, 9), st.integers(1, 4))
def test_no_other_cut_has_a_smaller_largest_cost(data, layers, stages):
    stages = min(stages, layers)
    table = {
        (stage, a, b): data.draw(st.one_of(st.integers(-20, 20), st.just(math.inf)))
        for stage in range(stages) for a in range(layers) for b in range(a + 1, layers + 1)
    }  # fmt: skip
    found, worst = partition(layers, [lambda a, b, s=s: table[s, a, b] for s in range(stages)])
    best = math.inf
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        ends = (0, *cuts, layers)
        best = min(best, max(table[s, a, b] for s, (a, b) in enumerate(itertools.pairwise(ends))))
    assert worst == best
    if best < math.inf:
        ends = list(itertools.accumulate(found, initial=0))
        assert len(found) == stages
        assert min(found) >= 1
        assert ends[-1] == layers
        assert max(table[s, a, b] for s, (a, b) in enumerate(itertools.pairwise(ends))) == best


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("vocab", [1000, 200_000])
def test_the_slowest_stage_is_as_fast_as_can_be(stages, vocab):
    """Among all cuts with room for what requests need, none has a faster slowest stage: embedding and head counted."""
    spec = llama(heads=8, layers=10, vocab_size=vocab)
    for memory in ("64G", "1700M"):
        plan = plan_for(spec, f"name=x,memory={memory},count={stages}", pipeline_parallel_size=stages, max_num_seqs=64)
        demand = plan.budget.demand
        rows = max(min(plan.load, search.BUSY) / stages, 1)
        ours = max(cost.stage_seconds(plan.budget, rows))
        others = []
        for cuts in itertools.combinations(range(1, 10), stages - 1):
            layers = tuple(b - a for a, b in itertools.pairwise((0, *cuts, 10)))
            others.append(budget(demand, Layout((1,) * stages, (), layers), plan.devices))
        wanted = min(demand.plenty, 0.98 * max(other.capacity for other in others))
        assert plan.budget.fits
        assert plan.budget.capacity >= wanted
        fastest = min(max(cost.stage_seconds(other, rows)) for other in others if other.capacity >= wanted)
        assert ours <= fastest * 1.0001


def test_a_large_vocabulary_takes_layers_from_the_stage_that_has_the_head():
    spec = llama(heads=8, layers=12, vocab_size=150_000)
    three = {"pipeline_parallel_size": 3, "max_num_seqs": 3}
    layers = plan_for(spec, "name=x,memory=40G,count=3", **three).budget.layout.stage_layers
    assert sum(layers) == 12
    assert layers[2] < layers[1]
    even = plan_for(llama(heads=8, layers=12, vocab_size=100), "name=x,memory=40G,count=3", **three)
    assert even.budget.layout.stage_layers == (4, 4, 4)


def test_a_slow_device_gets_fewer_layers_and_the_stage_times_are_level():
    spec = llama(heads=8, layers=24)
    plan = plan_for(
        spec, "name=fast,memory=40G,speed=900g", "name=slow,memory=40G,speed=300g", "name=fast,memory=40G,speed=900g",
        pipeline_parallel_size=3, max_num_seqs=8,
    )  # fmt: skip
    first, slow, last = plan.budget.layout.stage_layers
    assert slow * 2 <= min(first, last)
    times = cost.stage_seconds(plan.budget, max(plan.load / 3, 1))
    even = cost.stage_seconds(budget(plan.budget.demand, Layout((1, 1, 1), (), (8, 8, 8)), plan.devices), 8 / 3)
    assert max(times) < 0.6 * max(even)


# -- shares of tensor ranks


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(9, 3, 2), (40, 40, 3), (40, 8, 6), (28, 4, 8), (52, 52, 3)])
def test_head_counts_that_do_not_divide(heads, kv_heads, ranks):
    spec = llama(heads=heads, kv_heads=kv_heads, vocab_size=32_003, intermediate_size=172 * heads + 1)
    plan = plan_for(spec, f"name=x,memory=80G,count={ranks}", tensor_parallel_size=ranks)
    held = [rank.heads for rank in plan.budget.ranks]
    assert sum(held) == heads
    assert max(held) - min(held) <= 1
    weights = [rank.weights for rank in plan.budget.ranks]
    # Nothing is padded: beyond the model itself there are only norms and the KV heads that two ranks read.
    whole, doubled = spec.weight_bytes("bfloat16"), ranks * 2 * 2 * spec.hidden_size * 64 * spec.num_layers * 2
    norms = ranks * 2 * spec.hidden_size * (2 * spec.num_layers + 1)
    assert whole <= sum(weights) <= whole + doubled + norms
    # What the heads leave uneven, the feed-forward part evens out.
    assert max(weights) <= 1.06 * min(weights)


@pytest.mark.parametrize("layout", [{}, {"tensor_parallel_size": 3}])
def test_unequal_devices_get_unequal_shares_and_are_full(layout):
    plan = plan_for(qwen_14b(), *MIXED, **layout) if layout else chosen(qwen_14b(), *MIXED)[0]
    found = plan.budget
    assert len(found.ranks) == 3
    assert found.ranks[0].heads > found.ranks[1].heads >= found.ranks[2].heads
    allowed = sum(int(0.9 * device.memory.total) for device in plan.devices)
    assert sum(rank.weights + found.kv_bytes(rank) for rank in found.ranks) >= 0.95 * allowed
    for rank in found.ranks:
        needed = rank.weights + rank.activations + found.kv_bytes(rank)
        assert 0.95 * 0.9 * rank.device.memory.total <= needed <= 0.9 * rank.device.memory.total
    equal = plan_for(qwen_14b(), *MIXED, tensor_parallel_size=3, tensor_split="1,1,1").budget
    assert found.tokens > 1.2 * equal.tokens


def test_unequal_stages_are_nearly_full_too():
    plan = plan_for(qwen_14b(), *MIXED, pipeline_parallel_size=3)
    equal = plan_for(qwen_14b(), *MIXED, pipeline_parallel_size=3, pipeline_split="14,13,13")
    assert plan.budget.layout.stage_layers[0] > 14
    assert plan.budget.taken >= 0.94 * plan.budget.usable
    assert plan.budget.tokens > 1.2 * equal.budget.tokens


def test_a_card_that_is_half_full_gets_less():
    plan = plan_for(qwen_14b(), "name=desktop,memory=24G,used=40%", "name=a,memory=24G", tensor_parallel_size=2)
    desktop, other = plan.budget.ranks
    assert desktop.weights < 0.7 * other.weights
    assert desktop.weights + desktop.activations + plan.budget.kv_bytes(desktop) <= 0.9 * 24 * 2**30 - 0.4 * 24 * 2**30
    assert plan.budget.taken >= 0.94 * plan.budget.usable


def test_few_kv_heads_do_not_spoil_the_shares():
    """Heads that share keys make some cuts dear: the search moves away from them."""
    spec = llama(heads=40, kv_heads=8, layers=40)
    plan = plan_for(spec, *MIXED, tensor_parallel_size=3, max_num_seqs=4000)
    rooms = [float(f"{0.9 * size:g}") for size in (32, 20, 20)]
    naive = plan_for(spec, *MIXED, tensor_parallel_size=3, max_num_seqs=4000, tensor_split=",".join(map(str, rooms)))
    assert plan.budget.blocks > 1.05 * naive.budget.blocks


def test_two_kv_heads_on_three_ranks_are_dealt_so_that_the_small_card_has_one():
    spec = llama(heads=14, kv_heads=2, layers=40, hidden_size=5120, head_dim=128, intermediate_size=13_696)
    cards = ("name=a,memory=24G", "name=b,memory=16G", "name=c,memory=24G")
    naive = plan_for(spec, *cards, tensor_parallel_size=3, max_num_seqs=4000, tensor_split="24,16,24")
    plan = plan_for(spec, *cards, tensor_parallel_size=3, max_num_seqs=4000)
    assert plan.budget.capacity > 1.5 * naive.budget.capacity


@pytest.mark.parametrize("speed", ["630g", "720g"])
def test_a_little_more_speed_is_not_bought_with_much_memory(speed):
    cards = ("name=large,memory=32G,speed=600g", f"name=small,memory=20G,count=2,speed={speed}")
    plan = plan_for(qwen_14b(), *cards, tensor_parallel_size=3)
    assert plan.budget.taken >= 0.95 * plan.budget.usable


def test_equal_devices_are_split_evenly_and_given_splits_are_kept():
    assert plan_for(qwen_14b(), f"{A10},count=2", tensor_parallel_size=2).budget.layout.tensor_weights == ((1.0, 1.0),)
    given = plan_for(qwen_14b(), *MIXED, tensor_parallel_size=3, tensor_split="2,1,1").budget.layout
    assert given.tensor_weights == ((2.0, 1.0, 1.0),)
    given = plan_for(qwen_14b(), *MIXED, pipeline_parallel_size=3, pipeline_split="20,10,10").budget.layout
    assert given.stage_layers == (20, 10, 10)


def test_speed_counts_when_memory_is_plenty():
    fast, slow = "name=fast,memory=80G,speed=900g", "name=slow,memory=80G,speed=300g"
    spec = llama(heads=32, layers=32)
    plan = plan_for(spec, fast, slow, tensor_parallel_size=2, max_num_seqs=4)
    even = plan_for(spec, fast, slow, tensor_parallel_size=2, max_num_seqs=4, tensor_split="1,1")
    assert plan.budget.ranks[0].heads >= 22
    assert plan.tokens_per_second > 1.3 * even.tokens_per_second
    wavering = plan_for(spec, "name=a,memory=80G,speed=600g", "name=b,memory=80G,speed=630g", tensor_parallel_size=2)
    assert [rank.heads for rank in wavering.budget.ranks] == [16, 16]


# -- layouts


def test_two_a10_hold_the_classic_model_either_way_and_one_does_not():
    assert not plan_for(qwen_14b(), A10).budget.fits
    assert plan_for(qwen_14b(), f"{A10},count=2", tensor_parallel_size=2).budget.fits
    assert plan_for(qwen_14b(), f"{A10},count=2", pipeline_parallel_size=2).budget.fits


def test_nodes_with_two_and_one_devices_make_stages_of_two_and_one_ranks():
    best, *others = chosen(qwen_14b(), f"{A10},node=a,count=2", f"{A10},node=b")
    assert best.budget.layout.widths == (2, 1)
    assert not best.crosses_nodes
    assert best.budget.layout.stage_layers[0] > 24
    assert any(other.crosses_nodes and other.budget.fits for other in others)
    best, *others = chosen(qwen_14b(), f"{A10},node=a", f"{A10},node=b")
    assert best.budget.layout.widths == (1, 1)
    assert others[0].crosses_nodes
    assert others[0].tokens_per_second > best.tokens_per_second, "only the network speaks against it"


def test_tensor_groups_cross_nodes_only_when_nothing_else_fits():
    spec = llama(heads=40, layers=1, intermediate_size=520_000, vocab_size=1000)
    best = chosen(spec, "name=a,memory=8G,node=a", "name=b,memory=8G,node=b", max_num_batched_tokens=64)[0]
    assert best.budget.fits
    assert best.budget.layout.widths == (2,)
    assert best.crosses_nodes


def test_devices_that_do_not_help_stay_unused():
    spec = llama(heads=2, kv_heads=2, layers=2)
    best = chosen(spec, "name=x,memory=24G,count=8")[0]
    assert len(best.devices) < 8
    tiny = chosen(llama(heads=8), "name=big,memory=24G", "name=nothing,memory=1m")[0]
    assert [device.name for device in tiny.devices] == ["big"]


def test_what_cannot_be_cut():
    spec = llama(heads=2, kv_heads=1, layers=3)
    with pytest.raises(ConfigError, match="3 tensor ranks cannot share 2 attention heads"):
        plan_for(spec, "name=x,memory=24G,count=3", tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="4 pipeline stages cannot share 3 layers"):
        plan_for(spec, "name=x,memory=24G,count=4", pipeline_parallel_size=4)
    with pytest.raises(ConfigError, match="does not share 3 layers over 2 stages"):
        plan_for(spec, "name=x,memory=24G,count=2", pipeline_parallel_size=2, pipeline_split="2,2")


def test_a_plan_is_written_out_and_read_again():
    for options in ({"tensor_parallel_size": 3}, {"pipeline_parallel_size": 3}, {"pipeline_tensor_sizes": "2,1"}):
        plan = plan_for(qwen_14b(), *MIXED, **options)
        layout = plan.budget.layout
        parallel = resolved(ParallelConfig(), layout)
        assert parallel.widths == layout.widths
        assert parallel.stage_layers == layout.stage_layers
        assert parallel.tensor_weights == layout.tensor_weights
        demand, _ = demand_of(qwen_14b())
        again = search.lay_out(demand, parallel, declared(MIXED))
        assert again.budget.blocks == plan.budget.blocks


# -- the estimate


def test_a_step_reads_what_a_rank_holds_once():
    spec = llama(heads=8, layers=4, vocab_size=1000)
    plan = plan_for(spec, "name=x,memory=24G,speed=100g")
    table = 1000 * spec.hidden_size * 2
    cached = spec.kv_bytes_per_token("bfloat16") * 512 * 3
    (seconds,) = cost.stage_seconds(plan.budget, 3)
    assert seconds == pytest.approx((spec.weight_bytes("bfloat16") - table + cached) / 100e9)


def test_stages_work_at_the_same_time_only_with_several_requests():
    plan = plan_for(llama(heads=32, layers=32), "name=x,memory=24G,count=2", pipeline_parallel_size=2)
    one = cost.tokens_per_second(plan.budget, 1)
    assert one == pytest.approx(1 / sum(cost.stage_seconds(plan.budget, 1)), rel=0.02)
    assert 1.7 * one < cost.tokens_per_second(plan.budget, 2) < 2 * one

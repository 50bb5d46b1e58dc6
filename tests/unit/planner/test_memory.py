"""Budgets of ranks: numbers worked out here by hand, and the worker's own formula for the same sizes."""

import pytest

from phalanx.config import CacheConfig
from phalanx.distributed.mesh import Mesh
from phalanx.errors import NotEnoughMemory
from phalanx.planner.devices import declared
from phalanx.planner.memory import Layout, budget
from phalanx.worker.limits import Memory
from phalanx.worker.memory import Needs, cache_size, check_before_loading
from tests.helpers.planning import demand_of, llama, plan_for, qwen_14b

GIB = 2**30
A10 = "name=a10,memory=24G"


def by_hand(ranks: int) -> dict[str, int]:
    """Qwen-14B-Chat in bfloat16 over `ranks` equal tensor ranks that divide 40 heads, from its published sizes."""
    hidden, layers, heads, head, inner, vocab = 5120, 40, 40, 128, 27392 // 2, 152064
    attention = 3 * hidden * heads * head // ranks + 3 * heads * head // ranks + heads * head * hidden // ranks
    layer = attention + 3 * hidden * inner // ranks + 2 * hidden
    weights = 2 * (layers * layer + 2 * vocab * hidden // ranks + hidden)
    step = 2048 * (4 * hidden + max((2 * heads + 4 * heads) * head, 3 * inner)) * 2 + 128 * vocab * 4 * 3
    per_token = 2 * layers * (heads // ranks) * head * 2
    room = int(0.9 * 24 * GIB) - weights - step
    blocks = room // (16 * per_token)
    return {"weights": weights, "activations": step, "per_token": per_token, "blocks": blocks, "tokens": blocks * 16}


def test_two_a10_by_an_independent_calculation():
    plan, hand = plan_for(qwen_14b(), f"{A10},count=2", tensor_parallel_size=2), by_hand(2)
    for rank in plan.budget.ranks:
        assert rank.weights == hand["weights"]
        assert rank.activations == hand["activations"]
        assert rank.kv_bytes_per_block == 16 * hand["per_token"]
    assert plan.budget.blocks == hand["blocks"]
    assert plan.budget.tokens == hand["tokens"] == 20_848
    assert plan.budget.concurrency == pytest.approx(20_848 / 8192)
    assert plan.budget.is_bound


def test_the_worker_comes_to_the_same_number():
    for options in ({}, {"gpu_memory_utilization": 0.8}, {"kv_cache_memory_bytes": 3 * GIB}, {"device": "cpu"}):
        demand, config = demand_of(llama(heads=8), max_num_seqs=4000, **options)
        (device,) = declared(["name=x,memory=8G,used=1G"], kind=options.get("device"))
        found = budget(demand, Layout((1,)), [device])
        (rank,) = found.ranks
        needs = Needs(
            rank.weights, rank.activations, rank.kv_bytes_per_block // 16, 16, demand.max_model_len, demand.max_num_seqs
        )
        left = Memory(device.memory.total, device.memory.available - rank.weights)
        assert found.blocks == cache_size(needs, left, config.cache, device=device.kind)


@pytest.mark.parametrize("used", ["1G", "50%", "90%", "97%"])
@pytest.mark.parametrize("options", [{}, {"kv_cache_memory_bytes": 2 * GIB}, {"device": "cpu"}])
def test_planner_and_worker_refuse_the_same(used, options):
    demand, config = demand_of(llama(heads=8), **options)
    (device,) = declared([f"name=x,memory=4G,used={used}"], kind=options.get("device"))
    found = budget(demand, Layout((1,)), [device])
    (rank,) = found.ranks
    per_token = rank.kv_bytes_per_block // 16
    needs = Needs(rank.weights, rank.activations, per_token, 16, demand.max_model_len, demand.max_num_seqs)
    try:
        check_before_loading(needs, device.memory, config.cache, device=device.kind, dtype=demand.dtype)
        fits = True
    except NotEnoughMemory:
        fits = False
    assert found.fits is fits
    assert (rank.missing(demand.blocks_per_request) == 0) is fits


def test_no_more_blocks_than_requests_can_use():
    plan = plan_for(llama(heads=8), "name=x,memory=80G", max_num_seqs=2, max_model_len=1000)
    assert plan.budget.blocks == 2 * 63
    assert not plan.budget.is_bound


def test_the_tightest_rank_decides_and_is_named():
    plan = plan_for(llama(heads=8), "name=big,memory=16G", "name=small,memory=4G", tensor_parallel_size=2,
                    tensor_split="1,1", max_num_seqs=4000)  # fmt: skip
    assert plan.budget.binding.device.name == "small"
    assert plan.budget.capacity == plan.budget.ranks[1].capacity < plan.budget.ranks[0].capacity


def test_what_is_missing_is_what_would_make_it_fit():
    spec = qwen_14b()
    demand, _ = demand_of(spec)
    (device,) = declared([A10])
    (rank,) = budget(demand, Layout((1,)), [device]).ranks
    hand = by_hand(1)
    missing = hand["weights"] + hand["activations"] + 8192 * hand["per_token"] - int(0.9 * 24 * GIB)
    assert rank.missing(demand.blocks_per_request) == missing
    (grown,) = declared([f"name=a10,memory={int(24 * GIB + missing / 0.9) + 2**20}"])
    assert budget(demand, Layout((1,)), [grown]).fits
    (short,) = declared([f"name=a10,memory={int(24 * GIB + missing / 0.9) - 2**20}"])
    assert not budget(demand, Layout((1,)), [short]).fits


def test_layouts_of_uneven_width_have_the_mesh_they_say():
    assert Layout((2, 1)).mesh == Mesh(pp=2, tp=2, stage_tp=(2, 1))
    assert Layout((2, 2)).mesh == Mesh(pp=2, tp=2)


def test_explicit_bytes_that_are_not_there_are_missing():
    demand, _ = demand_of(llama(heads=8), kv_cache_memory_bytes=6 * GIB)
    (device,) = declared(["name=x,memory=4G"])
    assert not budget(demand, Layout((1,)), [device]).fits
    assert demand.cache == CacheConfig(kv_cache_memory_bytes=6 * GIB, kv_cache_dtype="bfloat16")

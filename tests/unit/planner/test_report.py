"""What people read: the table, the lines that they look for, refusals that say what is missing and what would do."""

import re

import pytest

from phalanx.errors import NotEnoughMemory
from phalanx.planner import report
from phalanx.planner.devices import declared, of_this_machine
from phalanx.planner.report import Row, binding_line, cache_lines, check_fits, layout_line, memory_table, plan_lines
from phalanx.planner.search import lay_out_widths
from phalanx.worker.limits import Memory
from tests.helpers.planning import llama, plan_for, qwen_14b

GIB = 2**30
A10 = "name=a10,memory=24G"


def refusal(*devices: str, spec=None, **options) -> str:
    plan = plan_for(spec or qwen_14b(), *devices, **options)
    with pytest.raises(NotEnoughMemory) as caught:
        check_fits(plan, declared(devices))
    return str(caught.value)


def test_one_a10_is_refused_with_the_numbers_and_what_would_do():
    text = refusal(A10)
    assert "Rank 0 (a10) needs 33.1 GiB: 26.4 GiB for weights" in text
    assert "6.2 GiB for the KV cache of one request of 8,192 tokens" in text
    assert "21.6 GiB are available" in text
    assert "11.5 GiB are missing" in text
    assert "use 2 such devices (a10) with -tp 2 or -pp 2" in text.replace("Use", "use")
    assert "--max-model-len" not in text


def test_the_largest_context_that_fits_is_offered_and_does_fit():
    devices = ["name=x,memory=31G"]
    text = refusal(*devices)
    length = int(re.search(r"--max-model-len (\d+) or less", text)[1])
    assert 0 < length < 8192
    assert plan_for(qwen_14b(), *devices, max_model_len=length).budget.fits
    assert not plan_for(qwen_14b(), *devices, max_model_len=length + 16).budget.fits


def test_uneven_stages_on_uneven_cards_name_the_card_that_binds():
    """16 and 32 layers on cards of 16 and 32 GB: users saw "24 GiB needed, 3.18 available" with cards half empty."""
    spec = llama(heads=40, layers=48, max_position_embeddings=32_768)
    devices, options = ["name=small,memory=16G", "name=large,memory=32G"], {"pipeline_parallel_size": 2}
    plan = plan_for(spec, *devices, **options, pipeline_split="32,16")
    assert plan.budget.binding.device.name == "small"
    text = refusal(*devices, spec=spec, **options, pipeline_split="32,16")
    assert "Rank 0 (small) needs" in text
    assert "Rank 1" not in text
    length = int(re.search(r"--max-model-len (\d+) or less", text)[1])
    assert plan_for(spec, *devices, **options, pipeline_split="32,16", max_model_len=length).budget.fits
    better = plan_for(spec, *devices, **options)
    assert better.budget.layout.stage_layers[0] < 20
    assert better.budget.tokens > 2 * plan.budget.tokens


def test_more_parts_of_one_machine_are_no_remedy():
    """Ranks on the CPUs of a machine share its memory: with five of them each would have a fifth."""
    machine = Memory(24 * GIB, 22 * GIB)
    for ranks in (1, 2, 5):
        devices = of_this_machine("cpu", ranks, machine, node="host")
        plan = lay_out_widths(plan_for(qwen_14b(), A10).budget.demand, (ranks,), devices)
        with pytest.raises(NotEnoughMemory) as caught:
            check_fits(plan, devices)
        assert "Use 3 such machines with --nnodes 3 and -pp 3 or -tp 3" in str(caught.value)


def test_one_rank_is_offered_where_only_that_many_are_too_much():
    """Each rank on a machine's CPUs has activations of its own."""
    devices = of_this_machine("cpu", 64, Memory(60 * GIB, 56 * GIB), node="host")
    plan = lay_out_widths(plan_for(qwen_14b(), A10).budget.demand, (4,) * 16, devices)
    with pytest.raises(NotEnoughMemory, match="Use fewer ranks: one alone fits"):
        check_fits(plan, devices)


def test_ranks_that_lack_the_same_are_told_in_one_sentence():
    text = refusal("name=x,memory=8G,count=2", tensor_parallel_size=2)
    assert "Each of the ranks 0, 1 (x) needs" in text
    assert text.count(" needs ") == 1


def test_nothing_would_do():
    text = refusal("name=tiny,memory=1k")
    assert "no context length and no layout of such devices fits" in text


def test_the_smallest_layout_is_the_smallest():
    text = refusal("name=x,memory=8G")
    count = int(re.search(r"[Uu]se (\d+) such devices", text)[1])
    for n, fits in ((count - 1, False), (count, True)):
        plans = [plan_for(qwen_14b(), f"name=x,memory=8G,count={n}", **{axis: n})
                 for axis in ("tensor_parallel_size", "pipeline_parallel_size")]  # fmt: skip
        assert any(plan.budget.fits for plan in plans) is fits


@pytest.mark.parametrize("asked", ["20G", "1G"])
def test_an_explicit_size_of_the_cache_is_what_to_change(asked):
    options = {"tensor_parallel_size": 2}
    text = refusal(f"{A10},count=2", kv_cache_memory_bytes=asked, **options)
    low, high = map(
        int, re.search(r"[Ss]et --kv-cache-memory-bytes to (\d+)M at least and (\d+)M at most", text).groups()
    )
    for size, fits in ((low, True), (high, True), (low - 1, False), (high + 1, False)):
        plan = plan_for(qwen_14b(), f"{A10},count=2", kv_cache_memory_bytes=f"{size}M", **options)
        assert plan.budget.fits is fits


def test_of_many_short_ranks_the_shortest_are_described():
    sizes = [*(f"name=x{number},memory={2000 - 100 * number}M" for number in range(6)), "name=least,memory=1000M"]
    text = refusal(*sizes, tensor_parallel_size=7, tensor_split="1,1,1,1,1,1,1")
    assert text.count(" are missing.") == 4
    assert "Rank 6 (least) needs" in text
    assert "3 more rank(s) lack as much or less." in text


def test_ranks_that_lack_the_same_share_a_sentence():
    text = refusal("name=x,memory=500M,count=20", pipeline_parallel_size=20)
    assert text.count(" are missing.") == 2  # the ends of the pipeline, and those between
    assert "Each of the ranks 1, 2, 3, 4, 5, 6, 7, 8 and 10 more (x) needs" in text


def test_shares_that_were_asked_for_are_not_offered_again():
    text = refusal(f"{A10},count=2", tensor_parallel_size=2, tensor_split="100,1")
    assert "Use 2 such devices (a10) with -tp 2 or -pp 2 and automatic shares" in text
    assert "automatic shares" not in refusal(A10)


def test_a_plan_in_words():
    plan = plan_for(qwen_14b(), f"{A10},count=2", pipeline_parallel_size=2)
    text = "\n".join(plan_lines("Qwen-14B-Chat", plan, unused=1))
    assert "Layout: 2 workers (pp 2); 1 device(s) unused" in text
    assert "Pipeline split: 20,20 layers" in text
    assert "GPU KV cache size: 20,848 tokens" in text
    assert "Maximum concurrency for 8,192 tokens per request: 2.54x" in text
    assert re.search(r"^ +1 +- +a10 +20-40 +40 +13\.2 GiB +8\.0 GiB +463\.2 MiB +2\.4 GiB$", text, re.MULTILINE)
    assert "Binding device: rank 1 (a10)" in text
    assert "speeds assumed" in text
    measured = plan_for(qwen_14b(), f"{A10},count=2,speed=600g", tensor_parallel_size=2)
    assert "speeds assumed" not in "\n".join(plan_lines("m", measured))


def test_unequal_shares_are_shown():
    plan = plan_for(qwen_14b(), "name=a,memory=32G", "name=b,memory=20G,count=2", tensor_parallel_size=3)
    line = next(line for line in plan_lines("m", plan) if line.startswith("Tensor split: "))
    shares = [float(share) for share in re.findall(r"\d+\.\d", line)]
    assert sum(shares) == pytest.approx(100, abs=0.2)
    assert shares[0] > 1.4 * shares[1]


def test_ranks_of_a_stage_on_two_nodes_are_warned_of():
    far = plan_for(qwen_14b(), f"{A10},node=a", f"{A10},node=b", tensor_parallel_size=2)
    assert any("on several nodes" in line for line in plan_lines("m", far))
    near = plan_for(qwen_14b(), f"{A10},node=a", f"{A10},node=b", pipeline_parallel_size=2)
    considered = plan_lines("m", near, others=[far])[-2:]
    assert [line.endswith("tensor ranks of one stage on several nodes") for line in considered] == [False, True]
    assert not any("on several nodes" in line for line in plan_lines("m", near))


def test_nothing_binds_when_all_requests_fit():
    plan = plan_for(llama(heads=8), "name=x,memory=80G,count=2", tensor_parallel_size=2, max_num_seqs=2)
    assert "No device binds: the KV cache holds all requests at full length." in plan_lines("m", plan)
    alone = plan_for(llama(heads=8), "name=x,memory=80G", max_num_seqs=2)
    assert "No device binds: the KV cache holds all requests at full length." in plan_lines("m", alone)


def row(rank: int, room: int, cache: int = GIB) -> Row:
    memory = {"weights": 1, "kv_cache": cache, "activations": 2, "free": 3, "kv_room": room}
    return Row(rank, "n", f"gpu{rank}", "0-4", 2, memory)


def test_the_device_with_least_room_for_its_part_binds():
    assert binding_line([row(0, 3 * GIB), row(1, GIB)])[0].startswith("Binding device: rank 1 (gpu1)")
    assert binding_line([row(0, 3 * GIB, 3 * GIB), row(1, 2 * GIB)])[0].startswith("Binding device: rank 0 (gpu0)")
    assert binding_line([row(0, 3 * GIB), row(1, 2 * GIB)])[0].startswith("No device binds")
    assert binding_line([row(0, GIB)]) == []
    assert binding_line([row(0, GIB), Row(1, "n", "d", "0-4", 2, {"weights": 1})]) == []


def test_the_table_is_aligned_and_shows_what_is_missing_as_a_dash():
    lines = memory_table([row(0, GIB), Row(11, "a-long-node-name", "cuda:11", "10-20", 12, {"weights": 5 * GIB})])
    assert len({line.index("layers") if "layers" in line else line.index("0-4") if "0-4" in line else
                line.index("10-20") for line in lines}) == 1  # fmt: skip
    assert lines[2].split() == ["11", "a-long-node-name", "cuda:11", "10-20", "12", "5.0", "GiB", "-", "-", "-"]
    assert memory_table([]) == []


def test_the_words_for_devices_and_layouts():
    (first, second) = cache_lines("cuda:0", blocks=40_202, block_size=16, kv_bytes=3 * GIB, max_model_len=40_960)
    assert first == "GPU KV cache size: 643,232 tokens (3.0 GiB, 40,202 blocks of 16)"
    assert second == "Maximum concurrency for 40,960 tokens per request: 15.70x"
    assert cache_lines("cpu", blocks=1, block_size=16, kv_bytes=1, max_model_len=1)[0].startswith("CPU KV cache size")
    assert [layout_line(widths) for widths in ((1,), (2,), (1, 1), (2, 1), (2, 2))] == [
        "1 worker", "2 workers (tp 2)", "2 workers (pp 2)", "3 workers (pp 2, tp 2+1)", "4 workers (pp 2, tp 2)",
    ]  # fmt: skip


def test_sizes():
    assert [report.size(n) for n in (5, 2048, 3 * 2**20, 5 * 2**29, -(2**31))] == [
        "5 B", "2.0 KiB", "3.0 MiB", "2.5 GiB", "-2.0 GiB",
    ]  # fmt: skip

"""What a start gets: splits written out, sizes from declared devices, refusals before anything is started."""

import pytest

from phalanx.config import EngineConfig, resolve
from phalanx.errors import ConfigError, NotEnoughMemory
from phalanx.planner.resolution import is_shared_out_later, with_layout
from phalanx.worker.limits import host_memory
from tests.helpers.planning import Machine, llama, qwen_14b


def laid_out(spec, **options) -> EngineConfig:
    return with_layout(resolve(EngineConfig.from_options(**options), spec, Machine("cpu")), spec)


def test_one_rank_is_left_alone():
    spec = llama(heads=4)
    config = resolve(EngineConfig.from_options(), spec, Machine("cpu"))
    assert with_layout(config, spec) == config


def test_ranks_of_this_machine_get_equal_shares_and_fitting_layers():
    parallel = laid_out(llama(heads=4, layers=4), tensor_parallel_size=2, pipeline_parallel_size=2).parallel
    assert parallel.tensor_weights == ((1.0, 1.0), (1.0, 1.0))
    assert sum(parallel.stage_layers) == 4
    assert parallel.distributed_executor_backend == "mp"


def test_laying_out_again_changes_nothing():
    spec = llama(heads=4, layers=5)
    for options in (
        {"pipeline_tensor_sizes": "2,1"},
        {"tensor_parallel_size": 2, "tensor_split": "3,1"},
        {"pipeline_parallel_size": 2, "pipeline_split": "4,1"},
    ):
        once = laid_out(spec, **options)
        assert with_layout(once, spec) == once
    assert laid_out(spec, tensor_parallel_size=2, tensor_split="3,1").parallel.tensor_split == "3,1"
    assert laid_out(spec, pipeline_parallel_size=2, pipeline_split="4,1").parallel.stage_layers == (4, 1)


def test_declared_devices_decide_the_shares_of_a_real_start():
    shares = laid_out(
        qwen_14b(), tensor_parallel_size=2, device="cpu", gpu_memory_utilization=0.9,
        declare_device=("name=a,memory=64G", "name=b,memory=32G"),
    ).parallel.tensor_weights  # fmt: skip
    assert shares[0][0] > 1.5 * shares[0][1]


def test_several_devices_alone_choose_the_layout_and_its_executor():
    parallel = laid_out(
        qwen_14b(), device="cpu", gpu_memory_utilization=0.9, declare_device=("name=a10,memory=24G,count=2",)
    ).parallel
    assert parallel.widths == (2,)
    assert parallel.distributed_executor_backend == "mp"


def test_shares_of_ranks_on_other_nodes_are_decided_later():
    elsewhere = {"tensor_parallel_size": 2, "nnodes": 2, "master_addr": "10.0.0.1"}
    parallel = laid_out(llama(heads=4), **elsewhere).parallel
    assert parallel.tensor_split == "auto" and is_shared_out_later(parallel)
    with pytest.raises(ConfigError, match="2 tensor ranks cannot share 1 attention heads"):
        laid_out(llama(heads=1), **elsewhere)
    given = laid_out(llama(heads=4), **elsewhere, tensor_split="3,1").parallel
    assert not is_shared_out_later(given) and given.tensor_weights == ((3.0, 1.0),)
    declared = laid_out(llama(heads=4), **elsewhere, declare_device=("name=a,memory=4G", "name=b,memory=8G")).parallel
    assert not is_shared_out_later(declared) and declared.tensor_weights


def test_what_cannot_be_is_said_before_anything_starts():
    with pytest.raises(ConfigError, match="5 tensor ranks cannot share 4 attention heads"):
        laid_out(llama(heads=4), tensor_parallel_size=5)
    with pytest.raises(ConfigError, match="there are only 1 device"):
        laid_out(llama(heads=4), tensor_parallel_size=2, declare_device=("name=cpu,memory=1G",))
    with pytest.raises(NotEnoughMemory, match="are missing"):
        laid_out(qwen_14b(), tensor_parallel_size=2, device="cpu", declare_device=("name=x,memory=8G,count=2",))


def test_a_model_larger_than_this_machine_is_refused():
    hidden = int((host_memory().total / 2 / 8) ** 0.5) // 64 * 64 + 6400
    spec = llama(heads=hidden // 64, layers=2, vocab_size=1000)
    with pytest.raises(NotEnoughMemory, match=r"(Rank 0|Each of the ranks 0, 1) \(cpu on "):
        laid_out(spec, tensor_parallel_size=2, dtype="float32")

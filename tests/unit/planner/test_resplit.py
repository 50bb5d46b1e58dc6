"""Devices that are left: stages keep theirs where that fits, any split goes otherwise, and what is missing is said."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from phalanx.distributed.mesh import Mesh
from phalanx.models.spec import DecoderSpec
from phalanx.planner.resolution import split_anew
from phalanx.planner.resplit import Resplit, TooLittle, resplit
from phalanx.planner.sharing import Measured
from phalanx.worker.limits import Memory
from tests.helpers.planning import demand_of, gpus, llama, qwen_14b


def left(spec: DecoderSpec, sizes: Sequence[int], stages: Sequence[int], **options: object) -> Resplit:
    demand, _ = demand_of(spec, **options)
    return resplit(demand, gpus(*sizes), stages)


@pytest.mark.parametrize(
    ("stages", "widths"), [((0, 0), (2,)), ((0, 1), (1, 1)), ((0, 1, 1), (1, 2)), ((1, 1), (2,)), ((2,), (1,))]
)
def test_stages_keep_what_they_have_left(stages: tuple[int, ...], widths: tuple[int, ...]) -> None:
    found = left(llama(heads=16), (40,) * len(stages), stages)
    assert found.plan.budget.layout.widths == widths
    assert found.used == tuple(range(len(stages))) and found.longest == 0


def test_devices_of_different_size_get_different_shares() -> None:
    shares = left(qwen_14b(), (32, 20), (0, 0)).plan.budget.layout.tensor_weights[0]
    assert shares[0] > shares[1]


def test_any_split_where_the_stages_as_they_were_do_not_fit() -> None:
    """Four stages of one device each, and three layers."""
    found = left(llama(heads=6, layers=3), (40, 40, 40, 40), (0, 1, 2, 3))
    assert sum(found.plan.budget.layout.widths) == len(found.used) and max(found.plan.budget.layout.widths) > 1


def test_a_shorter_longest_request_rather_than_none() -> None:
    spec = llama(heads=16, max_position_embeddings=2**20)
    demand, _ = demand_of(spec)
    found = left(spec, (8,), (0,))
    assert demand.typical <= found.longest < 2**20
    assert found.longest == found.plan.budget.capacity * demand.cache.block_size


def test_what_is_missing_is_said() -> None:
    with pytest.raises(TooLittle, match=r"GiB of memory more on gpu0, where 20\.0 GiB can be used now"):
        left(qwen_14b(), (20,), (0,))


def test_devices_that_were_declared_are_known_by_their_rank() -> None:
    """The first of three is lost: what the others have is what was declared for them."""
    spec = llama(heads=16)
    options = {"tensor_parallel_size": 3, "declare_device": ["name=a,memory=40G", "name=b,memory=32G,count=2"]}
    _, config = demand_of(spec, **options)
    assert config.parallel.widths == (3,)
    found = split_anew(config, spec, {1: Measured("x"), 2: Measured("y", Memory(1, 1))})
    assert found.used == (0, 1)
    assert [device.memory.total for device in found.plan.devices] == [32 * 2**30] * 2
    assert found.plan.budget.layout.mesh == Mesh(tp=2)

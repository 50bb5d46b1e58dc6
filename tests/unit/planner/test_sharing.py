"""Automatic shares from measurements: a clear difference counts, noise does not, and the reason is said."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config import EngineConfig, resolve
from phalanx.errors import NotEnoughMemory
from phalanx.planner.memory import Demand
from phalanx.planner.resolution import shared_out
from phalanx.planner.sharing import MEMORIES, SPEEDS, Measured, alike, devices, share_out
from phalanx.worker.limits import Memory
from tests.helpers.planning import Machine, llama

GIB = 2**30


def shared(*measured: Measured, spec=None, **options):
    """Tensor shares in percent, layers, and why."""
    spec = spec or llama(heads=16, layers=12)
    sizes = options or {"tensor_parallel_size": len(measured)}
    config = resolve(EngineConfig.from_options(**sizes), spec, Machine("cpu"))
    plan, why = share_out(Demand.of(spec, config), config.parallel, "cpu", measured)
    layout = plan.budget.layout
    return [[100 * w / sum(s) for w in s] for s in layout.tensor_weights], layout.stage_layers, why


def host(gib: float = 64, speed: float | None = 1e10, node: str = "") -> Measured:
    return Measured(node or f"{gib}-{speed}", Memory(128 * GIB, int(gib * GIB)), speed)


def test_a_slow_device_gets_less():
    ((fast, slow),), _, why = shared(host(), host(speed=2.5e9))
    assert fast == pytest.approx(80, abs=2) and slow == pytest.approx(20, abs=2)
    assert why == "by measured speed 1.00 / 0.25 and free memory 64.0 GiB / 64.0 GiB"


def test_a_slow_stage_gets_fewer_layers():
    _, layers, _ = shared(host(), host(speed=2.5e9), pipeline_parallel_size=2)
    assert sum(layers) == 12 and layers[0] >= 9


def test_a_small_device_gets_less_where_memory_is_short():
    spec = llama(heads=16, layers=12, max_position_embeddings=2**17)
    _, layers, why = shared(host(8), host(2), spec=spec, pipeline_parallel_size=2)
    assert layers[0] > layers[1]
    assert why == "by measured speed 1.00 / 1.00 and free memory 8.0 GiB / 2.0 GiB"


def test_noise_changes_nothing():
    even = shared(host(), host())
    for other in (host(speed=1e10 / 1.2), host(64 / 1.09), host(60, 0.85e10)):
        for pair in ((host(), other), (other, host())):
            shares, layers, why = shared(*pair)
            assert (shares, layers) == even[:2] == ([[50.0, 50.0]], ())
            assert why.startswith("equal, because measured speed") and why.endswith("are nearly the same")
            assert shared(*pair, pipeline_parallel_size=2)[1] == shared(host(), host(), pipeline_parallel_size=2)[1]


def test_one_slow_device_of_three_does_not_set_the_others_apart():
    ((a, b, c),), _, _ = shared(host(), host(speed=2.4e9), host(speed=0.9e10))
    assert a == c and b < 20


def test_what_is_not_known_of_one_counts_for_none():
    (shares,), _, why = shared(host(), Measured("silent"), host(speed=1e9))
    assert len(set(shares)) == 1 and why == "equal, because silent did not measure what there is"
    (shares,), _, why = shared(host(), host(speed=None), host(speed=1e9))
    assert len(set(shares)) == 1 and "speed" not in why


def test_shares_that_are_named_stay():
    _, layers, _ = shared(host(), host(speed=2.5e9), tensor_parallel_size=1, pipeline_parallel_size=2,
                               pipeline_split="3,9")  # fmt: skip
    assert layers == (3, 9)


def test_long_lists_are_cut_and_equal_ranks_of_a_node_are_said_once():
    _, _, why = shared(*[host(node="a")] * 4, *[host(speed=1e9, node="b")] * 4)
    assert why == "by measured speed 1.00 / 0.10 and free memory 64.0 GiB / 64.0 GiB"
    _, _, why = shared(*[host(speed=1e10 / n) for n in range(1, 13)], spec=llama(heads=24))
    assert " / … / 0.08 and" in why


def test_what_does_not_fit_is_refused():
    spec = llama(heads=16, layers=12)
    config = resolve(EngineConfig.from_options(tensor_parallel_size=2), spec, Machine("cpu"))
    with pytest.raises(NotEnoughMemory, match=r"Rank 1 \(cpu of small\)"):
        shared_out(config, spec, [host(), host(0.01, node="small")])


@given(st.lists(st.floats(1, 1e12), min_size=1, max_size=9), st.sampled_from([SPEEDS, MEMORIES]))
def test_groups_are_what_they_say(values, factor):
    groups = alike(values, factor)
    assert sorted(i for group in groups for i in group) == list(range(len(values)))
    for group in groups:
        of_group = [values[i] for i in group]
        assert max(of_group) < min(of_group) * factor or len(set(of_group)) == 1
    for above, below in pairwise(groups):
        assert min(values[i] for i in above) > max(values[i] for i in below)
        assert max(values[i] for i in above) >= max(values[i] for i in below) * factor


def test_a_memory_that_is_not_known_is_taken_to_be_large():
    known, unknown = devices("cpu", [host(), Measured("x")])
    assert unknown.memory.available > known.memory.available and known.speed is None

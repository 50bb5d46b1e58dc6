"""What a machine has for ranks: plausible numbers, parts of them, and which device is whose."""

import math
import threading

import pytest

from phalanx.config import EngineConfig
from phalanx.worker import capacity
from phalanx.worker.capacity import Capacity, is_wanted, measure, of_place, read_speed

HOST = Capacity("cpu", 64, 40, 9.0, 4.0, shared=True)


def test_a_host_is_measured():
    (host,) = measure("cpu")
    assert host.shared and host.is_plausible and host.cores > 0
    assert host.speed is None or 1e7 < host.speed < 1e14, "between a tenth of a disk's and more than any machine's"


def test_what_others_compute_hardly_changes_the_speed():
    """A thread that takes turns with the measurement would halve a speed by the clock on the wall."""
    alone = max(read_speed(1, seconds=0.1) for _ in range(3))
    over = threading.Event()
    busy = [threading.Thread(target=lambda: [sum(range(1000)) for _ in iter(over.is_set, True)]) for _ in range(4)]
    for thread in busy:
        thread.start()
    try:
        beside = max(read_speed(1, seconds=0.1) for _ in range(3))
    finally:
        over.set()
        for thread in busy:
            thread.join()
    assert beside > 0.7 * alone


def test_without_memory_to_spare_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(capacity, "host_memory", lambda: capacity.Memory(2**28, 2**27))
    (host,) = measure("cpu")
    assert host.speed is None and host.memory == capacity.Memory(2**28, 2**27) and host.is_plausible


def test_ranks_share_a_host_and_have_a_gpu_each():
    assert HOST.part(4) == Capacity("cpu", 16, 10, 2.25, 1.0)
    assert HOST.part(1) is HOST
    gpu = Capacity("a10", 24, 20)
    assert gpu.part(4) is gpu
    assert of_place([HOST], 3) is HOST
    assert [of_place([gpu, HOST], place) for place in (0, 2)] == [gpu, None]
    assert of_place([], 0) is None


@pytest.mark.parametrize(
    "bad",
    [
        Capacity("x", 10, 20),
        Capacity("x", 10, 0),
        Capacity("x", -10, -20),
        Capacity("x", 2**62, 2**61),
        Capacity("x", 10, 5, math.nan),
        Capacity("x", 10, 5, math.inf),
        Capacity("x", 10, 5, 0.0),
        Capacity("x", 10, 5, -1.0),
    ],
)
def test_what_cannot_be_is_not_believed(bad):
    assert of_place([bad], 0) is None


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, False),
        ({"tensor_parallel_size": 2}, True),
        ({"tensor_parallel_size": 2, "tensor_split": "3,1"}, False),
        ({"pipeline_parallel_size": 2}, True),
        ({"pipeline_parallel_size": 2, "pipeline_split": "3,1"}, False),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "pipeline_split": "3,1"}, True),
    ],
)
def test_shares_are_open_where_they_are_automatic(options, wanted):
    assert is_wanted(EngineConfig.from_options(**options).parallel) is wanted

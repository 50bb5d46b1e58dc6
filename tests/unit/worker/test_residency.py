"""What a KV cache uses first is resident before it is used."""

from __future__ import annotations

import mmap
import threading
import time

import pytest
import torch

from phalanx.worker import residency
from phalanx.worker.limits import untouched
from tests.helpers.processes import wait_until

MIB = 2**20


class Cache:
    """Two tensors of 16 MiB in 64 blocks, nothing of them touched but the first bytes."""

    blocks = 64

    def __init__(self) -> None:
        maps = [mmap.mmap(-1, 16 * MIB) for _ in range(2)]  # new memory, unlike what an allocator may give
        self._tensors = [torch.frombuffer(memory, dtype=torch.uint8).view(64, -1) for memory in maps]
        for tensor in self._tensors:
            tensor[0, :8] = 7

    def host_tensors(self) -> list[torch.Tensor]:
        return self._tensors

    def untouched(self, first: int = 0, end: int = 64) -> int:
        """Bytes, in these blocks."""
        return sum(untouched(t[first:end].data_ptr(), t[first:end].nbytes) for t in self._tensors)


@pytest.fixture(autouse=True)
def any_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "LEAST", 0)


@pytest.mark.parametrize(("ranks", "resident"), [(1, 48), (2, 24)])
def test_the_first_blocks_and_not_all(ranks: int, resident: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "MOST", 24 * MIB)
    monkeypatch.setattr(residency, "_PART", 1)
    cache = Cache()
    made = residency.Residency(cache, ranks)  # type: ignore[arg-type]
    assert wait_until(lambda: not threads(), 10)
    pages = 2 * 2 * 2 * MIB  # of each the system may give whole huge pages, at both ends
    assert cache.untouched(0, resident) <= 16384 and cache.untouched(resident) >= (64 - resident) * MIB // 2 - pages
    assert all(tensor[0, :8].tolist() == [7] * 8 for tensor in cache.host_tensors())
    made.end()


def test_nothing_while_a_step_runs_and_nothing_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "_REST_S", 1e9)  # as if a step had just been there
    cache = Cache()
    made = residency.Residency(cache, 1)  # type: ignore[arg-type]
    made.step_begins()
    monkeypatch.setattr(residency, "_REST_S", 0.0)
    time.sleep(0.5)  # two looks
    assert cache.untouched() > 24 * MIB and threads() == 1
    made.step_ends()
    assert wait_until(lambda: cache.untouched() < 24 * MIB, 10)
    made.end()
    assert not threads()


def test_a_small_cache_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "LEAST", 33 * MIB)
    cache = Cache()
    made = residency.Residency(cache, 1)  # type: ignore[arg-type]
    assert wait_until(lambda: not threads(), 10)
    assert cache.untouched() > 24 * MIB
    made.end()


def threads() -> int:
    return sum(thread.name == "kv-cache" for thread in threading.enumerate())

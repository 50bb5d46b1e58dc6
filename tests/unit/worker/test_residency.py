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


@pytest.mark.parametrize(("ranks", "resident"), [(1, 48), (2, 24)])
def test_the_first_blocks_and_not_all(ranks: int, resident: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "MOST", 24 * MIB)
    monkeypatch.setattr(residency, "_PART", 1)
    cache = Cache()
    residency.make_resident(cache, ranks, lambda: True)  # type: ignore[arg-type]
    assert wait_until(lambda: not any(thread.name == "kv-cache" for thread in threading.enumerate()), 10)
    pages = 2 * 2 * 2 * MIB  # of each the system may give whole huge pages, at both ends
    assert cache.untouched(0, resident) <= 16384 and cache.untouched(resident) >= (64 - resident) * MIB // 2 - pages
    assert all(tensor[0, :8].tolist() == [7] * 8 for tensor in cache.host_tensors())


def test_nothing_while_a_step_runs_and_a_cache_that_is_given_back_is_not_held() -> None:
    rest, cache = residency.Rest(), Cache()
    rest.ends()
    residency.make_resident(cache, 1, rest.is_long)  # type: ignore[arg-type]
    time.sleep(0.2)  # longer than a rest has to be
    assert cache.untouched() > 24 * MIB
    rest.begins()
    deadline = time.monotonic() + 10
    while cache.untouched() > 24 * MIB:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    rest.ends()
    del cache
    assert wait_until(lambda: not any(thread.name == "kv-cache" for thread in threading.enumerate()), 10)

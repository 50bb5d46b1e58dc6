"""What a KV cache uses first is resident before it is used."""

from __future__ import annotations

import threading

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
        self._tensors = [torch.empty(64, 256 * 1024, dtype=torch.uint8) for _ in range(2)]
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
    residency.make_resident(cache, ranks)  # type: ignore[arg-type]
    assert wait_until(lambda: not any(thread.name == "kv-cache" for thread in threading.enumerate()), 10)
    pages = 2 * 2 * 2 * MIB  # of each the system may give whole huge pages, at both ends
    assert cache.untouched(0, resident) <= 16384 and cache.untouched(resident) >= (64 - resident) * MIB // 2 - pages
    assert all(tensor[0, :8].tolist() == [7] * 8 for tensor in cache.host_tensors())


def test_a_cache_that_is_given_back_is_not_held() -> None:
    cache = Cache()
    residency.make_resident(cache, 1)  # type: ignore[arg-type]
    del cache
    assert wait_until(lambda: not any(thread.name == "kv-cache" for thread in threading.enumerate()), 10)

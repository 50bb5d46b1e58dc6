"""What a rank says is free: its part of the host beside the caches, of which little is resident yet."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest

from phalanx.worker import kv_pool
from phalanx.worker import worker as worker_module
from phalanx.worker.limits import Memory, untouched
from phalanx.worker.worker import open_worker
from tests.helpers.worker_model import engine_config, write_model

GIB = 2**30


def test_what_is_reserved_is_not_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = open_worker(
        engine_config(write_model(tmp_path), kv_cache_memory_bytes=GIB, max_num_seqs=65535), node_ranks=1
    )
    worker.load()
    worker.allocate()
    monkeypatch.setattr(worker_module, "host_memory", lambda: Memory(100 * GIB, 40 * GIB))
    monkeypatch.setattr(kv_pool, "untouched", lambda address, nbytes: nbytes)  # how much it is, the system decides
    cache = worker.status().memory["kv_cache"]
    assert cache > 0.9 * GIB
    for ranks in (1, 2):  # as when the other one was there already when this one loaded
        assert worker.status(ranks).memory["free"] == 40 * GIB // ranks - cache
    worker.close()


def test_what_was_written_is_not_reserved_only() -> None:
    page = mmap.PAGESIZE
    with mmap.mmap(-1, 64 * page) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)  # or one byte is two megabytes
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert untouched(address, 64 * page) == 64 * page
        for number in range(10, 20):
            memory[number * page] = 1
        assert untouched(address, 64 * page) == 54 * page
        assert untouched(address + 1, 12 * page) == 9 * page  # whole pages: 1 to 11

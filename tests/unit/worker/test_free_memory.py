"""What a rank says is free: its part of the host beside the caches, of which little is resident yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.worker import worker as worker_module
from phalanx.worker.limits import Memory
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
    cache = worker.status().memory["kv_cache"]
    assert cache > 0.9 * GIB
    for ranks in (1, 2):  # as when the other one was there already when this one loaded
        free = worker.status(ranks).memory["free"]
        assert 40 * GIB // ranks - cache <= free < 40 * GIB // ranks - 0.9 * cache
    worker.close()

"""Processes for other people's work: jobs that end, hang, crash or eat memory."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import psutil
import pytest

from phalanx import killable
from phalanx.errors import Unavailable
from phalanx.killable import Gone, KillablePool, Late

CHILD = """
import os, sys, time
from phalanx.killable import serve

def handle(request):
    match request.get("do"):
        case "echo":
            return {"value": request["value"], "setup": STATE, "pid": os.getpid()}
        case "sleep":
            time.sleep(request["seconds"])
        case "spin":
            while True: pass
        case "spin for":
            end = time.process_time() + request["seconds"]
            while time.process_time() < end: pass
            return {"pid": os.getpid()}
        case "exit":
            os._exit(3)
        case "eat":
            hog = bytearray(request["bytes"])
        case "raise":
            raise RuntimeError("no")
        case "environment":
            return dict(os.environ)
        case _:
            STATE.update(request)
    return {}

STATE = {}
serve(handle, int(sys.argv[1]))
"""


@pytest.fixture
def pool_of(tmp_path, monkeypatch):
    (tmp_path / "killable_child.py").write_text(CHILD)
    monkeypatch.syspath_prepend(str(tmp_path))
    pools: list[KillablePool] = []

    def make(size: int = 1, memory_bytes: int = 512 << 20, **options) -> KillablePool:
        pools.append(KillablePool("killable_child", size=size, memory_bytes=memory_bytes, **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def test_a_process_is_kept_for_the_next_job(pool_of):
    pool = pool_of(setup=lambda: {"a": 1})
    first = pool.ask({"do": "echo", "value": "ü\ud800"}, 10)
    second = pool.ask({"do": "echo", "value": [1] * 300_000}, 10)
    assert first["value"] == "ü\ud800"
    assert first["setup"] == {"a": 1}
    assert len(second["value"]) == 300_000
    assert first["pid"] == second["pid"]


def test_a_job_that_takes_too_long(pool_of):
    pool = pool_of()
    pool.start()
    before = children()
    started = time.monotonic()
    with pytest.raises(Late):
        pool.ask({"do": "spin"}, 0.3)
    assert time.monotonic() - started < 5
    assert len(children()) == len(before) - 1
    assert pool.ask({"do": "echo", "value": 1}, 10)["value"] == 1


def test_a_job_that_is_never_done_without_computing(pool_of, monkeypatch):
    pool = pool_of()
    pool.start()
    before = children()
    with monkeypatch.context() as patched:
        patched.setattr(killable, "_WAIT_S", 0.3)
        with pytest.raises(Unavailable, match="too busy"):
            pool.ask({"do": "sleep", "seconds": 60}, 10)
    assert len(children()) == len(before) - 1
    assert pool.ask({"do": "echo", "value": 1}, 10)["value"] == 1


def test_a_job_that_waits_is_not_late(pool_of):
    """Nor is one that is not scheduled: only the time is counted in which it computes."""
    assert pool_of().ask({"do": "sleep", "seconds": 0.5}, 0.2) == {}


def test_each_job_has_its_own_time(pool_of):
    pool = pool_of()
    pids = {pool.ask({"do": "spin for", "seconds": 0.2, "value": 1}, 0.5)["pid"] for _ in range(4)}
    assert len(pids) == 1


@pytest.mark.parametrize("job", [{"do": "exit"}, {"do": "raise"}, {"do": "eat", "bytes": 1 << 40}])
def test_a_job_that_ends_its_process(pool_of, job):
    pool = pool_of()
    with pytest.raises(Gone):
        pool.ask(job, 10)
    assert pool.ask({"do": "echo", "value": 1}, 10)["value"] == 1


def test_memory_is_bounded(pool_of):
    pool = pool_of(memory_bytes=256 << 20)
    pool.ask({"do": "eat", "bytes": 50 << 20}, 10)
    with pytest.raises(Gone):
        pool.ask({"do": "eat", "bytes": 300 << 20}, 10)


def test_what_is_not_json(pool_of):
    for value in ({"x": object()}, {"x": {1}}):
        with pytest.raises(ValueError, match="JSON"):
            pool_of().ask(value, 10)


def test_no_more_processes_than_allowed_and_none_left(pool_of):
    before = children()
    pool = pool_of(size=2)
    threads = [threading.Thread(target=pool.ask, args=({"do": "sleep", "seconds": 0.2}, 10)) for _ in range(6)]
    for thread in threads:
        thread.start()
    most = 0
    while any(thread.is_alive() for thread in threads):
        most = max(most, len(children() - before))
        time.sleep(0.01)
    assert most == 2
    pool.close()
    pool.close()
    assert children() == before


def test_no_secret_is_near(pool_of, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert "secret" not in pool_of().ask({"do": "environment"}, 10).values()


def test_a_fork_has_processes_of_its_own(pool_of):
    """And waits for no thread of its parent, which holds a place or the lock."""
    pool = pool_of()
    first = pool.ask({"do": "echo", "value": 1}, 10)["pid"]
    pool._slots.acquire()
    pool._lock.acquire()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(60)
            code = 2 if pool.ask({"do": "echo", "value": 2}, 10)["pid"] == first else 0
            pool.close()
        finally:
            os._exit(code)
    pool._lock.release()
    pool._slots.release()
    assert os.waitpid(child, 0)[1] == 0
    assert pool.ask({"do": "echo", "value": 3}, 10)["pid"] == first


def test_a_module_that_does_not_start():
    pool = KillablePool("phalanx.no_such_module", size=1, memory_bytes=512 << 20)
    with pytest.raises(Unavailable):
        pool.ask({}, 5)
    with pytest.raises(Unavailable):
        pool.start()


def test_an_abandoned_pool_leaves_nothing(pool_of):
    before = children()
    pool = KillablePool("killable_child", size=1, memory_bytes=512 << 20)
    pool.ask({"do": "echo", "value": 1}, 10)
    assert children() != before
    del pool
    assert children() == before
    assert "killable_child" not in sys.modules

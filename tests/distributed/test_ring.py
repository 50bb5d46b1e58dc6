"""One writer, many readers: order, length, flow control, waits and what is left behind."""

import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from phalanx.distributed.transports import segment
from phalanx.distributed.transports.abort import Abort, GroupBroken
from phalanx.distributed.transports.ring import SLOT_BYTES, SLOTS, Ring

FORK = multiprocessing.get_context("fork")
LIMIT = 1 << 26


def messages(seed: int, count: int) -> Iterator[bytes]:
    plan = random.Random(seed)
    for _ in range(count):
        length = plan.choice((0, 1, 100, 3000, SLOT_BYTES - 1, SLOT_BYTES, SLOT_BYTES + 1, 3 * SLOT_BYTES + 7))
        if plan.random() < 0.8:
            length %= 5000
        yield plan.randbytes(length)


@contextmanager
def children(count: int, function: Callable[..., None], *args: Any) -> Iterator[Any]:
    """Forked processes that run `function(number, results, *args)`; a queue of their results."""
    results = FORK.SimpleQueue()
    started = [FORK.Process(target=function, args=(i, results, *args), daemon=True) for i in range(count)]
    for process in started:
        process.start()
    try:
        yield results
    finally:
        for process in started:
            process.kill()
            process.join()


@pytest.fixture
def abort():
    abort = Abort()
    yield abort
    abort.close()


def read_all(number: int, results: Any, fds: list[int], seed: int, count: int, pause: float) -> None:
    ring = Ring.attach(fds, number + 1, Abort(), limit=LIMIT, crowded=True)
    pace = random.Random(number)
    for expected in messages(seed, count):
        if pace.random() < 0.1:
            time.sleep(pace.random() * pause)
        if ring.read(20) != expected:
            results.put(f"reader {number + 1} read something else")
            return
    results.put("all")


@pytest.mark.parametrize("readers", [1, 2, 5])
def test_every_reader_reads_every_message(readers, abort):
    ring = Ring.create(readers, abort, limit=LIMIT, crowded=True)
    with children(readers, read_all, ring.fds, readers, 300, 0.003) as results:
        for message in messages(readers, 300):
            ring.write(message, 20)
        assert [results.get() for _ in range(readers)] == ["all"] * readers
    ring.close()


@pytest.mark.slow
def test_every_reader_reads_every_message_for_long(abort):
    ring = Ring.create(3, abort, limit=LIMIT, crowded=False)
    with children(3, read_all, ring.fds, 9, 6_000, 0.0005) as results:
        for message in messages(9, 6_000):
            ring.write(message, 20)
        assert [results.get() for _ in range(3)] == ["all"] * 3
    ring.close()


def write_all(number: int, results: Any, fds: list[int], seed: int, count: int) -> None:
    ring = Ring.attach(fds, 0, Abort(), limit=LIMIT, crowded=True)
    for message in messages(seed, count):
        ring.write(message, 20)
    results.put("all")


def test_the_reader_may_make_it(abort):
    ring = Ring.create(1, abort, limit=LIMIT, crowded=True, writes=False)
    with children(1, write_all, ring.fds, 5, 100) as results:
        for expected in messages(5, 100):
            assert ring.read(20) == expected
        assert results.get() == "all"
    ring.close()


def both(abort: Abort, readers: int = 1, limit: int = LIMIT) -> tuple[Ring, list[Ring]]:
    """All members in this process."""
    ring = Ring.create(readers, abort, limit=limit, crowded=True)
    others = [
        Ring.attach([os.dup(fd) for fd in ring.fds], i + 1, abort, limit=limit, crowded=True) for i in range(readers)
    ]
    return ring, others


def close(ring: Ring, others: list[Ring]) -> None:
    for each in (ring, *others, ring):
        each.close()


def test_the_writer_waits_for_the_slowest_reader(abort):
    ring, (fast, slow) = both(abort, 2)
    for i in range(SLOTS):
        ring.write(bytes([i]), 1)
    for i in range(SLOTS):
        assert fast.read(1) == bytes([i])
    with pytest.raises(GroupBroken, match="reader 2"):
        ring.write(b"one too many", 0.05)
    assert slow.read(1) == b"\0"
    ring.write(b"now there is room", 1)
    close(ring, [fast, slow])


def test_limits(abort):
    ring, (reader,) = both(abort, limit=1000)
    with pytest.raises(GroupBroken, match="limit"):
        ring.write(bytes(1001))
    ring.write(bytes(1000))
    assert reader.read(1) == bytes(1000)
    careless = Ring.attach([os.dup(fd) for fd in ring.fds], 0, abort, limit=LIMIT, crowded=True)
    careless._count = 1
    careless.write(bytes(1001))
    with pytest.raises(GroupBroken, match="limit"):
        reader.read(1)
    close(ring, [reader, careless])


def test_reading_may_be_tried_again(abort):
    ring, (reader,) = both(abort)
    for _ in range(3):
        with pytest.raises(GroupBroken, match="too long"):
            reader.read(0.01)
    ring.write(b"at last")
    assert reader.read(1) == b"at last"
    close(ring, [reader])


@pytest.mark.parametrize("delay", [0.0, 0.0003, 0.2])
def test_an_abort_breaks_both_sides(delay, abort, monkeypatch):
    monkeypatch.setattr(segment, "_RECHECK_MS", 60_000)  # nobody finds out by looking now and then
    ring, (reader,) = both(abort)
    for _ in range(SLOTS):
        ring.write(b"")
    for wait in (lambda: ring.write(b""), lambda: [reader.read() for _ in range(SLOTS + 1)]):
        own = Abort()
        for member in (ring, reader):
            member._segment._abort = own
            member._segment._poll.register(own.fileno(), 1)
        when: list[float] = []
        threading.Timer(delay, lambda own=own, when=when: (when.append(time.monotonic()), own.set("enough"))).start()
        with pytest.raises(GroupBroken, match="enough"):
            wait()
        assert time.monotonic() - when[0] < 2, "it was not woken"
    close(ring, [reader])


def test_nothing_is_left(abort):
    before = len(os.listdir("/proc/self/fd"))
    ring, readers = both(abort, 3)
    ring.write(b"x")
    close(ring, readers)
    assert len(os.listdir("/proc/self/fd")) == before


def wait_idly(number: int, results: Any, fds: list[int]) -> None:
    ring = Ring.attach(fds, number + 1, Abort(), limit=LIMIT, crowded=False)
    start = time.process_time()
    ring.read()
    results.put(time.process_time() - start)


def test_idle_readers_burn_no_core(abort):
    ring = Ring.create(2, abort, limit=LIMIT, crowded=False)
    with children(2, wait_idly, ring.fds) as results:
        time.sleep(1.5)
        ring.write(b"wake up")
        assert max(results.get(), results.get()) < 0.05
    ring.close()

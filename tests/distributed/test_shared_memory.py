"""The shared-memory group beyond its results: what it leaves behind, what it burns, and its waits under stress."""

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from phalanx.distributed.transports import segment
from phalanx.distributed.transports.abort import Abort, GroupBroken
from phalanx.distributed.transports.shared_memory import SharedMemoryGroup
from tests.helpers.rank_spawner import Member, Ranks, run_ranks

ROOT = Path(__file__).resolve().parents[2]


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:phalanx")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def pair(timeout: float | None = 5.0) -> tuple[SharedMemoryGroup, SharedMemoryGroup, Abort]:
    """Both members in this process: for what needs no second process."""
    abort = Abort()
    first = SharedMemoryGroup.create(0, (4, 7), abort, True, timeout)
    second = SharedMemoryGroup.attach([os.dup(fd) for fd in first.fds], 1, (4, 7), abort, True, timeout)
    return first, second, abort


def test_nothing_is_left_after_closing():
    before = descriptors()
    first, second, abort = pair()
    first.send(torch.ones(1000), 1)
    kept = second.recv((1000,), torch.float32, 0)
    assert mappings() == 2
    for group in (first, second, first):
        group.close()
    abort.close()
    assert mappings() == 0 and descriptors() == before
    assert kept.sum() == 1000  # a result is not in the shared memory


def test_a_closed_or_left_group_is_no_use_to_anybody():
    first, second, abort = pair()
    first.close()
    with pytest.raises(GroupBroken, match=r"Rank 7 waits for rank 4.*left"):
        second.barrier()
    second.close()
    abort.close()


def test_messages_name_the_ranks_of_the_world():
    first, second, abort = pair(timeout=0.05)
    with pytest.raises(GroupBroken, match="Rank 4 waits for rank 7 in exchange 1, all_reduce of 8 bytes of int32"):
        first.all_reduce(torch.ones(2, dtype=torch.int32))
    for group in (first, second):
        group.close()
    abort.close()


def test_a_dtype_that_cannot_travel_is_refused():
    first, second, abort = pair()
    with pytest.raises(ValueError, match="complex64"):
        first.send(torch.ones(2, dtype=torch.complex64), 1)
    for group in (first, second):
        group.close()
    abort.close()


def idle(member: Member) -> float:
    """The share of a core that a rank burns while it waits for two seconds."""
    member.tp.barrier()
    if member.rank == 0:
        time.sleep(2)
        member.tp.barrier()
        return 0.0
    start = time.process_time()
    member.tp.barrier()
    return (time.process_time() - start) / 2


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_idle_waits_burn_no_core(transport):
    assert max(run_ranks(idle, 3, transport=transport)) < 0.05


def many_small(member: Member, count: int) -> float:
    """The median of small sums, in seconds."""
    x, times = torch.ones(144), []
    for _ in range(count):
        start = time.perf_counter()
        member.tp.all_reduce(x.fill_(1))
        times.append(time.perf_counter() - start)
        assert x[0] == member.tp.size
    return sorted(times)[count // 2]


def test_more_ranks_than_cores_slow_down_smoothly():
    """Twice as many ranks as cores: each turn of a core to another rank costs some microseconds, not a time slice."""
    size = 2 * len(os.sched_getaffinity(0))
    assert min(max(run_ranks(many_small, size, 400)) for _ in range(3)) < 0.003  # others may have work too


def no_spinning(member: Member, count: int) -> float:
    """Every wait goes to sleep at once, and looks again by itself only after a hundred seconds."""
    segment._YIELD_S = 0.0
    segment._RECHECK_MS = 100_000
    start = time.monotonic()
    for turn in range(count):
        member.tp.barrier()
        if member.rank == turn % member.tp.size:
            member.tp.send(torch.ones(2), (member.rank + 1) % member.tp.size)
        elif member.rank == (turn + 1) % member.tp.size:
            member.tp.recv((2,), torch.float32, turn % member.tp.size)
    return time.monotonic() - start


@pytest.mark.parametrize("size", [2, 3])
def test_no_ring_of_the_bell_is_lost(size):
    """With one lost, a rank would sleep for a hundred seconds."""
    assert max(run_ranks(no_spinning, size, 1500, crowded=True, timeout=200)) < 90


def stumbling(member: Member, seed: int, steps: int) -> int:
    """Ranks stop at random places, so that some are a round ahead; every entry that comes over is looked at."""
    group, size, me = member.tp, member.tp.size, member.rank
    pace, plan = random.Random((seed, me).__hash__()), random.Random(seed)
    for step in range(steps):
        if pace.random() < 0.2:
            time.sleep(pace.random() * 0.002)
        n = plan.choice((1, 30, 5000, 70_000))
        match plan.randrange(4):
            case 0:
                x = group.all_reduce(torch.full((n,), float(step + me)))
                assert (x == size * step + size * (size - 1) / 2).all()
            case 1:
                x = group.all_gather(torch.full((n + me,), float(step * size + me)), 0, [n + r for r in range(size)])
                expected = torch.cat([torch.full((n + r,), float(step * size + r)) for r in range(size)])
                assert torch.equal(x, expected)
            case 2:
                source = plan.randrange(size)
                assert (
                    group.broadcast(torch.full((n,), float(step * size + me)), source) == step * size + source
                ).all()
            case 3:
                group.send(torch.full((n,), step * size + me), (me + 1) % size)
                before = (me - 1) % size
                assert (group.recv((n,), torch.int64, before) == step * size + before).all()
    return steps


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_run_ahead(size):
    assert run_ranks(stumbling, size, 3, 300) == [300] * size


@pytest.mark.slow
@pytest.mark.parametrize("crowded", [True, False])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_that_run_ahead_for_long(size, crowded):
    for seed in range(4):
        assert run_ranks(stumbling, size, seed, 3000, crowded=crowded, timeout=200) == [3000] * size


@pytest.mark.slow
def test_spinning_ranks_on_too_few_cores_still_get_on():
    assert max(run_ranks(many_small, 6, 300, crowded=False, timeout=120)) < 0.05


SCRIPT = """
import sys; sys.path.insert(0, {root!r})
from tests.helpers.rank_spawner import run_ranks
from tests.distributed.test_shared_memory import many_small
run_ranks(many_small, 2, 50)
print("works")
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root to mount another /dev/shm")
@pytest.mark.parametrize("options", ["ro", "rw,size=8k"])
def test_without_a_usable_dev_shm(options):
    mount = f"mount -t tmpfs -o {options} none /dev/shm"
    script = SCRIPT.format(root=str(ROOT))
    command = ["unshare", "-m", "sh", "-c", f'{mount} || exit 77; exec "$0" -c "$1"', sys.executable, script]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    assert done.stdout.strip() == "works", done.stderr


def test_dev_shm_stays_untouched():
    def files() -> set[str]:
        return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()

    before = files()
    with Ranks(many_small, 2, (20,)) as ranks:
        ranks.outcomes()
        assert not any("phalanx" in name or "torch" in name for name in files() - before)

"""The threads that share a kernel's work."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from phalanx.kernels.library import native, use_threads
from phalanx.kernels.pointwise import activate

ROUNDS = 100


def threads_of_mine() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}


@pytest.fixture
def hindered() -> Iterator[None]:
    """A team of two, whose other thread shares this one's core and gets of it what nobody wants."""
    cores = os.sched_getaffinity(0)
    core = min(cores)
    os.sched_setaffinity(0, {core})
    native().set_team_spin(0)
    use_threads(2, [core, core])
    before = threads_of_mine()
    activate("relu", torch.randn(64, 4000))  # they begin with the first use
    (other,) = threads_of_mine() - before
    os.sched_setscheduler(other, os.SCHED_IDLE, os.sched_param(0))
    yield
    use_threads(1)
    native().set_team_spin(50)
    os.sched_setaffinity(0, cores)


@pytest.mark.skipif(sys.platform != "linux", reason="needs what Linux says of threads")
def test_a_thread_that_does_not_come_is_not_waited_for(hindered: None) -> None:
    x = torch.randn(64, 4000)
    began = time.thread_time()
    for _ in range(ROUNDS):
        result = activate("relu", x)
    assert time.thread_time() - began < ROUNDS * 0.001, "spent waiting"
    assert torch.equal(result, torch.relu(x))


def test_more_threads_than_cores_do_each_task_once() -> None:
    """In rounds of many lengths, one after the other."""
    use_threads(8)
    for rows in [*range(1, 200, 3), *range(200, 1, -7)]:
        x = torch.randn(rows, 3000)
        assert torch.equal(activate("relu", x), torch.relu(x))
    use_threads(1)


@pytest.fixture
def team_of_two() -> Iterator[None]:
    use_threads(2)
    yield
    use_threads(1)


def test_callers_on_several_threads_each_get_their_results(team_of_two: None) -> None:
    """Two models in one process, each asked by a thread of its own."""
    wrong: list[int] = []

    def ask() -> None:
        x = torch.randn(8, 3000)
        want = torch.relu(x)
        wrong.append(sum(not torch.equal(activate("relu", x), want) for _ in range(2000)))

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == [0, 0, 0]


def test_a_fork_while_another_thread_computes_has_a_team_of_its_own(team_of_two: None) -> None:
    x, over = torch.randn(64, 3000), threading.Event()
    want = activate("relu", x).numpy().tobytes()

    def compute() -> None:
        while not over.is_set():
            activate("relu", x)

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                use_threads(2)
                os._exit(activate("relu", x).numpy().tobytes() != want)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        over.set()
        thread.join()

"""Every way in which a rank can be lost, told apart and noticed in time; and slow ones, which are not lost.

Faults wait in the ranks of one supervisor: those of a step by its number, others until a file lets them off.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx import env
from phalanx.distributed.mesh import Mesh
from phalanx.executor.base import WorkerDied
from phalanx.executor.hub import HubExecutor
from phalanx.executor.multiprocess import SupervisorProcess
from tests.executors.conftest import KINDS
from tests.helpers.executor_process import ExecutorProcess
from tests.helpers.one_request import generate
from tests.helpers.plans import Run, admission, plan
from tests.helpers.processes import alive, gone_within
from tests.helpers.rank_processes import launcher, mp_executor, pids
from tests.helpers.worker_model import engine_config

BOUND = 1.5
"""Seconds: --hang-timeout of these tests."""

QUICK = 1.5
"""A death is noticed in 0.5 s; a machine with other work may take longer to run whoever notices."""

SLOW = pytest.mark.slow

DEEDS = {
    "kill": (101, "killed by SIGKILL", "killed"),
    "abort": (102, "killed by SIGABRT", "killed"),
    "segfault": (103, "killed by SIGSEGV", "killed"),
    "exit": (104, "ended with status 0", "ended"),
    "raise": (105, "InjectedFault", "failed"),
    "stop": (106, "no progress", "hung"),
    "hold": (107, "no progress", "hung"),
    "spin": (108, "no progress", "hung"),
    "sleep=3": (109, "", ""),
}
SLOW_STEP = 109
POINTS = ("load", "allocate", "computed")


@pytest.fixture(scope="module")
def matches(tmp_path_factory) -> Path:
    """A file `point-rank` here stops that rank when it reaches that point, once."""
    return tmp_path_factory.mktemp("matches")


@pytest.fixture(scope="module")
def faulty(matches) -> Iterator[SupervisorProcess]:
    faults = [f"at=step,rank={r},step={10 * n + r},do={do}" for do, (n, *_) in DEEDS.items() for r in (0, 1)]
    faults += [f"at={at},rank={r},do=stop,file={matches}/{at}-{r}" for at in POINTS for r in (0, 1)]
    with env.changed(PHALANX_FAULT=";".join(faults)):
        process = SupervisorProcess(zygote=True)
        process.start()
    yield process
    process.close()


@pytest.fixture
def config(model):
    return engine_config(model, hang_timeout=BOUND)


def started(faulty, config, mesh: Mesh | None = None) -> HubExecutor:
    executor = mp_executor(faulty, mesh or Mesh(tp=2))
    executor.start(config)
    return executor


@pytest.fixture
def executor(faulty, config) -> Iterator[HubExecutor]:
    executor = started(faulty, config)
    yield executor
    executor.close()


def step(executor, number: int, epoch: int = 0) -> None:
    executor.submit(plan([Run(0, 1)], admit=[admission(0, [1], [0])], release=[], epoch=epoch, step=number)).result()


def lose(executor, do: str, rank: int) -> tuple[WorkerDied, float]:
    """A warm executor's rank meets its fault; what is said about it, and after how long."""
    generate(executor, 3)
    begun = time.monotonic()
    with pytest.raises(WorkerDied) as caught:
        step(executor, 10 * DEEDS[do][0] + rank)
    return caught.value, time.monotonic() - begun


class TestInAStep:
    @pytest.mark.parametrize("rank", [0, 1])
    @pytest.mark.parametrize("do", ["kill", "abort", "segfault", "exit", "raise"])
    def test_the_end_of_a_rank_is_noticed_at_once(self, executor, do, rank):
        died, after = lose(executor, do, rank)
        assert (died.rank, died.kind) == (rank, DEEDS[do][2]) and DEEDS[do][1] in died.cause
        assert after < QUICK and (do == "raise" or 0.001 < died.silent < QUICK)
        tokens = generate_after(executor)
        assert len(tokens) == 10

    @pytest.mark.parametrize(
        ("do", "rank"), [("stop", 1), ("hold", 1), ("spin", 0), pytest.param("stop", 0, marks=SLOW)]
    )
    def test_one_that_hangs_is_lost_within_the_bound(self, executor, do, rank):
        """Whether the system, the interpreter or an endless loop keeps it."""
        hung = pids(executor)[rank]
        bound = executor.hang_bound
        died, after = lose(executor, do, rank)
        assert (died.rank, died.kind) == (rank, "hung") and DEEDS[do][1] in died.cause
        assert died.silent >= BOUND * 0.9
        assert bound == BOUND and BOUND < after < BOUND + 2 * QUICK
        begun = time.monotonic()
        assert len(generate_after(executor)) == 10
        assert time.monotonic() - begun < 5 and not alive(hung)
        assert launcher(executor).started == [0, 1, rank]  # the other one lives on


def generate_after(executor) -> list[int]:
    executor.restart(1)
    return generate(executor, epoch=1)


def test_tokens_are_the_same_after_a_hang(executor):
    want = generate(executor)
    lose(executor, "stop", 1)
    assert generate_after(executor) == want


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=SLOW)])
def test_a_stage_of_a_pipeline(faulty, config, rank):
    executor = started(faulty, config, Mesh(pp=2))
    try:
        died, after = lose(executor, "stop", rank)
        assert (died.rank, died.kind) == (rank, "hung") and after < BOUND + QUICK
        assert len(generate_after(executor)) == 10
    finally:
        executor.close()


def test_between_a_result_and_its_report(executor, matches):
    """The reporter stops when everybody else is done."""
    generate(executor, 3)
    (matches / "computed-0").touch()
    with pytest.raises(WorkerDied) as caught:
        step(executor, 1)
    assert (caught.value.rank, caught.value.kind) == (0, "hung")
    assert len(generate_after(executor)) == 10


def test_one_that_wakes_up_behind_the_fence_commits_nothing_and_ends(executor, monkeypatch):
    """As on a node that could not be reached: nobody killed it, and its place is taken. It finds out by itself."""
    want = generate(executor)
    stopped = pids(executor)[1]
    place = launcher(executor)
    monkeypatch.setattr(place, "kill", lambda rank: None)
    lose(executor, "stop", 1)
    executor.restart(1)
    monkeypatch.undo()
    assert alive(stopped) and stopped not in pids(executor)
    results = [generate(executor, 3, epoch=1)]
    os.kill(stopped, signal.SIGCONT)
    results += [generate(executor, epoch=1) for _ in range(3)]
    assert gone_within(stopped, 5)
    assert results == [want[:3], want, want, want]
    assert {status.state for status in executor.check_health()} == {"ready"}


class TestWhileAnEpochBegins:
    @pytest.mark.parametrize(("point", "rank"), [("load", 1), pytest.param("allocate", 0, marks=SLOW)])
    def test_a_start_is_given_up(self, faulty, config, matches, point, rank):
        """A process that does not answer while it loads has three times as long."""
        executor = mp_executor(faulty, Mesh(tp=2))
        (matches / f"{point}-{rank}").touch()
        begun = time.monotonic()
        with pytest.raises(WorkerDied, match="before it could") as caught:
            executor.start(config)
        assert (caught.value.rank, caught.value.kind) == (rank, "hung")
        assert 3 * BOUND < time.monotonic() - begun < 3 * BOUND + 5
        executor.start(config)
        assert len(generate(executor)) == 10
        executor.close()

    def test_so_is_a_restart_and_the_next_one_works(self, executor, matches):
        want = generate(executor)
        lose(executor, "kill", 1)
        (matches / "allocate-0").touch()
        with pytest.raises(WorkerDied) as caught:
            executor.restart(1)
        assert (caught.value.rank, caught.value.kind) == (0, "hung")
        executor.restart(2)
        assert generate(executor, epoch=2) == want
        assert launcher(executor).started == [0, 1, 1, 0]


class TestSlowIsNotDead:
    def test_a_first_step_may_take_many_bounds(self, faulty, model):
        executor = started(faulty, engine_config(model, hang_timeout=0.5))
        step(executor, 10 * SLOW_STEP + 1)  # 3 s: six times the bound
        executor.close()

    def test_once_steps_are_quick_it_may_not(self, faulty, model):
        executor = started(faulty, engine_config(model, hang_timeout=0.5))
        generate(executor, 3)
        with pytest.raises(WorkerDied, match="no progress"):
            step(executor, 10 * SLOW_STEP + 1)
        executor.close()

    def test_idle_for_many_bounds(self, faulty, model):
        executor = started(faulty, engine_config(model, hang_timeout=1.0))
        want = generate(executor)
        time.sleep(4)
        assert not executor._vigilant  # nobody looks, and nobody is asked
        assert generate(executor) == want
        executor.close()

    def test_a_result_that_nobody_fetches(self, faulty, model):
        executor = started(faulty, engine_config(model, hang_timeout=1.0))
        generate(executor, 3)
        pending = executor.submit(plan([Run(0, 1)], admit=[admission(0, [1], [0])], step=1))
        time.sleep(3)
        assert pending.result().step_id == 1
        executor.close()

    @pytest.mark.skipif(not os.access("/sys/fs/cgroup/cpu/cgroup.procs", os.W_OK), reason="needs cgroup v1 and root")
    def test_a_worker_with_a_tenth_of_a_core(self, faulty, config):
        executor = started(faulty, config)
        want = generate(executor)
        with tenth_of_a_core(pids(executor)[1]):
            assert generate(executor) == want
            prompt = admission(0, [5] * 70, list(range(20)))
            executor.submit(plan([Run(0, 70)], admit=[prompt])).result()
        executor.close()


@contextlib.contextmanager
def tenth_of_a_core(pid: int) -> Iterator[None]:
    group = Path(f"/sys/fs/cgroup/cpu/phalanx-{os.getpid()}-{pid}")
    group.mkdir()
    try:
        (group / "cpu.cfs_quota_us").write_text("10000")
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for member in (group / "cgroup.procs").read_text().split():
            Path("/sys/fs/cgroup/cpu/cgroup.procs").write_text(member)
        group.rmdir()


def test_progress_is_seen_while_loading_and_computing(executor):
    seen = [executor.progress]
    for _ in range(3):
        generate(executor, 2)
        seen.append(executor.progress)
    assert seen == sorted(set(seen))


@SLOW
def test_an_actor_of_ray(warm, model):
    """Stopped while nothing was to be done, it is found out when there is."""
    executor = KINDS["ray-tp2"].make(warm)
    executor.start(engine_config(model, hang_timeout=BOUND))
    want, stopped = generate(executor), pids(executor)[1]
    os.kill(stopped, signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(WorkerDied) as caught:
        step(executor, 1)
    assert (caught.value.rank, caught.value.kind) == (1, "hung")
    assert time.monotonic() - begun < 12 * BOUND + QUICK
    executor.restart(1)
    assert generate(executor, epoch=1) == want and not alive(stopped)
    executor.close()


@SLOW
def test_the_engine_itself_is_stopped_for_a_while(model):
    """Time in which nobody looked is not held against the ranks."""
    with ExecutorProcess({"model": str(model), "tensor_parallel_size": 2, "hang_timeout": 0.5}) as process:
        process.ready()
        want = process.ask("generate")
        for pause in (0.005, 0.01, 0.02, 0.03):
            stopper = threading.Timer(pause, process.process.send_signal, [signal.SIGSTOP])
            waker = threading.Timer(pause + 1.5, process.process.send_signal, [signal.SIGCONT])
            stopper.start()
            waker.start()
            assert process.ask("generate") == want
            waker.join()
        process.ask("close")

"""Ranks that cannot be started again: the model is split anew over the places that are left, the tokens stay the same,
and what has come back is taken in again when nobody is waiting."""

from __future__ import annotations

import os
import signal

import pytest

from phalanx.distributed.mesh import Mesh
from phalanx.engine import recovery
from phalanx.engine.resolution import splitter
from phalanx.errors import Recovering
from phalanx.executor import seating
from phalanx.executor.base import NoCapacity, WorkerDied
from phalanx.executor.hub import HubExecutor
from phalanx.executor.launcher import Layout
from phalanx.executor.seating import Choice, NoFit, Seat
from tests.helpers.processes import wait_until
from tests.helpers.rank_processes import Launcher, pids, requests, serve, start_engine, undisturbed
from tests.helpers.worker_model import HEAD_DIM, KV_HEADS, LAYERS, engine_config

WANTED = requests(5)
KV_BYTES_PER_TOKEN = LAYERS * 2 * KV_HEADS * HEAD_DIM * 4


class Shaky(Launcher):
    """Processes in broken seats are killed as soon as they start."""

    def __init__(self, supervisor, world_size: int):
        super().__init__(supervisor, world_size)
        self.broken: set[int] = set()
        self.on_start = self._spoil
        self.lives: list[int] = []
        """The seat of each start."""

    def _spoil(self, rank: int, pid: int) -> None:
        self.lives.append(self._seats[rank])
        if self._seats[rank] in self.broken:
            os.kill(pid, signal.SIGKILL)

    def break_seat(self, executor: HubExecutor, rank: int) -> None:
        """For good, and what runs there is killed."""
        self.broken.add(self._seats[rank])
        os.kill(pids(executor)[rank], signal.SIGKILL)


@pytest.fixture(scope="module")
def expected(rank_model):
    return undisturbed(engine_config(rank_model), WANTED)


@pytest.fixture
def quick(monkeypatch):
    """Places are tried again soon."""
    monkeypatch.setattr(seating, "REST_S", 0.5)


@pytest.fixture
def engine_of(supervisor, rank_model):
    engines = []

    def make(mesh: Mesh, choose=None, **options):
        widths = ",".join(map(str, mesh.widths))
        config = engine_config(
            rank_model, tensor_parallel_size=mesh.tp, pipeline_parallel_size=mesh.pp,
            pipeline_tensor_sizes=widths if mesh.stage_tp else None, **options,
        )  # fmt: skip
        launcher = Shaky(supervisor, mesh.world_size)
        executor = HubExecutor(launcher, Layout(mesh), choose=choose or splitter(config))
        engines.append(start_engine(executor, config))
        return engines[-1], executor, launcher

    yield make
    for engine in engines:
        engine.close()


def shape(executor: HubExecutor) -> list[tuple[str, int]]:
    return [(status.layers, status.heads) for status in executor.check_health()]


@pytest.mark.recovery
def test_three_ranks_then_two_then_one(engine_of, expected):
    engine, executor, launcher = engine_of(Mesh(tp=3))
    shapes = []

    def each(steps: int, tokens: int) -> None:
        if (tokens >= 20 and not launcher.broken) or (tokens >= 70 and len(launcher.broken) == 1):
            shapes.append(len(pids(executor)))
            launcher.break_seat(executor, 0)

    served = serve(engine, WANTED, each)
    assert (served.tokens, served.errors) == (expected, {})
    assert shapes == [3, 2]
    assert shape(executor) == [("0-3", 6)]
    assert launcher.lives[-1] == 2, "the only seat that is left"
    assert engine.status().state == "ready"


@pytest.mark.recovery
def test_a_stage_keeps_what_it_has_left(engine_of, expected):
    engine, executor, launcher = engine_of(Mesh(tp=2, pp=2))

    def each(steps: int, tokens: int) -> None:
        if steps == 10:
            launcher.break_seat(executor, 1)

    served = serve(engine, WANTED, each)
    assert (served.tokens, served.errors) == (expected, {})
    assert [heads for _, heads in shape(executor)] == [6, 3, 3]
    assert executor.max_in_flight == 2


@pytest.mark.recovery
def test_a_stage_that_has_lost_all_is_dropped(engine_of, expected):
    engine, executor, launcher = engine_of(Mesh(pp=2))
    assert executor.max_in_flight == 2

    def each(steps: int, tokens: int) -> None:
        if steps == 10:
            launcher.break_seat(executor, 0)

    served = serve(engine, WANTED, each)
    assert (served.tokens, served.errors) == (expected, {})
    assert shape(executor) == [("0-3", 6)]
    assert executor.max_in_flight == 1


@pytest.mark.recovery
def test_what_comes_back_is_taken_in_when_nobody_waits(engine_of, expected, quick):
    engine, executor, launcher = engine_of(Mesh(tp=2))

    def each(steps: int, tokens: int) -> None:
        if steps == 10:
            launcher.break_seat(executor, 1)

    assert serve(engine, WANTED, each).tokens == expected
    assert len(pids(executor)) == 1
    # It is tried in vain, and what was there before goes on.
    assert wait_until(lambda: executor.wants_restart is not None, 30)
    assert "1 more place on " in (executor.wants_restart or "")
    epoch = engine.status().epoch
    executor.restart(epoch + 10)
    assert len(pids(executor)) == 1 and executor.wants_restart is None
    launcher.broken.clear()
    assert wait_until(lambda: executor.wants_restart is not None, 30)
    executor.restart(epoch + 12)
    assert len(pids(executor)) == 2 and executor.wants_restart is None


def test_a_model_that_does_not_fit_what_is_left_waits(engine_of, expected, monkeypatch):
    def choose(seats: list[Seat]) -> Choice:
        raise NoFit("3.0 GiB of memory more on each of 1 devices")

    monkeypatch.setattr(seating, "REST_S", 600.0)
    _, executor, launcher = engine_of(Mesh(tp=2), choose)
    survivor = pids(executor)[0]
    launcher.break_seat(executor, 1)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        executor.restart(1)
    with pytest.raises(NoCapacity) as caught:
        executor.restart(2)
    assert caught.value.rank == 1 and caught.value.missing == "3.0 GiB of memory more on each of 1 devices"
    launcher.broken.clear()
    with pytest.raises(NoCapacity):
        executor.restart(3)  # it is left alone for a while
    executor._seating._resting.clear()  # the while is over
    executor.restart(4)
    assert pids(executor)[0] == survivor, "it has kept its weights"
    assert len(pids(executor)) == 2


@pytest.mark.recovery
def test_accepted_requests_wait_for_what_is_missing(engine_of, expected, quick, monkeypatch):
    monkeypatch.setattr(recovery, "CAPACITY_S", 0.3)

    def choose(seats: list[Seat]) -> Choice:
        raise NoFit("a second GPU")

    engine, executor, launcher = engine_of(Mesh(tp=2), choose)
    waited = []

    def each(steps: int, tokens: int) -> None:
        if steps == 10:
            launcher.break_seat(executor, 1)
        now = engine.status().recovery
        if now is not None and now.plan == "wait" and launcher.broken:
            assert now.missing == "a second GPU"
            waited.append(tokens)
            launcher.broken.clear()

    served = serve(engine, WANTED, each)
    assert (served.tokens, served.errors) == (expected, {})
    assert waited and engine.status().state == "ready"
    assert [done.plan for done in engine.status().recoveries] == ["restart"]


@pytest.mark.recovery
def test_memory_that_ran_out_makes_the_next_cache_smaller(engine_of, expected):
    """Halved each time, as long as it holds one request; then the place is given up like any other."""
    engine, executor, launcher = engine_of(Mesh(tp=2), max_model_len=64)
    whole = engine.status().blocks
    cause, least = launcher.cause, 64 // 4

    def blame_memory(rank: int, wait: float = 0.0) -> str | None:
        found = cause(rank, wait)
        return found and found + " (out of memory: the kernel ended it)"

    launcher.cause = blame_memory
    sizes = []
    while not sizes or sizes[-1] > least:
        os.kill(pids(executor)[1], signal.SIGKILL)
        served = serve(engine, requests(2, tokens=8))
        assert served.tokens == {name: expected[name][:8] for name in ("r0", "r1")}
        sizes.append(engine.status().blocks)
    assert sizes == [max(least, whole >> n) for n in range(1, len(sizes) + 1)]
    assert engine.status().failures == {"out_of_memory": len(sizes)}


@pytest.mark.recovery
def test_room_for_shorter_requests_only(engine_of, expected):
    """A layout that holds less than --max-model-len: what fits goes on, what does not waits for the place's return."""

    def choose(seats: list[Seat]) -> Choice:
        return Choice(Layout(Mesh()), (seats[0].number,), longest=40)

    cache = 80 * KV_BYTES_PER_TOKEN // 2  # per rank: for 80 tokens over two ranks, for 40 on one
    engine, executor, launcher = engine_of(Mesh(tp=2), choose, kv_cache_memory_bytes=cache)
    launcher.break_seat(executor, 1)
    served = serve(engine, WANTED[:1])
    assert served.tokens["r0"] == expected["r0"]
    assert len(pids(executor)) == 1
    with pytest.raises(Recovering, match="since workers were lost"):
        engine.add(requests(1, prompt=40, tokens=20)[0])

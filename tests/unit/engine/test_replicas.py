"""What several that load at the same time look like as one, and where each runs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phalanx import env
from phalanx.config import ParallelConfig
from phalanx.engine.replicas import Replicas, SharedProgress
from phalanx.executor.multiprocess import place_ranks

PHASES = ("weights", "kv cache", "warm-up")


@given(st.lists(st.integers(0, 3), min_size=1, max_size=200))
def test_progress_never_goes_back_and_ends_with_the_last(order) -> None:
    seen: list[tuple[int, float]] = []
    shared = SharedProgress(lambda phase, share, _: seen.append((PHASES.index(phase), share)), 4)
    at = [0] * 4
    steps = [(phase, share / 4) for phase in PHASES for share in range(5)]
    for number in [*order, *(n for n in range(4) for _ in steps)]:
        if at[number] < len(steps):
            shared(number, *steps[at[number]], "")
            at[number] += 1
    assert seen == sorted(seen)
    assert seen[-1] == (2, 1.0)


def test_progress_says_who_is_how_far() -> None:
    seen: list[tuple[str, float, str]] = []
    alone = SharedProgress(lambda *told: seen.append(told), 1)
    alone(0, "weights", 0.5, "rank 0 80%, rank 1 20%")
    several = SharedProgress(lambda *told: seen.append(told), 2)
    several(1, "weights", 0.5, "rank 0 80%, rank 1 20%")
    assert seen == [
        ("weights", 0.5, "rank 0 80%, rank 1 20%"),
        ("weights", 0.25, "replica 0 0%, replica 1 50%"),
    ]


def test_the_only_one_is_not_pinned() -> None:
    (only,) = Replicas(ParallelConfig()).first
    assert (only._cores, only._threads) == ((), 0)


def test_several_share_the_cores() -> None:
    several = Replicas(ParallelConfig(data_parallel_size=2))
    assert [(each._cores, each._threads) for each in several.first] == place_ranks(2)
    assert len(several.makers) == 2


def test_threads_are_no_more_than_the_share_and_the_users_wish(monkeypatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "OMP_NUM_THREADS" not in env.for_engine()
    assert env.for_engine(3)["OMP_NUM_THREADS"] == "3"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert env.for_engine(3)["OMP_NUM_THREADS"] == "2"
    assert env.for_engine(1)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "2,3")
    assert env.for_engine(2)["OMP_NUM_THREADS"] == "2"

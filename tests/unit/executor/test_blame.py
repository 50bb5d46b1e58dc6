"""Whom a broken epoch is blamed on, and how long better words are waited for."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from phalanx.errors import PhalanxError
from phalanx.executor.base import WorkerDied
from phalanx.executor.blame import failure
from phalanx.executor.members import Member


class Launcher:
    """Knows only what it is told here."""

    def __init__(self, **causes: str):
        self.causes = causes
        self.waits: dict[int, float] = {}

    def cause(self, rank: int, wait: float = 0.0) -> str | None:
        self.waits[rank] = wait
        return self.causes.get(f"rank{rank}")


def lost(rank: int, why: str, *, unreachable: bool) -> Member:
    member = Member(rank)
    member.join = SimpleNamespace(host=f"host{rank}")  # type: ignore[assignment]
    member.lost, member.why, member.unreachable = True, why, unreachable
    return member


def blamed(launcher: Launcher, *members: Member) -> PhalanxError:
    return failure(members, launcher, threading.Condition(), None, "no idea")  # type: ignore[arg-type]


@pytest.mark.parametrize("unreachable", [True, False])
def test_nobody_waits_for_words_from_a_node_that_is_silent(unreachable: bool) -> None:
    """Those would not come, and every tenth of a second counts: a stream waits."""
    launcher = Launcher()
    error = blamed(launcher, lost(1, "it has not answered for 2.4 s", unreachable=unreachable))
    assert isinstance(error, WorkerDied) and (error.rank, error.node) == (1, "host1")
    assert error.cause == "it has not answered for 2.4 s"
    wait = launcher.waits[1]
    assert 0 < wait < 0.1 if unreachable else wait > 0.4


def test_several_that_are_lost_share_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    class Slow(Launcher):
        def cause(self, rank: int, wait: float = 0.0) -> str | None:
            nonlocal now
            now += wait
            return super().cause(rank, wait)

    monkeypatch.setattr("phalanx.executor.blame.time", SimpleNamespace(monotonic=lambda: now))
    blamed(Slow(), *(lost(rank, "its connection ended", unreachable=False) for rank in range(8)))
    assert now <= 0.5


def test_what_the_launcher_knows_says_most() -> None:
    first, second = (lost(rank, "it is silent", unreachable=True) for rank in (0, 1))
    error = blamed(Launcher(rank1="its node was ended"), first, second)
    assert isinstance(error, WorkerDied) and (error.rank, error.cause) == (1, "its node was ended")

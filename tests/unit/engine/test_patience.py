"""When an engine process counts as hung. Time passes in looks of the front end."""

import pytest

from phalanx.engine.patience import FIRST_STEPS, LOOK_S, MARGIN_S, SILENCE_S, Patience


class Watched:
    """A front end that looks on time, and an engine that does what it is told to."""

    def __init__(self, hang_timeout: float = 10.0):
        self.now = 100.0
        self.turns = self.progress = 0
        self.patience = Patience(hang_timeout, self.now)

    def beat(self, *, turns: int = 0, progress: int = 0, bound: float = 0.0, warm: bool = True) -> None:
        self.turns += turns
        self.progress += progress
        self.patience.heard(self.now)
        self.patience.moved(self.turns, self.progress, hang_bound=bound, warm=warm)

    def pass_time(self, seconds: float, **beats) -> str | None:
        """The first complaint; with `beats`, the engine beats every quarter of a second."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now += LOOK_S
            if beats:
                self.beat(**beats)
            if (complaint := self.patience.look(self.now)) is not None:
                return complaint
        return None


def test_one_that_beats_and_moves_is_well_for_ever():
    watched = Watched()
    assert watched.pass_time(3600, turns=1) is None
    assert watched.pass_time(3600, progress=1) is None


def test_silence():
    watched = Watched()
    watched.beat(turns=1)
    assert watched.pass_time(SILENCE_S) is None
    assert watched.pass_time(1) == "it has not answered for 3.2 s"


def test_one_that_is_often_late_is_given_time_but_no_more_than_the_bound():
    watched = Watched(hang_timeout=10.0)
    watched.beat(turns=1)
    assert watched.pass_time(2.0) is None
    watched.beat(turns=1)
    assert watched.pass_time(9.9) is None
    assert watched.pass_time(0.5) is not None


def test_a_front_end_that_was_stopped_itself_blames_nobody():
    watched = Watched()
    watched.beat(turns=1)
    watched.now += 3600
    assert watched.patience.look(watched.now) is None
    assert watched.patience.silent < 1


@pytest.mark.parametrize("warm", [True, False])
def test_one_that_beats_but_gets_nothing_done(warm):
    watched = Watched(hang_timeout=10.0)
    watched.beat(turns=1, warm=warm)
    bound = 10.0 if warm else 10.0 * FIRST_STEPS
    assert watched.patience.hang_bound == bound
    assert watched.pass_time(bound, warm=warm) is None
    assert watched.pass_time(1, warm=warm) == f"it has made no progress for {bound:.0f} s"


def test_slow_steps_are_no_hang():
    watched = Watched(hang_timeout=10.0)
    for _ in range(5):
        watched.beat(turns=1)
        assert watched.pass_time(4.0, progress=0) is None
    watched.beat(turns=1)
    assert watched.pass_time(35.0, progress=0) is None
    assert watched.pass_time(10.0, progress=0) is not None


def test_an_executor_that_watches_notices_first():
    watched = Watched(hang_timeout=10.0)
    watched.beat(turns=1, bound=20.0)
    assert watched.patience.hang_bound == 20.0
    assert watched.pass_time(20.0 + MARGIN_S, bound=20.0) is None
    assert watched.pass_time(1.0, bound=20.0) is not None

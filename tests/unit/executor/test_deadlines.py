"""Who hangs and who is only slow, with a clock that tests turn."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from phalanx.executor.deadlines import Awaited, Bounds, Verdict, Vigil, asks_every, join_bound
from phalanx.executor.death import kind_of

FLOOR = 10.0
TICK = asks_every(FLOOR)


@dataclass
class Ranks:
    """Ranks that answer at each tick what `say` returns for them (None: nothing), watched until somebody hangs."""

    count: int = 2
    floor: float = FLOOR
    now: float = 100.0
    log: list[Verdict] = field(default_factory=list)

    def __post_init__(self):
        self.vigil = Vigil(Bounds(self.floor))
        self.asked = 0

    def wait(self, seconds, say, *, what="a step", tokens=1, loading=False, ranks=None, stirs=False) -> Verdict | None:
        """So many seconds of looking, or until a verdict. `say(rank, since)` is (count, waits for) or None."""
        begun, tick = self.now, asks_every(self.floor)
        awaited = Awaited(what, tokens, loading, tuple(ranks or range(self.count)))
        while self.now - begun < seconds:
            verdict = self.vigil.look(awaited, self.now)
            if verdict is not None:
                return verdict
            due = self.vigil.ask(self.now)
            self.asked += len(due)
            self.now += tick
            for rank in awaited.ranks if stirs else ():
                self.vigil.heard(rank, self.now)
            for rank in due:
                pong = say(rank, self.now - begun)
                if pong is not None:
                    self.vigil.answered(rank, *pong, self.now)
        return None

    def work(self, *steps: int) -> None:
        """Steps of so many tokens are done quickly."""
        for tokens in steps:
            assert self.wait(TICK, lambda *_: None, what=object(), tokens=tokens) is None
            self.vigil.bounds.done(tokens)


def busy(rank, since):
    return int(since * 100), ""


@pytest.fixture
def steady():
    ranks = Ranks()
    ranks.work(16, 1, 1)
    return ranks


def test_short_steps_are_not_asked_about(steady):
    steady.work(*[1] * 50)
    assert steady.asked == 0


class TestSilence:
    def test_one_that_does_not_answer_is_lost_after_the_floor(self, steady):
        verdict = steady.wait(60, lambda rank, since: (1, "rank 1") if rank == 0 else None)
        assert (verdict.rank, verdict.lost) == (1, (1,))
        assert FLOOR <= verdict.silent <= FLOOR + 3 * TICK
        assert kind_of(verdict.cause) == "hung"

    def test_from_when_it_falls_silent(self, steady):
        verdict = steady.wait(60, lambda rank, since: (int(since * 9), "") if rank == 0 or since < 20 else None)
        assert verdict.lost == (1,) and FLOOR <= verdict.silent <= FLOOR + 3 * TICK
        assert steady.now - 100 < 20 + FLOOR + 5 * TICK

    def test_all_at_once(self, steady):
        assert steady.wait(60, lambda *_: None).lost == (0, 1)

    def test_in_a_first_step_it_is_one_floor_and_while_loading_three(self):
        assert Ranks().wait(60, lambda *_: None).silent < 1.2 * FLOOR
        silent = Ranks().wait(100, lambda *_: None, tokens=None, loading=True).silent
        assert 3 * FLOOR <= silent < 3.2 * FLOOR

    def test_a_long_message_on_its_way_is_an_answer(self, steady):
        assert steady.wait(60, lambda *_: None, stirs=True) is None


class TestNoProgress:
    def test_one_that_only_answers_is_lost_after_the_floor(self, steady):
        verdict = steady.wait(60, lambda rank, since: (7, "rank 1" if rank == 0 else ""))
        assert (verdict.rank, verdict.lost) == (1, (1,))
        assert FLOOR < verdict.silent < FLOOR + 3 * TICK

    def test_whom_the_others_wait_for(self, steady):
        """In a step that has gone on for long already."""
        verdict = steady.wait(200, lambda rank, since: (min(int(since), 50), ("", "rank 0")[rank]))
        assert verdict.lost == (0,) and 160 <= steady.now < 160 + 10

    def test_of_two_it_is_not_known_which(self, steady):
        verdict = steady.wait(60, lambda rank, since: (7, ""))
        assert verdict.lost == () and "rank 1" in verdict.cause

    def test_all_wait_for_each_other(self, steady):
        verdict = steady.wait(60, lambda rank, since: (7, f"rank {1 - rank}"))
        assert verdict.lost == () and verdict.rank == 0
        assert "rank 0 for rank 1, rank 1 for rank 0" in verdict.cause and kind_of(verdict.cause) == "hung"

    def test_one_that_moves_slowly_is_fine(self, steady):
        assert steady.wait(300, lambda rank, since: (int(since / 9), ("", "rank 0")[rank])) is None

    def test_the_first_step_may_take_its_time(self):
        assert Ranks().wait(110, lambda rank, since: (0, ("", "rank 0")[rank])) is None
        assert Ranks().wait(130, lambda rank, since: (0, ("", "rank 0")[rank])).lost == (0,)

    def test_so_may_the_first_with_many_more_tokens(self, steady):
        def slow(rank, since):
            return int(since / 60), ("", "rank 0")[rank]

        assert steady.wait(180, slow, tokens=2048) is None
        steady.vigil.bounds.done(2048)
        assert steady.wait(180, slow, what="another", tokens=2048) is None
        assert steady.wait(180, slow, what="a small one", tokens=4) is not None

    def test_loading_takes_longer_still(self):
        still = dict(tokens=None, ranks=(0,))
        assert Ranks().wait(290, lambda *_: (0, ""), loading=True, **still) is None
        assert Ranks().wait(310, lambda *_: (0, ""), loading=True, **still).lost == (0,)

    def test_a_slow_worker_is_given_more(self, steady):
        """Pauses of 5 s were seen: then one of 50 s is no reason, though it is five floors."""

        def pauses(seconds):
            return lambda rank, since: (int(since / seconds), ("", "rank 0")[rank])

        for step in range(20):
            assert steady.wait(25, pauses(5), what=step) is None
            steady.vigil.bounds.done(1)
        assert steady.vigil.bounds.steady() > 60
        assert steady.wait(55, pauses(50), what="slower") is None

    def test_answers_that_come_late_are_no_progress(self, steady):
        """An endless loop also keeps the thread that answers from its turn."""
        late = {0: 0}

        def say(rank, since):
            late[0] += 1
            return (7, "") if rank == 0 and late[0] % 4 == 0 else (7, "rank 0") if rank else None

        assert steady.wait(60, say).silent < 1.5 * FLOOR

    def test_what_was_slow_once_is_forgotten(self, steady):
        steady.vigil.bounds.paused(1, 9.0)
        assert steady.vigil.bounds.steady() == 180
        steady.work(*[1] * 40)
        assert steady.vigil.bounds.steady() == FLOOR


class TestTheWatcherItself:
    def test_time_in_which_it_did_not_look_does_not_count(self, steady):
        """It was stopped for an hour; nobody hangs because of that."""
        say = {0: (1, ""), 1: (1, "rank 0")}
        assert steady.wait(5, lambda rank, since: say[rank]) is None
        steady.now += 3600
        assert steady.wait(4, lambda rank, since: say[rank]) is None
        verdict = steady.wait(20, lambda rank, since: say[rank])
        assert verdict.lost == (0,) and verdict.silent < FLOOR + 5 * TICK

    def test_idle_for_an_hour(self, steady):
        steady.vigil.rest()
        steady.now += 3600
        assert steady.wait(FLOOR - 1, lambda *_: None, what="after an hour") is None

    def test_a_new_epoch_knows_no_step(self, steady):
        assert not steady.vigil.bounds.first(16)
        steady.vigil.bounds.begin()
        assert steady.vigil.bounds.first(1)


def test_everything_scales_with_the_floor():
    small = Ranks(floor=0.5)
    assert small.wait(60, lambda *_: None).silent < 0.8
    assert 5.9 < Ranks(floor=0.5).wait(60, lambda *_: (0, "")).silent < 6.5
    assert asks_every(0.5) == 0.05 and asks_every(60) == 0.5
    assert join_bound(0.5) == 60 and join_bound(10) == 120


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        ("it was killed by SIGKILL", "killed"),
        ("it was killed by SIGABRT before it could load the model", "killed"),
        ("it was killed by SIGKILL (out of memory: the kernel ended it)", "out_of_memory"),
        ("Ray's memory monitor ended it, because host1 was running out of memory (…)", "out_of_memory"),
        ("it ended with status 0", "ended"),
        ("it ended with its supervisor: it was killed by SIGKILL", "killed"),
        ("its connection ended", "network"),
        ("it has not answered for 2.6 s: the network or its node is down", "network"),
        ("its node host1 is gone: Ray lost it", "network"),
        ("node 1 (host1, 10.0.0.1) was lost, with rank 1: nothing has come from it for 3 s", "network"),
        ("node 1 was lost, with rank 1: it has said nothing for 12 s, though its network answers: it hangs", "hung"),
        ("node 1 was lost, with rank 1: it was ended there by SIGTERM", "ended"),
        ("its actor's process on host1 was killed or crashed; Ray saw its connection end", "killed"),
        ("its actor was ended by ray.kill", "killed"),
        ("it showed no progress for 10 s", "hung"),
        ("it does not respond", "hung"),
        ("ValueError: shapes differ", "failed"),
    ],
)
def test_kinds_of_causes(cause, kind):
    assert kind_of(cause) == kind

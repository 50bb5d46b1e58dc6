"""What is an event, by example, and the pauses between tries."""

from __future__ import annotations

import math

import pytest

from phalanx.cluster.health import execute, memory_in_use
from phalanx.cluster.health_state import ActorSight, HealthLimits, HealthState, Look, NodeSight

A, B = NodeSight("alpha"), NodeSight("beta")


def kinds(events) -> list[tuple[str, bool]]:
    return [(event.kind, event.over) for event in events]


def test_nodes_that_come_and_go():
    state = HealthState()
    assert state.look(Look({"a": A}), 1) == [], "the first look is the beginning"
    (joined,) = state.look(Look({"a": A, "b": B}), 2)
    assert (joined.kind, joined.subject, joined.message, joined.time) == (
        "node_joined",
        "b",
        "Node beta (b) has joined.",
        2,
    )
    (lost,) = state.look(Look({"a": A}), 3)
    assert (lost.kind, lost.message) == ("node_lost", "Node beta (b) is lost.")
    assert state.look(Look({"a": A}), 4) == []


def test_actors_that_end():
    state = HealthState()
    one, two = ActorSight("Worker (pid 7)", "a"), ActorSight("Worker (pid 8)", "b")
    state.look(Look({"a": A, "b": B}, {"1": one, "2": two}), 1)
    (event,) = state.look(Look({"a": A, "b": B}, {}, {"1": "it was killed"}), 2)
    assert (event.kind, event.subject) == ("actor_lost", "1"), "the other one ended on purpose"
    assert event.message == "Actor Worker (pid 7) on alpha is lost: it was killed."


def test_what_lasts_is_told_once_when_it_begins_and_once_when_it_is_over():
    state = HealthState(HealthLimits(link_s=0.2, looks=2))
    told = []
    for link in (0.01, 0.5, 0.01, 0.5, 0.3, 0.15, 0.5, math.inf, 0.05, 0.05):
        told.append(kinds(state.look(Look({"a": NodeSight("alpha", link_s=link)}), 0)))
    assert told[:4] == [[]] * 4, "once is not enough"
    assert told[4:] == [[("link_slow", False)], [], [], [], [("link_slow", True)], []]


def test_memory_and_words():
    state = HealthState(HealthLimits(memory=0.9, looks=1))
    (high,) = state.look(Look({"a": NodeSight("alpha", memory=0.93)}), 0)
    assert (high.kind, high.message) == ("memory_high", "alpha uses 93% of its memory.")
    assert state.look(Look({"a": NodeSight("alpha", memory=0.87)}), 0) == [], "not yet"
    (over,) = state.look(Look({"a": NodeSight("alpha", memory=0.8)}), 0)
    assert over.over and over.message == "alpha has memory again: 80% in use."
    state.look(Look({"a": NodeSight("alpha", link_s=math.inf)}), 0)
    slow = HealthState(HealthLimits(looks=1)).look(Look({"a": NodeSight("alpha", link_s=math.inf)}), 0)
    assert slow[0].message == "The link to alpha is slow: it cannot be reached."


def test_no_capacity():
    state = HealthState()
    waits = Look({"a": A}, waiting=frozenset(["placement group x"]))
    assert state.look(waits, 0) == []
    assert [e.message for e in state.look(waits, 1)] == ["No room: placement group x"]
    assert state.look(waits, 2) == []
    (over,) = state.look(Look({"a": A}), 3)
    assert over.over and over.message == "No longer: placement group x"


def test_a_node_that_is_gone_has_no_slow_link():
    state = HealthState(HealthLimits(looks=1))
    state.look(Look({"a": A, "b": NodeSight("beta", link_s=9)}), 0)
    assert kinds(state.look(Look({"a": A}), 1)) == [("node_lost", False)]
    assert kinds(state.look(Look({"a": A, "b": NodeSight("beta", link_s=9)}), 2)) == [
        ("node_joined", False),
        ("link_slow", False),
    ]


class TestTries:
    def test_pauses_grow_and_the_last_error_is_raised(self):
        pauses: list[float] = []

        def attempt():
            raise OSError("no")

        with pytest.raises(OSError, match="no"):
            execute(attempt, 8, lambda error: True, pauses.append, lambda: 1.0)
        assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5])
        pauses.clear()
        with pytest.raises(OSError, match="no"):
            execute(attempt, 2, lambda error: True, pauses.append, lambda: 0.0)
        assert pauses == pytest.approx([0.05, 0.1])

    def test_what_is_not_worth_it_is_raised_at_once(self):
        calls = []

        def attempt():
            calls.append(1)
            raise OSError("no")

        with pytest.raises(OSError, match="no"):
            execute(attempt, 3, lambda error: False, lambda pause: None)
        assert len(calls) == 1

    def test_success_after_failures(self):
        left = [OSError(), OSError()]

        def attempt():
            if left:
                raise left.pop()
            return 5

        assert execute(attempt, 3, lambda error: True, lambda pause: None) == 5


def test_memory_of_this_machine():
    assert 0.0 < memory_in_use() < 1.0

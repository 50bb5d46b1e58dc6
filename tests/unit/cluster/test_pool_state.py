"""The pool's pure core, by example and against a model through random gets, releases, crashes, hangs and scalings."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from phalanx.cluster.pool_state import READY, SILENT, STARTING, WAITING, Action, Do, PoolLimits, PoolState

LIMITS = PoolLimits(
    probe_interval=1, silent_after=2, hang_timeout=10, start_timeout=60, restarts=3, window=100, backoff=1
)


def pool(size: int, now: float = 0.0, nodes: str = "") -> PoolState:
    """With all of its actors started."""
    state = PoolState(LIMITS)
    for action in state.scale(size, now):
        state.started(action.index, action.life, now, nodes[action.index] if nodes else "n")
    return state


class TestChoice:
    def test_the_least_loaded_is_handed_out(self):
        state = pool(3)
        assert [state.get(0) for _ in range(4)] == [0, 1, 2, 0]
        state.release(1, 0)
        assert state.get(0) == 1

    def test_work_counts_and_not_the_number_of_hand_outs(self):
        state = pool(2)
        assert state.get(0, work=10) == 0
        assert [state.get(0, work=1) for _ in range(5)] == [1] * 5

    def test_equal_ones_take_turns(self):
        state = pool(3)
        order = []
        for _ in range(6):
            index = state.get(0)
            order.append(index)
            state.release(index, 0)
        assert order == [0, 1, 2, 0, 1, 2]

    def test_among_equals_the_quieter_node(self):
        state = pool(4, nodes="aabb")
        assert state.get(0) == 0
        assert state.get(0) == 2, "node b has no work yet"

    def test_what_others_do_on_a_node_counts(self):
        assert pool(2, nodes="ab").get(0, node_load={"a": 0.9, "b": 0.1}) == 1

    def test_among_equals_the_own_node(self):
        assert pool(2, nodes="ab").get(0, home="b") == 1
        state = pool(2, nodes="ab")
        state.get(0, home="b")
        assert state.get(0, home="b") == 0, "load goes before locality"

    def test_none_without_a_healthy_one(self):
        assert PoolState(LIMITS).get(0) is None

    def test_releasing_what_nobody_has(self):
        state = pool(1)
        for index in (0, 7):
            with pytest.raises(KeyError):
                state.release(index, 0)


class TestHealth:
    def test_a_silent_actor_gets_no_work_and_comes_back(self):
        state = pool(2)
        assert state.tick(1) == [Action(Do.PROBE, 0, 1), Action(Do.PROBE, 1, 1)]
        state.answered(1, 1, 1.1)
        assert state.tick(3.5) == [Action(Do.PROBE, 1, 1)]
        assert state.places[0].state == SILENT
        assert [state.get(3.5), state.get(3.5)] == [1, 1]
        state.answered(0, 1, 4)
        assert state.get(4) == 0

    def test_a_hung_one_is_killed_and_replaced(self):
        state = pool(1)
        state.tick(1)
        state.tick(4)
        assert state.tick(11.5) == [Action(Do.KILL, 0, 1)]
        assert state.tick(11.5) == [Action(Do.START, 0, 2)]
        assert "did not answer" in state.places[0].cause
        state.answered(0, 1, 12)
        state.started(0, 1, 12)
        assert state.crashed(0, 1, 12) == [] and state.useless(0, 1, 12) == []
        assert state.places[0].state == STARTING, "what came late was another life's"

    def test_one_who_looks_rarely_kills_nobody_for_it(self):
        state = pool(1)
        assert state.tick(500) == [Action(Do.PROBE, 0, 1)]
        assert state.places[0].state == READY

    def test_one_that_cannot_be_reached_is_asked_again(self):
        state = pool(1)
        state.tick(1)
        state.unavailable(0, 1, 1.1)
        assert state.get(1.1) is None
        assert state.tick(1.5) == [] and state.tick(2.2) == [Action(Do.PROBE, 0, 1)]
        state.answered(0, 1, 2.3)
        assert state.get(2.3) == 0

    def test_one_that_ray_restarts_is_waited_for_and_counts(self):
        state = pool(1)
        assert state.restarting(0, 1, 5) == [Action(Do.AWAIT, 0, 1)]
        assert state.get(5) is None and state.tick(64) == []
        state.started(0, 1, 30)
        assert state.get(30) == 0 and state.places[0].restarted == [5]

    def test_one_that_never_starts_is_given_up(self):
        state = PoolState(LIMITS)
        state.scale(1, 0)
        assert state.tick(59) == []
        assert state.tick(61) == [Action(Do.KILL, 0, 1)]

    def test_the_budget_and_its_window(self):
        state = pool(1)
        times, now = [], 0.0
        while now < 230:
            for action in state.tick(now):
                if action.do is Do.START:
                    times.append(now)
                    state.started(0, action.life, now)
                    state.crashed(0, action.life, now)
            if now == 0:
                state.crashed(0, 1, now)
            now += 0.5
        assert times[:3] == [0.5, 1.5, 3.5], "at once, then with growing pauses"
        assert times[3] == 100.5, "the fourth when the first is forgotten"
        assert all(sum(t <= other < t + 100 for other in times) <= 3 for t in times)

    def test_exhausted(self):
        state = pool(1)
        for life in (1, 2, 3, 4):
            assert not state.exhausted(life * 9)
            state.crashed(0, life, life * 9)
            for action in state.tick(life * 9 + 5):
                state.started(0, action.life, life * 9 + 5)
        assert state.places[0].state == WAITING and state.exhausted(50) and not state.exhausted(150)


class TestScaling:
    def test_idle_ones_go_first_and_busy_ones_drain(self):
        state = pool(3)
        assert [state.get(0), state.get(0)] == [0, 1]
        assert state.scale(1, 0) == [Action(Do.STOP, 2, 1)]
        assert state.size == 1 and state.places[1].draining
        assert state.get(0) == 0
        assert state.release(1, 0) == [Action(Do.STOP, 1, 1)]

    def test_growing_again_keeps_who_drains(self):
        state = pool(2)
        state.get(0), state.get(0)
        state.scale(1, 0)
        assert state.scale(3, 0) == [Action(Do.START, 2, 1)]
        assert not any(place.draining for place in state.places.values())

    def test_indices_are_never_used_again(self):
        state = pool(2)
        state.scale(0, 0)
        assert [action.index for action in state.scale(2, 0)] == [2, 3]

    def test_a_draining_one_that_crashes_is_not_replaced(self):
        state = pool(1)
        state.get(0)
        state.scale(0, 0)
        assert state.crashed(0, 1, 1) == [] and state.tick(50) == []
        assert state.release(0, 51) == [] and state.places == {}


@dataclass
class World:
    """What there really is: the model that the core is compared with. It knows lives, not how the core keeps them."""

    alive: dict[tuple[int, int], str] = field(default_factory=dict)
    """(index, life) to starting, fine, hung."""
    leases: dict[int, list[float]] = field(default_factory=dict)
    made: set[tuple[int, int]] = field(default_factory=set)
    starts: dict[int, list[float]] = field(default_factory=dict)
    probes: dict[tuple[int, int], float] = field(default_factory=dict)
    """When those were sent that are not answered."""
    target: int = 0

    def do(self, actions: list[Action], now: float) -> None:
        for action in actions:
            key = (action.index, action.life)
            match action.do:
                case Do.START:
                    assert key not in self.made, "no life twice, no index twice"
                    assert not any(index == action.index for index, _ in self.alive), "one actor in a place"
                    self.made.add(key)
                    self.alive[key] = "starting"
                    if action.life > 1:
                        self.starts.setdefault(action.index, []).append(now)
                case Do.PROBE:
                    assert self.alive.get(key) in ("fine", "hung")
                    assert key not in self.probes, "one probe at a time"
                    self.probes[key] = now
                case Do.KILL:
                    asked = self.probes.pop(key, None)
                    slow = self.alive.pop(key) == "starting"
                    assert slow if asked is None else now - asked > LIMITS.hang_timeout, "only what hangs is killed"
                case Do.STOP:
                    assert key in self.alive and not self.leases.get(action.index), "never with work in hand"
                    del self.alive[key]
                    self.probes.pop(key, None)
                case Do.AWAIT:
                    raise AssertionError("nobody said that Ray restarts it")


@pytest.mark.parametrize("seed", range(10))
def test_the_core_and_a_model_agree_through_a_thousand_operations(seed):
    draw, now = random.Random(seed), 0.0
    state, world = PoolState(LIMITS), World()
    nodes = {index: draw.choice("abc") for index in range(5000)}
    for _ in range(1000):
        now += draw.choice((0.0, 0.05, 0.3, 1.0, 4.0))
        match draw.choices(
            ("get", "release", "scale", "crash", "hang", "wake", "come", "refuse", "answer", "tick"),
            (20, 18, 3, 3, 2, 1, 8, 1, 15, 15),
        )[0]:
            case "get":
                work = draw.choice((1.0, 1.0, 5.0))
                check_get(state, world, now, work, draw.choice("abc"))
            case "release" if any(world.leases.values()):
                index = draw.choice([i for i, held in world.leases.items() if held])
                work = world.leases[index].pop(draw.randrange(len(world.leases[index])))
                world.do(state.release(index, now, work), now)
            case "scale":
                world.target = draw.randrange(7)
                world.do(state.scale(world.target, now), now)
            case "crash" if world.alive:
                key = draw.choice(list(world.alive))
                del world.alive[key]
                world.probes.pop(key, None)
                world.do(state.crashed(*key, now, "killed"), now)
            case "hang" | "wake" as what:
                keys = [k for k, s in world.alive.items() if s == ("fine" if what == "hang" else "hung")]
                if keys:
                    world.alive[draw.choice(keys)] = "hung" if what == "hang" else "fine"
            case "come" | "refuse" as what:
                keys = [k for k, s in world.alive.items() if s == "starting"]
                if keys:
                    key = draw.choice(keys)
                    if what == "come":
                        world.alive[key] = "fine"
                        state.started(*key, now, nodes[key[0]])
                    else:
                        del world.alive[key]
                        world.do(state.crashed(*key, now, "it did not start"), now)
            case "answer":
                for key in sorted(world.probes):
                    if world.alive.get(key) == "fine":
                        world.probes.pop(key, None)
                        state.answered(*key, now)
            case "tick":
                world.do(state.tick(now), now)
        check_invariants(state, world, now)
    # Left alone, and with everybody answering, it becomes as large as it was asked to be, and the rest is gone.
    for index in [i for i, held in world.leases.items() for _ in held]:
        world.do(state.release(index, now, world.leases[index].pop()), now)
    for _ in range(400):
        now += 0.5
        world.do(state.tick(now), now)
        for key, what in list(world.alive.items()):
            if what == "starting":
                world.alive[key] = "fine"
                state.started(*key, now, nodes[key[0]])
            elif what == "fine" and key in world.probes:
                world.probes.pop(key, None)
                state.answered(*key, now)
    assert sorted(world.alive.values()) == ["fine"] * world.target
    assert [place.state for place in state.places.values()] == [READY] * world.target


def check_get(state: PoolState, world: World, now: float, work: float, home: str) -> None:
    """What is handed out can work, as far as can be known, and nobody who can has less to do."""
    able = {
        p.index: sum(world.leases.get(p.index, []))
        for p in state.places.values()
        if p.state == READY and not p.draining
    }
    index = state.get(now, work, home=home)
    if not able:
        assert index is None
        return
    assert index in able and able[index] == min(able.values())
    assert any(i == index and what in ("fine", "hung") for (i, _), what in world.alive.items())
    world.leases.setdefault(index, []).append(work)


def check_invariants(state: PoolState, world: World, now: float) -> None:
    assert state.size == world.target
    held = {index: leases for index, leases in world.leases.items() if leases}
    for place in state.places.values():
        assert place.leases == len(held.pop(place.index, []))
        assert place.work == pytest.approx(sum(world.leases.get(place.index, [])))
        assert (place.state != WAITING) == ((place.index, place.life) in world.alive)
        if place.state == SILENT:
            assert place.quiet is not None and now - place.quiet <= 10 + 4 * 60, "found at the next look"
    assert not held, "what is handed out is known until it is released"
    assert {index for index, _ in world.alive} <= set(state.places)
    for times in world.starts.values():
        assert all(sum(t <= other < t + LIMITS.window for other in times) <= LIMITS.restarts for t in times[-5:])

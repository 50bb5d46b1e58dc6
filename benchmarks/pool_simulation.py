"""The actor pool's pure core in virtual time: a million hand-outs of a thousand actors that crash, hang and are scaled.

    python benchmarks/pool_simulation.py --json result.json

Work of 1 to 8 units arrives at random at `LOAD` of what the actors can do, `AT_ONCE` pieces side by side in each. An
actor crashes or hangs now and then; what it had in hand is noticed, handed back and handed out again. Every `SCALE_S`
the pool is made smaller or larger. Starts, probes, kills and restarts are the core's own doing, once a `TICK_S` of
virtual time. Counted: decisions a second (of one core; a decision is a hand-out with its release), the time of a tick,
bytes a place, how evenly work is spread (over the time that each actor could work), hand-outs to actors that hang, and
what was handed out when an actor was lost. At the end everything is released, and the books have to balance.

Not modelled: Ray, threads and clocks.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import setting, write
from phalanx.cluster.pool_state import READY, Action, Do, PoolLimits, PoolState

NODE = 8
"""Actors of a node."""
AT_ONCE, LOAD = 4, 0.7
MOST_WORK, UNIT_S = 8, 0.25
TICK_S, START_S = 0.1, 3.0
CRASHES, HANGS = 1 / 1_000, 1 / 2_000
"""For each hand-out, of some actor."""
SCALE_S, SMALLER = 20.0, 0.9
LIMITS = PoolLimits(restarts=50)


class Simulation:
    def __init__(self, actors: int, hand_outs: int):
        self._draw = random.Random(5)
        self._size, self._left = actors, hand_outs
        self._state = PoolState(LIMITS)
        self._rate = LOAD * actors * AT_ONCE / (UNIT_S * (1 + MOST_WORK) / 2)
        self._now = 0.0
        self._events: list[tuple[float, int, str, tuple[Any, ...]]] = []
        self._born = 0
        self._hung: set[tuple[int, int]] = set()
        """Place and life."""
        self._in_hand: dict[int, dict[int, float]] = {}
        """Work by place and hand-out."""
        # What is counted
        self._deciding = self._ticking = 0.0
        self._decisions = self._ticks = self._none = self._to_hung = self._again = self._most = 0
        self._crashes = self._hangs = self._restarts = 0
        self._done: dict[int, float] = {}
        self._able: dict[int, float] = {}
        """Seconds, by place."""

    def run(self) -> dict[str, Any]:
        self._do(self._state.scale(self._size, 0.0))
        self._later(START_S + 0.01, "arrive")
        self._later(TICK_S, "tick")
        self._later(SCALE_S, "scale", self._size * SMALLER)
        while self._left or any(self._in_hand.values()):
            self._now, _, what, arguments = heapq.heappop(self._events)
            getattr(self, f"_{what}")(*arguments)
        assert all(p.work == 0 and p.leases == 0 for p in self._state.places.values())
        shares = [self._done.get(n, 0.0) / able for n, able in self._able.items() if able > 0.1 * self._now]
        return {
            "decisions_s": self._decisions / self._deciding,
            "decisions": self._decisions,
            "tick_ms": 1000 * self._ticking / self._ticks,
            "virtual_s": self._now,
            "crashes": self._crashes,
            "hangs": self._hangs,
            "restarts": self._restarts,
            "handed_out_again": self._again,
            "handed_to_hung": self._to_hung,
            "none_to_be_had": self._none,
            "work_fairness": sum(shares) ** 2 / (len(shares) * sum(each * each for each in shares)),
            "work_max_over_mean": max(shares) * len(shares) / sum(shares),
            "most_at_once": self._most,
        }

    def _later(self, seconds: float, what: str, *arguments: Any) -> None:
        self._born += 1
        heapq.heappush(self._events, (self._now + seconds, self._born, what, arguments))

    # Callers

    def _arrive(self) -> None:
        self._hand_out(float(self._draw.randint(1, MOST_WORK)))
        self._left -= 1
        if self._left:
            self._later(self._draw.expovariate(self._rate), "arrive")
        for chance, deed in ((CRASHES, self._crash), (HANGS, self._hang)):
            if self._draw.random() < chance:
                deed()

    def _hand_out(self, work: float) -> None:
        begin = time.process_time()
        index = self._state.get(self._now, work)
        self._deciding += time.process_time() - begin
        if index is None:
            self._none += 1
            self._later(TICK_S, "hand_out", work)
            return
        self._decisions += 1
        self._born += 1
        in_hand = self._in_hand.setdefault(index, {})
        in_hand[self._born] = work
        self._most = max(self._most, len(in_hand))
        life = self._state.places[index].life
        if (index, life) in self._hung:
            self._to_hung += 1
        else:
            slower = max(1.0, len(in_hand) / AT_ONCE)
            self._later(work * UNIT_S * slower, "finish", index, life, self._born)

    def _done_with(self, index: int, number: int) -> float:
        work = self._in_hand[index].pop(number)
        begin = time.process_time()
        actions = self._state.release(index, self._now, work)
        self._deciding += time.process_time() - begin
        self._do(actions)
        return work

    # Actors

    def _finish(self, index: int, life: int, number: int) -> None:
        if number in self._in_hand.get(index, ()) and (index, life) not in self._hung:
            self._done[index] = self._done.get(index, 0.0) + self._done_with(index, number)

    def _crash(self) -> None:
        ready = [p for p in self._state.places.values() if p.state == READY and (p.index, p.life) not in self._hung]
        if ready:
            place = self._draw.choice(ready)
            self._crashes += 1
            self._do(self._state.crashed(place.index, place.life, self._now, "crash"))
            self._lose(place.index)

    def _hang(self) -> None:
        ready = [p for p in self._state.places.values() if p.state == READY]
        if ready:
            place = self._draw.choice(ready)
            self._hangs += 1
            self._hung.add((place.index, place.life))

    def _lose(self, index: int) -> None:
        """Its callers notice, and ask others."""
        for number in list(self._in_hand.get(index, ())):
            self._again += 1
            self._hand_out(self._done_with(index, number))

    def _start(self, index: int, life: int) -> None:
        self._state.started(index, life, self._now, f"node{index // NODE}")

    def _answer(self, index: int, life: int) -> None:
        if (index, life) not in self._hung:
            self._state.answered(index, life, self._now)

    # The pool's thread

    def _tick(self) -> None:
        begin = time.process_time()
        actions = self._state.tick(self._now)
        self._ticking += time.process_time() - begin
        self._ticks += 1
        for place in self._state.places.values():
            if place.state == READY and (place.index, place.life) not in self._hung:
                self._able[place.index] = self._able.get(place.index, 0.0) + TICK_S
        self._do(actions)
        self._later(TICK_S, "tick")

    def _scale(self, size: float) -> None:
        self._do(self._state.scale(int(size), self._now))
        self._later(SCALE_S, "scale", self._size if size < self._size else self._size * SMALLER)

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action.do:
                case Do.START:
                    self._restarts += action.life > 1
                    self._later(START_S, "start", action.index, action.life)
                case Do.PROBE:
                    self._later(self._draw.uniform(0.001, 0.05), "answer", action.index, action.life)
                case Do.KILL:
                    self._lose(action.index)


def bytes_of_a_place(actors: int) -> float:
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    state = PoolState(LIMITS)
    for action in state.scale(actors, 0.0):
        state.started(action.index, action.life, 0.0, f"node{action.index // NODE}")
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return (after - before) / len(state.places)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--actors", type=int, default=1000)
    parser.add_argument("--hand-outs", type=int, default=1_000_000)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    found: dict[str, Any] = {
        **Simulation(args.actors, args.hand_outs).run(),
        "bytes_a_place": bytes_of_a_place(args.actors),
    }
    for text in (
        "{decisions:,} hand-outs of {actors} actors in {virtual_s:.0f} virtual s: {decisions_s:,.0f} decisions/s, "
        "{tick_ms:.2f} ms a tick, {bytes_a_place:.0f} bytes a place",
        "{crashes} crashes, {hangs} hangs, {restarts} restarts; {handed_out_again} handed out again, {handed_to_hung} "
        "to actors that hung, {none_to_be_had} times none to be had",
        "work by the time each could work: Jain {work_fairness:.4f}, busiest {work_max_over_mean:.2f} of the mean, at "
        "most {most_at_once} at once",
    ):
        print(text.format(actors=args.actors, **found))
    write({"benchmark": "pool_simulation", **setting(), **found}, args.json)


if __name__ == "__main__":
    main()

"""The router's pure parts in virtual time: a million requests over a thousand replicas.

    python benchmarks/router_simulation.py --json result.json

Conversations of twelve turns behind common system prompts arrive at random at `LOAD` of what the replicas can do. Each
replica is modelled: places, a waiting queue (the engine's own), a token time that grows with the streams, and a prefix
cache that drops what was used least recently. Who gets a request is decided by the engine's own routing and loads, and
every quarter of a second its relief looks at all replicas. Counted: decisions a second (of one core, the routing and
the bookkeeping of loads alone), the size of the table, prompt tokens found in caches, how evenly the work is spread,
waiting times. A second part asks for more than the replicas can do, most of it by one API key, and counts what each key
gets and how long it waits, with fair shares and in order of arrival.

Not modelled: what the event loop, sockets and HTTP cost.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import setting, write
from phalanx.engine.client import EngineRequest
from phalanx.engine.loads import Loads
from phalanx.engine.queue import WaitingQueue
from phalanx.engine.relief import PROMPT_TOKEN, Relief, Sight
from phalanx.engine.request import Request
from phalanx.engine.routing import LeastWork, PrefixAffinity, Routing
from phalanx.engine.scheduling import FairShare, FirstCome, SchedulingPolicy
from phalanx.sampling_params import SamplingParams

PLACES = 16
CACHE_TOKENS = 60_000
TOKEN_S, STREAMS = 0.02, 8
"""A token of a single stream; with so many more streams it takes twice as long."""
LOAD = 0.7
LOOK_S = 0.25
TURNS, SYSTEMS, SYSTEM_TOKENS, TURN_TOKENS, ANSWER = 12, 64, 160, (10, 60), (16, 96)
WORK = 60.0
"""Of one request in the mean, in tokens of answers, most of its prompt being cached."""


class AtRandom:
    def __init__(self) -> None:
        self._random = random.Random(7)

    def choose(self, request: EngineRequest, loads: Loads) -> int:
        return self._random.randrange(len(loads))

    def forget(self, engine: int) -> None: ...


class Conversation:
    def __init__(self, number: int, draw: random.Random):
        self.number, self.system = number, draw.randrange(SYSTEMS)
        self.tokens = [1000 * self.system + n for n in range(SYSTEM_TOKENS)]
        self.left = TURNS


class Replica:
    """A model of one: what it works on goes forward on a clock of its own, slower the more streams there are."""

    def __init__(self, policy: SchedulingPolicy):
        self.queue = WaitingQueue(10**9, policy)
        self.running: list[tuple[float, int, Request, Conversation]] = []
        """Own clock at which it ends, number, request."""
        self.clock = self.seen = 0.0
        """The own clock; the time for which it is right."""
        self.done = 0.0
        self.life = 0
        """Counts changes of what runs."""
        self._cache: OrderedDict[int, int] = OrderedDict()
        self._cached = 0

    def token_s(self) -> float:
        return TOKEN_S * (STREAMS + len(self.running)) / (STREAMS + 1)

    def go_on(self, now: float) -> None:
        if self.running:
            passed = (now - self.seen) / self.token_s()
            self.clock += passed
            self.done += passed * len(self.running)
        self.seen = now

    def found(self, talk: Conversation, tokens: int) -> int:
        """Prompt tokens in the cache; from now on all of them are."""
        has = max(self._cache.get(talk.number, 0), self._cache.get(-1 - talk.system, 0))
        for key, size in ((-1 - talk.system, SYSTEM_TOKENS), (talk.number, tokens)):
            self._cached += size - self._cache.pop(key, 0)
            self._cache[key] = size
        while self._cached > CACHE_TOKENS:
            self._cached -= self._cache.popitem(last=False)[1]
        return min(has, tokens)

    def next_end(self) -> float:
        return self.seen + max(0.0, self.running[0][0] - self.clock) * self.token_s()


class Simulation:
    """`owners` are their shares of the requests."""

    def __init__(
        self,
        routing: Routing,
        *,
        replicas: int,
        requests: int,
        policy: type[SchedulingPolicy] = FairShare,
        load: float = LOAD,
        owners: tuple[float, ...] = (1.0,),
        relieve: bool = False,
    ):
        self._routing, self._requests, self._load, self._owners = routing, requests, load, owners
        self._draw = random.Random(3)
        self._fleet = [Replica(policy()) for _ in range(replicas)]
        self._loads, self._outstanding = Loads.of([0.0] * replicas), [0.0] * replicas
        full_s = TOKEN_S * (STREAMS + PLACES) / (STREAMS + 1)
        self._rate = load * replicas * PLACES / full_s / WORK
        self._talks = [Conversation(n, self._draw) for n in range(20 * replicas)]
        self._born = len(self._talks)
        self._events = [(0.0, -1, 0)]
        """Time, replica and its life then; an arrival has no replica."""
        self._waiting: dict[str, Conversation] = {}
        self._params = {n: SamplingParams(max_tokens=n, seed=0) for n in range(1, ANSWER[1] + 1)}
        self._asked = 0
        self._relief = Relief(replicas) if relieve else None
        self._look_at, self._before = LOOK_S, [0.0] * replicas
        # What is counted
        self._hits = self._prompts = self._looks = self._moves = 0
        self._deciding = self._looking = 0.0
        self._waits: list[list[float]] = [[] for _ in owners]
        self._served = [0.0 for _ in owners]

    def run(self) -> dict[str, Any]:
        now = 0.0
        while self._events:
            now, number, life = heapq.heappop(self._events)
            while self._relief is not None and now >= self._look_at:
                self._look(self._relief)
            if number >= 0:
                if life == self._fleet[number].life:
                    self._end(number, now)
                continue
            self._arrive(now)
            if self._asked < self._requests:
                heapq.heappush(self._events, (now + self._draw.expovariate(self._rate), -1, 0))
            elif self._load > 1:
                break  # while all still want more than there is
        return self._result(now)

    def _look(self, relief: Relief) -> None:
        sights = []
        for n, replica in enumerate(self._fleet):
            replica.go_on(self._look_at)
            made, self._before[n] = replica.done - self._before[n], replica.done
            sights.append(Sight(True, len(replica.running), round(made * self._draw.lognormvariate(0.0, 0.2))))
        begin = time.process_time()
        move = relief.look(sights, LOOK_S)
        self._looking += time.process_time() - begin
        self._looks, self._moves, self._look_at = (
            self._looks + 1,
            self._moves + (move is not None),
            self._look_at + LOOK_S,
        )

    def _arrive(self, now: float) -> None:
        draw = self._draw
        place = draw.randrange(len(self._talks))
        talk = self._talks[place]
        talk.tokens += [draw.randrange(30_000)] * draw.randint(*TURN_TOKENS)
        owner = draw.choices(range(len(self._owners)), self._owners)[0] + (len(self._owners) > 1)
        output = draw.randint(*ANSWER)
        given = EngineRequest(f"{self._asked}", list(talk.tokens), self._params[output], owner=owner)
        begin = time.process_time()
        chosen = self._routing.choose(given, self._loads)
        self._burden(chosen, len(given.prompt_token_ids) + output)
        self._deciding += time.process_time() - begin
        request = Request.create(given, self._asked, now, 10**9)
        self._waiting[given.request_id] = talk
        self._asked += 1
        talk.tokens += [draw.randrange(30_000)] * output
        talk.left -= 1
        if not talk.left:
            self._talks[place] = Conversation(self._born, draw)
            self._born += 1
        self._fleet[chosen].go_on(now)
        self._fleet[chosen].queue.push(request)
        self._start(chosen, now)

    def _start(self, number: int, now: float) -> None:
        """Those that have a place now."""
        replica = self._fleet[number]
        for request in replica.queue if len(replica.running) < PLACES else ():
            replica.queue.remove(request, now)
            talk, size = self._waiting.pop(request.request_id), request.num_prompt
            found = replica.found(talk, size)
            replica.queue.policy.admitted(request, size - found)
            self._hits, self._prompts = self._hits + found, self._prompts + size
            owner = max(request.given.owner - 1, 0)
            self._waits[owner].append(now - request.queued_s)
            output = request.given.sampling.max_tokens or 0
            work = output + PROMPT_TOKEN * (size - found)
            for _ in range(output):  # charged beforehand: a simplification
                replica.queue.policy.made(request)
            self._served[owner] += work
            heapq.heappush(replica.running, (replica.clock + work, request.arrival, request, talk))
            if len(replica.running) == PLACES:
                break
        replica.life += 1
        if replica.running:
            heapq.heappush(self._events, (replica.next_end(), number, replica.life))

    def _end(self, number: int, now: float) -> None:
        """Those that are done make room for others."""
        replica = self._fleet[number]
        replica.go_on(now)
        while replica.running and replica.running[0][0] <= replica.clock + 1e-9:
            _, _, request, _ = heapq.heappop(replica.running)
            begin = time.process_time()
            self._burden(number, -request.num_prompt - (request.given.sampling.max_tokens or 0))
            self._deciding += time.process_time() - begin
        self._start(number, now)

    def _burden(self, number: int, tokens: float) -> None:
        self._outstanding[number] += tokens
        self._loads.set(number, self._outstanding[number])

    def _result(self, now: float) -> dict[str, Any]:
        done = [replica.done for replica in self._fleet]
        return {
            "decisions_s": self._asked / self._deciding,
            "hit_rate": self._hits / self._prompts,
            "work_max_over_mean": max(done) * len(done) / sum(done),
            "work_fairness": sum(done) ** 2 / (len(done) * sum(each * each for each in done)),
            "virtual_s": now,
            "wait_s": [quantiles(each) for each in self._waits],
            "served": [each / sum(self._served) for each in self._served],
            "table_entries": len(self._routing) if isinstance(self._routing, PrefixAffinity) else 0,
            "table_mb": table_bytes(self._routing) / 1e6,
            "look_ms": 1000 * self._looking / self._looks if self._looks else None,
            "looks": self._looks,
            "moves": self._moves,
        }


def quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values) or [0.0]
    return {"median": statistics.median(ordered), "p99": ordered[int(0.99 * (len(ordered) - 1))], "max": ordered[-1]}


def table_bytes(routing: Routing) -> int:
    if not isinstance(routing, PrefixAffinity):
        return 0
    known = routing._known
    return sys.getsizeof(known) + sum(sys.getsizeof(key) + sys.getsizeof(bits) for key, bits in known.items())


KEYS = (0.8, 0.05, 0.05, 0.05, 0.05)
"""What each of five API keys asks for, of the whole."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--others", type=int, default=200_000, help="requests of the other policies and parts")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "router_simulation", **setting()}
    routings: dict[str, tuple[Routing, int]] = {
        "affinity": (PrefixAffinity(), args.requests),
        "least work": (LeastWork(), args.others),
        "random": (AtRandom(), args.others),
    }
    for name, (routing, count) in routings.items():
        found = Simulation(routing, replicas=args.replicas, requests=count, relieve=name == "affinity").run()
        result[name] = found
        (wait,) = found["wait_s"]
        print(
            f"{name}: {count} requests over {args.replicas} replicas: {found['decisions_s']:,.0f} decisions/s, "
            f"hits {found['hit_rate']:.0%}, busiest {found['work_max_over_mean']:.2f} of the mean, Jain "
            f"{found['work_fairness']:.3f}, waits median {wait['median']:.2f} s, 99th {wait['p99']:.2f} s, table "
            f"{found['table_entries']} entries, {found['table_mb']:.0f} MB",
            flush=True,
        )
        if found["looks"]:
            print(f"  relief: {found['look_ms']:.2f} ms a look, {found['moves']} moves in {found['looks']} looks")
    for name, policy in {"fair": FairShare, "fcfs": FirstCome}.items():
        simulation = Simulation(
            PrefixAffinity(), replicas=100, requests=args.others, policy=policy, load=1.3, owners=KEYS
        )
        found = simulation.run()
        result[f"keys, {name}"] = found
        served = ", ".join(f"{share:.0%}" for share in found["served"])
        waits = ", ".join(f"{wait['p99']:.1f}" for wait in found["wait_s"])
        print(f"keys that ask for {KEYS}, {name}: get {served}; 99th percentile of waits {waits} s", flush=True)
    write(result, args.json)


if __name__ == "__main__":
    main()

"""Fairness between owners: first come first served for one, bounded differences between several, nobody starved."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.engine.queue import SHARE, WaitingQueue
from phalanx.engine.request import Request
from phalanx.engine.scheduling import OUTPUT_TOKEN, PROMPT_TOKEN, FirstCome, SchedulingPolicy
from phalanx.errors import QueueFull
from tests.helpers.engine_driver import Driver, make_request

SLOTS, LONGEST_PROMPT, MOST_OUTPUT = 6, 50, 12


class Service:
    """A queue and `SLOTS` places; a running request makes a token each step. Counts what each owner gets."""

    def __init__(self, policy: SchedulingPolicy | None = None) -> None:
        self.queue = WaitingQueue(10_000, policy)
        self.running: list[list] = []
        self.got: dict[int, int] = {}
        self.admitted: list[Request] = []
        self._arrivals = 0

    def ask(self, owner: int, prompt: int = 1, output: int = 1, priority: int = 0, resumed: bool = False) -> Request:
        wanted = make_request(f"r{self._arrivals}", [1] * prompt, max_tokens=output, owner=owner, priority=priority)
        request = Request.create(wanted, self._arrivals, 0.0, 1000)
        request.resumed = resumed
        self._arrivals += 1
        self.queue.push(request)
        return request

    def step(self) -> None:
        for entry in self.running:
            request, _ = entry
            entry[1] -= 1
            self.queue.policy.made(request)
            self._count(request, OUTPUT_TOKEN)
        self.running = [entry for entry in self.running if entry[1]]
        if len(self.running) < SLOTS:
            for request in self.queue:
                self.queue.remove(request, 0.0)
                self.admitted.append(request)
                if not request.resumed:
                    self.queue.policy.admitted(request, request.num_prompt)
                    self._count(request, PROMPT_TOKEN * request.num_prompt)
                self.running.append([request, request.given.sampling.max_tokens])
                if len(self.running) == SLOTS:
                    break

    def _count(self, request: Request, charge: int) -> None:
        self.got[request.given.owner] = self.got.get(request.given.owner, 0) + charge

    def waiting(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for request in self.queue:
            found[request.given.owner] = found.get(request.given.owner, 0) + 1
        return found


requests = st.tuples(st.integers(1, LONGEST_PROMPT), st.integers(1, MOST_OUTPUT), st.integers(-1, 1), st.booleans())


@given(st.lists(st.one_of(requests, st.none()), max_size=60), st.integers(0, 3))
@settings(max_examples=200)
def test_one_owner_is_served_as_by_first_come(script, owner) -> None:
    fair, plain = Service(), Service(FirstCome())
    for item in script:
        for service in (fair, plain):
            if item is None:
                service.step()
            else:
                service.ask(owner, *item)
    assert [request.arrival for request in fair.queue] == [request.arrival for request in plain.queue]
    assert [request.arrival for request in fair.admitted] == [request.arrival for request in plain.admitted]
    assert [request.arrival for request in plain.queue] == [
        request.arrival for request in sorted(plain.queue, key=lambda r: (r.given.priority, not r.resumed, r.arrival))
    ]


script = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 4), st.integers(1, LONGEST_PROMPT), st.integers(1, MOST_OUTPUT), st.integers(1, 20)),
        st.integers(1, 30),
    ),
    max_size=40,
)


@given(script)
@settings(max_examples=200)
def test_while_two_wait_they_are_served_alike(script) -> None:
    """At every moment at which both have waited since an earlier one, whichever that is."""
    service = Service()
    bound = 2 * max(PROMPT_TOKEN * LONGEST_PROMPT, OUTPUT_TOKEN * SLOTS * MOST_OUTPUT)
    pairs = [(a, b) for a in range(1, 5) for b in range(a + 1, 5)]
    least: dict[tuple[int, int], int | None] = dict.fromkeys(pairs)
    most: dict[tuple[int, int], int | None] = dict.fromkeys(pairs)
    for item in script:
        if isinstance(item, tuple):
            owner, prompt, output, count = item
            for _ in range(count):
                service.ask(owner, prompt, output)
            continue
        for _ in range(item):
            service.step()
            waiting = service.waiting()
            for a, b in pairs:
                if a in waiting and b in waiting:
                    ahead = service.got.get(a, 0) - service.got.get(b, 0)
                    low, high = least[a, b], most[a, b]
                    least[a, b] = ahead if low is None else min(low, ahead)
                    most[a, b] = ahead if high is None else max(high, ahead)
                    assert most[a, b] - least[a, b] <= bound
                else:
                    least[a, b] = most[a, b] = None


@given(script)
@settings(max_examples=100)
def test_everyone_is_served_once_and_nothing_is_left(script) -> None:
    service = Service()
    asked = 0
    for item in script:
        if isinstance(item, tuple):
            owner, prompt, output, count = item
            for _ in range(count):
                service.ask(owner, prompt, output, priority=prompt % 2, resumed=output % 3 == 0)
                asked += 1
            order = [request.arrival for request in service.queue]
            assert len(order) == len(set(order)) == len(service.queue)
        else:
            for _ in range(item):
                service.step()
    while len(service.queue):
        service.step()
    assert sorted(request.arrival for request in service.admitted) == list(range(asked))
    assert not service.queue._classes
    assert not +service.queue._in_line


def wait_of(policy: SchedulingPolicy | None, hogs: int = 500) -> list[int]:
    """Steps that each of ten requests of a quiet owner waits, beside `hogs` of another that came before."""
    service = Service(policy)
    for _ in range(hogs):
        service.ask(1, prompt=20, output=10)
    waits = []
    for _ in range(10):
        request, steps = service.ask(2, prompt=20, output=10), 0
        while request not in service.admitted:
            service.step()
            steps += 1
        waits.append(steps)
    return waits


def test_five_hundred_of_one_owner_do_not_starve_another() -> None:
    assert min(wait_of(FirstCome(), 500)[:1]) > 500
    assert max(wait_of(None)) <= 11  # the next place that gets free


def test_who_has_been_away_has_saved_up_nothing() -> None:
    """A newcomer gets its half from then on, not all until it has caught up."""
    service = Service()
    for _ in range(400):
        service.ask(1, 10, 10)
    for _ in range(200):
        service.step()
    for _ in range(200):
        service.ask(2, 10, 10)
    before = dict(service.got)
    for _ in range(100):
        service.step()
    first, second = (service.got[owner] - before.get(owner, 0) for owner in (1, 2))
    assert second < 1.5 * first


@pytest.mark.parametrize("seed", range(3))
def test_five_hundred_beside_a_few_on_a_whole_engine(seed) -> None:
    """Two owners of whom one asks for much more: both get about half, tokens counted, and every answer is right."""
    rng = random.Random(seed)
    driver = Driver(blocks=200, max_num_seqs=4, prefix_caching=False)
    for number in range(100):
        driver.ask(f"much-{number}", [rng.randrange(60)] * rng.randint(1, 12), max_tokens=8, owner=1)
    little = [
        driver.ask(f"few-{number}", [rng.randrange(60)] * rng.randint(1, 12), max_tokens=8, owner=2)
        for number in range(20)
    ]
    while any(answer.reason is None for answer in little):
        driver.step()
    others = sum(
        len(answer.request.prompt_token_ids) + 2 * len(answer.tokens)
        for name, answer in driver.answers.items()
        if name.startswith("much") and answer.tokens
    )
    own = sum(len(answer.request.prompt_token_ids) + 2 * len(answer.tokens) for answer in little)
    assert 0.7 < own / others < 1.4
    driver.drain()


def test_no_owner_can_take_all_places() -> None:
    service = Service()
    service.queue = WaitingQueue(90)
    taken: dict[int, int] = {}

    def fill(owner: int) -> None:
        while True:
            try:
                service.queue.check_room(0.0, owner=owner)
            except QueueFull:
                return
            service.ask(owner)
            taken[owner] = taken.get(owner, 0) + 1

    fill(1)
    assert taken[1] == 90 * SHARE // (SHARE + 1)
    with pytest.raises(QueueFull, match="80 requests with this API key"):
        service.queue.check_room(0.0, owner=1)
    fill(2)
    fill(3)
    assert taken[2] > 0
    assert taken[3] > 0
    fill(0)
    assert len(service.queue) == 90  # nobody in particular may have the last one
    with pytest.raises(QueueFull, match="90 requests are waiting"):
        service.queue.check_room(0.0, owner=4)

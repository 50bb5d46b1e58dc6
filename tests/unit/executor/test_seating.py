"""Which seats are used, when some are lost, given up or missing from the start."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import pytest

from phalanx.distributed.mesh import Mesh
from phalanx.errors import NotEnoughMemory
from phalanx.executor import seating as seating_module
from phalanx.executor.launcher import Layout
from phalanx.executor.messages import RankStart
from phalanx.executor.seating import Choice, NoFit, Seat, Seating, Share
from phalanx.worker.capacity import Capacity
from phalanx.worker.limits import Memory


class Places:
    """A launcher's seats, each on a node of its own."""

    host = None

    def __init__(self, seats: set[int]):
        self.seats = seats
        self.coming: deque[int] = deque()
        """Seats whose places have joined; one is free to use each time that somebody has looked."""

    def launch(self, starts: list[RankStart]) -> None: ...

    def kill(self, rank: int) -> None: ...

    def cause(self, rank: int, wait: float = 0.0) -> str | None: ...

    def close(self) -> None: ...

    def available(self) -> set[int]:
        return set(self.seats)

    def arriving(self) -> set[int]:
        coming = set(self.coming)
        self.seats |= {self.coming.popleft()} if self.coming else set()
        return coming

    def assign(self, seats: Sequence[int]) -> None: ...

    def node(self, seat: int) -> str:
        return f"node{seat}"

    def capacity(self, seat: int) -> Capacity | None:
        return Capacity("cpu", 300, 200, speed=30.0 / (seat + 1), shared=True)


def choose(seats: Sequence[Seat]) -> Choice:
    if len(seats) < 2:
        raise NoFit("two places")
    return Choice(Layout(Mesh(tp=len(seats))), tuple(seat.number for seat in seats))


def share(seats: Sequence[Seat]) -> tuple[Layout, str]:
    if any(seat.speed is None for seat in seats):
        raise NotEnoughMemory("no speeds")
    return Layout(Mesh(tp=3), (tuple(seat.speed or 0.0 for seat in seats),)), "by speed"


def seating(places: Places, patience: float = 0.0, share: Share | None = None) -> Seating:
    return Seating(Layout(Mesh(tp=3)), places, choose, patience, share)


def never() -> bool:
    return False


def test_all_are_there():
    seats = seating(Places({0, 1, 2}))
    assert not seats.begin()
    assert seats.is_whole


def test_some_are_missing_from_the_start_and_come_later():
    places = Places({0, 2})
    seats = seating(places)
    assert seats.begin()
    assert seats.now.seats == (0, 2)
    assert seats.more() is None
    places.seats.add(1)
    assert seats.more() == "1 more place on node1"
    assert seats.settle([], never)
    assert seats.is_whole


def test_too_few_from_the_start():
    with pytest.raises(NotEnoughMemory, match="does not fit the places that are there: two places"):
        seating(Places({1})).begin()


def test_a_place_that_is_given_up_is_left_though_its_rank_lives():
    """As when two nodes do not reach each other: nobody is lost, and no epoch begins."""
    seats = seating(Places({0, 1, 2}))
    assert not seats.settle([], never)
    assert seats.failed(2, surely=True)
    assert seats.settle([], never)
    assert seats.now.seats == (0, 1)
    assert seats.more() is None, "it rests"


def test_a_place_that_has_come_back_in_time_is_waited_for_while_it_is_looked_at():
    places = Places({0, 1, 2})
    seats = seating(places)
    places.seats -= {1, 2}
    places.coming.extend((2, 1))
    assert not seats.settle([1, 2], never), "started where they were"
    assert seats.is_whole


def test_it_is_not_waited_for_where_another_is_missing():
    places = Places({0, 1, 2})
    seats = Seating(Layout(Mesh(tp=3)), places, lambda _: Choice(Layout(Mesh()), (0,)), 0.0)
    places.seats -= {1, 2}
    places.coming.append(2)
    assert seats.settle([1, 2], never)
    assert seats.now.seats == (0,)


def test_it_is_not_waited_for_forever(monkeypatch):
    monkeypatch.setattr(seating_module, "ARRIVAL_S", 0.0)
    monkeypatch.setattr(Places, "arriving", lambda self: {2})
    seats = seating(Places({0, 1}))
    assert seats.settle([2], never)
    assert seats.now.seats == (0, 1)


def test_shares_are_decided_by_what_places_have():
    seats = seating(Places({0, 1, 2}), share=share)
    assert not seats.begin()
    assert seats.now.layout.tensor_weights == ((30.0, 15.0, 10.0),)
    assert seats.shares is not None and seats.shares.why == "by speed"


def test_shares_are_decided_when_all_are_there_at_last():
    places = Places({0, 1})
    seats = seating(places, share=share)
    assert seats.begin() and seats.shares is None
    places.seats.add(2)
    assert seats.settle([], never)
    assert seats.now.layout.tensor_weights == ((30.0, 15.0, 10.0),)


def test_a_new_choice_knows_speeds():
    offered: list[Seat] = []

    def look(seats: Sequence[Seat]) -> Choice:
        offered.extend(seats)
        return choose(seats)

    places = Places({0, 1, 2})
    seats = Seating(Layout(Mesh(tp=3)), places, look, 0.0, share)
    seats.begin()
    seats.ready([{"weights": 10, "kv_cache": 20, "free": 70}] * 3, ["cpu"] * 3)
    places.seats.remove(0)
    assert seats.settle([0], never)
    assert offered == [Seat(1, "node1", Memory(100, 100), 15.0), Seat(2, "node2", Memory(100, 100), 10.0)]


def test_ranks_of_a_node_share_what_it_has(monkeypatch):
    monkeypatch.setattr(Places, "node", lambda self, seat: "x")
    seats = seating(Places({0, 1, 2}), share=share)
    seats.begin()
    assert seats.now.layout.tensor_weights == ((10.0, 5.0, pytest.approx(10 / 3)),)

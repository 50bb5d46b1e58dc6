"""Order, bound and the advice of when to come back."""

from __future__ import annotations

import pytest

from phalanx.engine.queue import WaitingQueue
from phalanx.engine.request import Request
from phalanx.errors import QueueFull
from tests.helpers.engine_driver import make_request


def waiting(arrival: int, *, priority: int = 0, resumed: bool = False) -> Request:
    request = Request.create(make_request(f"r{arrival}", [1], priority=priority), arrival, 0.0, 100)
    request.resumed = resumed
    return request


def test_priority_then_resumed_then_arrival() -> None:
    queue = WaitingQueue(10)
    for request in (
        waiting(0),
        waiting(1, priority=-1),
        waiting(2, resumed=True),
        waiting(3, priority=1, resumed=True),
        waiting(4),
        waiting(5, priority=-1, resumed=True),
    ):
        queue.push(request)
    assert [request.arrival for request in queue] == [5, 1, 2, 0, 4, 3]


def test_equal_priorities_keep_their_order_whatever_leaves_between() -> None:
    queue = WaitingQueue(10)
    requests = [waiting(arrival) for arrival in range(6)]
    for request in reversed(requests):
        queue.push(request)
    queue.remove(requests[3], 1.0)
    assert [request.arrival for request in queue] == [0, 1, 2, 4, 5]
    with pytest.raises(ValueError, match="not in the queue"):
        queue.remove(requests[3], 1.0)


def test_bound_counts_requests_on_their_way_and_spares_those_with_a_free_slot() -> None:
    queue = WaitingQueue(2)
    queue.push(waiting(0))
    queue.check_room(0.0)
    with pytest.raises(QueueFull, match="2 requests are waiting"):
        queue.check_room(0.0, elsewhere=1)
    queue.check_room(0.0, elsewhere=1, free_slots=1)


def test_retry_after_follows_the_rate_of_admissions_and_stays_within_bounds() -> None:
    queue = WaitingQueue(100)
    assert queue.retry_after(0.0) == 1.0
    requests = [waiting(arrival) for arrival in range(100)]
    for request in requests:
        queue.push(request)
    for number, request in enumerate(requests[:10]):
        queue.remove(request, number * 2.0)
    assert queue.retry_after(20.0) == pytest.approx(9 * 2.0)  # 90 wait, one leaves every 2 s
    assert queue.retry_after(10_000.0) == 60.0  # nothing has moved for long
    for number, request in enumerate(requests[10:90]):
        queue.remove(request, 20.0 + number * 0.001)
    assert queue.retry_after(20.1) == 1.0

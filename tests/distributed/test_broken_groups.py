"""Ranks that disagree, stop, die or are told to give up: every wait ends, on every rank, with names."""

import signal
import threading
import time

import pytest
import torch

from phalanx.distributed.transports import segment
from tests.helpers.rank_spawner import TRANSPORTS, Member, Ranks

transports = pytest.mark.parametrize("transport", TRANSPORTS)
BROKEN = ("GroupBroken", "PeerLost")


def disagree(member: Member, case: str) -> None:
    """The last rank does something else than the others."""
    group, odd = member.tp, member.rank == member.tp.size - 1
    group.barrier()
    four = torch.ones(4)
    match case:
        case "operation":
            group.barrier() if odd else group.all_reduce(four)
        case "size":
            group.all_reduce(torch.ones(5) if odd else four)
        case "dtype":
            group.all_reduce(four.int() if odd else four)
        case "large size":
            group.all_reduce(torch.ones(600_000 if odd else 900_000))
        case "empty":
            group.all_reduce(torch.ones(0) if odd else four)
            group.all_reduce(four)
        case "lengths":
            group.all_gather(torch.ones(4, 2), 0, [4 + odd] + [4] * (group.size - 1))
        case "own length":
            group.all_gather(torch.ones(4 - odd, 2), 0, [4] * group.size)
        case "source":
            group.broadcast(four, 1 if odd else 0)
        case "order":
            for step in range(4):
                group.all_reduce(four) if (step % 2) ^ odd else group.broadcast(four, 0)
        case "to_all":
            group.all_to_all([four] * group.size, [(5 if odd else 4,)] + [(4,)] * (group.size - 1))
        case "one exchange more":
            if not odd:
                group.barrier()
        case "send":
            if odd:
                group.send(torch.ones(5), 0)
            elif member.rank == 0:
                group.recv((4,), torch.float32, group.size - 1)
            group.barrier()
        case "sent another dtype":
            if odd:
                group.send(four.int(), 0)
            elif member.rank == 0:
                group.recv((4,), torch.float32, group.size - 1)
            group.barrier()
    if case != "one exchange more":
        group.barrier()  # at the latest here: over TCP, one whose own part fitted has gone on
    raise AssertionError("nobody noticed")


CASES = (
    "operation", "size", "dtype", "large size", "empty", "lengths", "own length", "order", "source", "to_all",
    "one exchange more", "send", "sent another dtype",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_every_rank_is_told_who_disagrees(transport, case):
    size = 2 if case == "one exchange more" else 3
    with Ranks(disagree, size, (case,), transport) as ranks:
        outcomes = ranks.outcomes(60)
    for rank, outcome in enumerate(outcomes):
        if case == "one exchange more" and rank == size - 1:
            assert outcome.error == "AssertionError"  # it was done, and left
            continue
        assert outcome.error in BROKEN, outcome.message
        named = [r for r in range(size) if f"ank {r}" in outcome.message]
        assert rank in named or case == "to_all"
        assert len(named) > 1 or case == "own length", outcome.message
        assert outcome.seconds < 5


def in_a_circle(member: Member, case: str) -> None:
    group, me = member.tp, member.rank
    match case:
        case "recv and barrier":
            group.recv((1,), torch.float32, 1) if me == 0 else group.barrier()
        case "all receive":
            group.recv((1,), torch.float32, (me + 1) % group.size)
        case "all send too much":
            for _ in range(4):
                group.send(torch.ones(1), (me + 1) % group.size)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", ["recv and barrier", "all receive", "all send too much"])
def test_ranks_that_wait_for_each_other_find_out(case, size):
    with Ranks(in_a_circle, size, (case,), exchange_timeout=None) as ranks:
        outcomes = ranks.outcomes(60)
    assert all(outcome.error in BROKEN for outcome in outcomes)
    assert any("different exchanges" in outcome.message for outcome in outcomes)
    assert all(outcome.seconds < 2 for outcome in outcomes)


def slow_peer(member: Member) -> str:
    """Rank 1 is late by more than the circle's check takes, in each operation: nothing may go wrong."""
    for turn in range(4):
        if turn % 2 == member.rank:
            time.sleep(0.15)
        member.tp.all_reduce(torch.ones(3))
        member.tp.send(torch.ones(3), 1) if member.rank == 0 else member.tp.recv((3,), torch.float32, 0)
    return "fine"


@transports
def test_waiting_for_a_slow_peer_is_no_circle(transport):
    with Ranks(slow_peer, 2, transport=transport) as ranks:
        assert [o.value for o in ranks.outcomes(60)] == ["fine", "fine"]


def wait_and_abort(member: Member, how: str) -> float:
    """Rank 0 waits in some way and is aborted from another thread; the seconds from the abort to the error."""
    segment._RECHECK_MS = 60_000  # nobody finds out by looking now and then
    group = member.tp
    group.barrier()
    if member.rank == 1:
        return member.ask()
    aborted: list[float] = []

    def abort() -> None:
        time.sleep({"spin": 0.0, "yield": 0.0003}.get(how, 0.3))
        aborted.append(time.monotonic())
        member.abort.set("a test says so")

    thread = threading.Thread(target=abort)
    thread.start()
    try:
        match how:
            case "send":
                for _ in range(100):
                    group.send(torch.ones(1 << 20), 1)
            case "recv":
                group.recv((4,), torch.float32, 1)
            case "large":
                group.all_reduce(torch.ones(1 << 24))
            case _:
                group.all_reduce(torch.ones(100))
    except Exception as error:
        took = time.monotonic()
        thread.join()
        if "aborted: a test says so" not in str(error):
            raise
        return took - aborted[0]
    return -1.0


@pytest.mark.parametrize(
    ("transport", "crowded"), [("shm", True), ("shm", False), ("tcp", True), ("tcp-encrypted", True)]
)
@pytest.mark.parametrize("how", ["spin", "yield", "sleep", "send", "recv", "large"])
def test_an_abort_breaks_every_wait_at_once(transport, crowded, how):
    with Ranks(wait_and_abort, 2, (how,), transport, crowded=crowded, exchange_timeout=None) as ranks:
        took = ranks.hear_outcome(0, 60)
        ranks.tell(1, 0.0)
        assert took.error == "", took.message
        assert 0 <= took.value < 2, "it was not woken"


def follow(member: Member) -> None:
    if member.rank == 0:
        member.abort.set("rank 0 gives up")
    while True:
        member.tp.barrier()
        time.sleep(0.01)


@transports
def test_when_one_rank_is_aborted_the_others_do_not_wait_for_it(transport):
    with Ranks(follow, 3, (), transport, exchange_timeout=None) as ranks:
        outcomes = ranks.outcomes(60)
    assert "rank 0 gives up" in outcomes[0].message
    assert [o.error for o in outcomes[1:]] == ["PeerLost", "PeerLost"]


def endless(member: Member, nbytes: int) -> None:
    member.tp.barrier()
    member.tell("go")
    x = torch.zeros(nbytes // 4)
    while True:
        member.tp.all_reduce(x)


@pytest.mark.parametrize("nbytes", [64, 1 << 23])
@pytest.mark.parametrize("transport", ["tcp", "tcp-encrypted"])
def test_a_killed_peer_is_noticed_over_tcp(transport, nbytes):
    with Ranks(endless, 3, (nbytes,), transport) as ranks:
        for rank in range(3):
            ranks.hear(rank)
        time.sleep(0.1)
        ranks.kill(1)
        start = time.monotonic()
        outcomes = ranks.outcomes(60)
        assert time.monotonic() - start < 1
    assert outcomes[1].signal == signal.SIGKILL
    assert [outcomes[r].error for r in (0, 2)] == ["PeerLost", "PeerLost"]
    assert "rank 1" in outcomes[0].message or "rank 1" in outcomes[2].message


@pytest.mark.parametrize("nbytes", [64, 1 << 23])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_peer_ends_in_the_time_out(number, nbytes):
    """In shared memory nobody sees a death; whoever started the ranks does, and aborts. The time-out comes last."""
    with Ranks(endless, 3, (nbytes,), exchange_timeout=1.0) as ranks:
        for rank in range(3):
            ranks.hear(rank)
        time.sleep(0.1)
        ranks.kill(1, number)
        first, last = ranks.hear_outcome(0, 60), ranks.hear_outcome(2, 60)
    assert {first.error, last.error} <= set(BROKEN)
    assert "too long" in first.message + last.message and "ank 1" in first.message + last.message


@transports
def test_a_peer_that_never_comes_ends_in_the_time_out(transport):
    with Ranks(late, 2, (), transport, exchange_timeout=0.5) as ranks:
        outcome = ranks.hear_outcome(0, 60)
        ranks.tell(1, None)
    assert outcome.error == "GroupBroken" and "rank 1" in outcome.message
    assert 0.45 < outcome.seconds < 5


def late(member: Member) -> None:
    if member.rank == 1:
        member.ask()
    else:
        member.tp.barrier()


def after_the_end(member: Member) -> str:
    member.tp.all_reduce(torch.ones(8))
    if member.rank == 1:
        time.sleep(0.1)
        return str(member.tp.recv((2,), torch.float32, 0).tolist())
    member.tp.send(torch.ones(2), 1)
    return "sent"  # and the group is closed


@transports
def test_what_was_sent_before_leaving_still_arrives(transport):
    with Ranks(after_the_end, 2, (), transport) as ranks:
        assert [o.value for o in ranks.outcomes(60)] == ["sent", "[1.0, 1.0]"]

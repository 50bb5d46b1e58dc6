"""A rank's channels: exchanges in the background and in order, messages beside them, and ranks that go."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch

from phalanx.distributed.bootstrap import Meeting
from phalanx.distributed.channels import MESSAGE_LIMIT, Channels
from phalanx.distributed.mesh import Mesh
from phalanx.distributed.transports.abort import GroupBroken
from tests.helpers.rank_spawner import Member, Ranks

KEY = bytes(range(32))
both = pytest.mark.parametrize("transport", ["shm", "tcp"])


def connected(member: Member, mesh: Mesh, transport: str) -> Channels:
    channels = Channels(mesh, member.rank, "127.0.0.1" if transport == "tcp" else None)
    if transport == "tcp":
        import msgspec

        door = channels._door
        door.address = msgspec.structs.replace(door.address, node=f"node{member.rank}")
    member.tell(channels.address)
    channels.connect(member.ask(), Meeting(0, KEY, timeout=15.0, exchange_timeout=20.0), member.ask())
    return channels


def run(function: Any, size: int, mesh: Mesh, transport: str, *, kill: int | None = None) -> list[Any]:
    with Ranks(function, size, (mesh, transport)) as ranks:
        roster = [ranks.hear(rank) for rank in range(size)]
        for rank in range(size):
            ranks.tell(rank, roster)
            ranks.tell(rank, [f"host{r}" for r in range(size)])
        if kill is not None:
            for rank in range(size):
                assert ranks.hear(rank) == "ready"
            ranks.kill(kill)
            return [ranks.hear_outcome(rank, 20) for rank in range(size) if rank != kill]
        outcomes = ranks.outcomes(40)
    assert all(outcomes), [outcome.message for outcome in outcomes]
    return [outcome.value for outcome in outcomes]


def in_order(member: Member, mesh: Mesh, transport: str) -> dict[str, Any]:
    with_threads = threading.active_count()
    channels = connected(member, mesh, transport)
    pending = [
        channels.start("tp", lambda group, i=i: group.all_reduce(torch.full((50_000,), float(i)))) for i in range(5)
    ]
    now = channels.exchange("tp", lambda group: group.all_reduce(torch.ones(3)))
    assert all(each.done for each in pending), "one that is asked for later comes later"
    assert now.tolist() == [2.0] * 3
    assert [float(each.wait()[7]) for each in pending] == [2.0 * i for i in range(5)]
    with torch.inference_mode():
        sent = channels.start("pp", lambda group: group.broadcast(torch.tensor([float(member.rank)]), 0)).wait()
        sent += 1
    told = channels.describe()
    channels.exchange("cp", lambda group: group.all_reduce(torch.ones(1)))  # nobody leaves before all are here
    channels.send_message(b"done", (member.rank + 1) % 4)
    assert channels.receive_message((member.rank - 1) % 4) == b"done"
    channels.exchange("tp", lambda group: group.all_reduce(torch.ones(1)))
    channels.exchange("pp", lambda group: group.all_reduce(torch.ones(1)))
    channels.close()
    channels.close()
    with pytest.raises(GroupBroken, match="closed"):
        channels.exchange("tp", lambda group: group.all_reduce(torch.ones(1)))
    assert threading.active_count() == with_threads
    return {"sent": float(sent), "told": told}


@both
def test_exchanges_come_in_the_order_of_their_calls(transport):
    values = run(in_order, 4, Mesh(tp=2, pp=2), transport)
    assert [value["sent"] for value in values] == [1, 2, 1, 2]
    told = values[3]["told"]
    kind = "shared memory" if transport == "shm" else "tcp"
    assert told["tp"]["ranks"] == [2, 3] and told["tp"]["transport"] == kind and told["tp"]["sliced_from_bytes"] > 1024
    assert told["cp"] == {"ranks": [3], "transport": "none"}
    assert told["messages"]["at_most_bytes"] == MESSAGE_LIMIT


def mail(member: Member, mesh: Mesh, transport: str) -> bool:
    channels = connected(member, mesh, transport)
    other = 1 - member.rank
    sent = [bytes([i % 251]) * n for i, n in enumerate((0, 1, 1000, MESSAGE_LIMIT))]

    def send() -> None:
        for data in sent:
            channels.send_message(data, other)

    sender = threading.Thread(target=send)
    sender.start()  # both ways at once
    assert [channels.receive_message(other) for _ in sent] == sent
    sender.join()
    with pytest.raises(ValueError, match="at most 65536"):
        channels.send_message(bytes(MESSAGE_LIMIT + 1), other)
    with pytest.raises(ValueError, match="no mailbox with rank"):
        channels.send_message(b"", member.rank)
    channels.exchange("tp", lambda group: group.all_reduce(torch.ones(1)))
    channels.close()
    return True


@both
def test_messages_both_ways(transport):
    assert run(mail, 2, Mesh(tp=2), transport) == [True, True]


def until_one_goes(member: Member, mesh: Mesh, transport: str) -> Any:
    channels = connected(member, mesh, transport)
    waiting = channels.start("tp", lambda group: group.recv((5,), torch.float32, 1 - group.rank))
    member.tell("ready")
    began = time.monotonic()
    with pytest.raises(GroupBroken) as heard:
        channels.receive_message((member.rank + 1) % 2 if member.rank < 2 else 0)
    with pytest.raises(GroupBroken):
        waiting.wait()
    assert time.monotonic() - began < 5
    channels.close()
    return heard.value.message


@both
def test_a_rank_that_is_killed_is_named_to_all_in_no_time(transport):
    """Also to those that share no group with it, and in shared memory, where no connection would end."""
    outcomes = run(until_one_goes, 4, Mesh(tp=2, pp=2), transport, kill=1)
    for outcome in outcomes:
        assert outcome, outcome.message
        assert "rank 1" in outcome.value.lower(), outcome.value
    assert any("rank 1 on host1 is gone: the process has ended, or has left" in o.value for o in outcomes)


def close_in_a_wait(member: Member, mesh: Mesh, transport: str) -> str:
    channels = connected(member, mesh, transport)
    if member.rank == 0:
        with pytest.raises(GroupBroken):  # until the other one has closed
            channels.receive_message(1)
        channels.close()
        return ""
    threading.Timer(0.2, channels.close).start()
    with pytest.raises(GroupBroken) as ended:
        channels.exchange("tp", lambda group: group.all_reduce(torch.ones(1000)))
    return ended.value.message


@both
def test_closing_ends_a_wait_of_another_thread(transport):
    assert "rank 1 is closed" in run(close_in_a_wait, 2, Mesh(tp=2), transport)[1]


def test_the_wait_for_a_rank_that_never_comes_ends():
    channels = Channels(Mesh(tp=2), 0, None)
    stranger = Channels(Mesh(tp=2), 1, None)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(GroupBroken, match=r"waited 0.5 s for rank 1"):
        channels.connect([channels.address, stranger.address], Meeting(0, KEY, timeout=0.5))
    stranger.close()
    assert len(os.listdir("/proc/self/fd")) < before

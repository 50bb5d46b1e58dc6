"""Who makes room at a door for the next caller."""

import contextlib
import socket

import pytest

from phalanx.distributed.callers import Callers, who_goes


def test_the_oldest_from_where_most_are_goes():
    assert who_goes({"a": "here", "b": "there", "c": "there"}) == "b"
    assert who_goes({"a": "here", "b": "there"}) == "a"
    assert who_goes({"a": "here", "b": "here"}) == "a", "nobody else's place is taken for one more from here"


def test_a_caller_that_makes_room_is_hung_up_on():
    with contextlib.ExitStack() as stack:
        pairs = [[stack.enter_context(end) for end in socket.socketpair()] for _ in range(4)]
        (other, _), (mute, far), (third, _), (late, _) = pairs
        callers = Callers(3)
        for sock, address in ((other, "10.0.0.1"), (mute, "10.0.0.2"), (third, "10.0.0.2"), (late, "10.0.0.3")):
            callers.enter(sock, address)
        far.settimeout(5)
        assert far.recv(1) == b""
        assert len(callers) == 3
        assert not callers.leave(mute)
        assert callers.leave(late) and not callers.leave(late)
        assert len(callers) == 2


@pytest.mark.parametrize("address", ["10.0.0.1", "10.0.0.2"])
def test_mute_callers_keep_nobody_out(address):
    """Nor those that call from where they are."""
    with contextlib.ExitStack() as stack:
        pairs = [[stack.enter_context(end) for end in socket.socketpair()] for _ in range(40)]
        callers = Callers()
        for mute, _ in pairs[:-1]:
            callers.enter(mute, "10.0.0.1")
        callers.enter(pairs[-1][0], address)
        assert len(callers) == 32
        assert callers.leave(pairs[-1][0])

"""`FrameStream`, on the loop that servers run on."""

from __future__ import annotations

import asyncio
import socket

import pytest

from phalanx.engine.frames import FrameStream
from phalanx.engine.front_messages import Alive, decode_from_server

uvloop = pytest.importorskip("uvloop")


@pytest.mark.parametrize("how", ["closed", "aborted"])
def test_what_is_sent_to_a_peer_that_is_gone_is_lost_and_no_error(how: str) -> None:
    """That it is gone is for the reading side to say, some turns of the loop later."""

    async def send() -> None:
        ours, theirs = socket.socketpair()
        stream = await FrameStream.over(ours, decode_from_server)
        theirs.close()
        if how == "aborted":
            stream.abort()
        for _ in range(5):
            await stream.send(Alive(1))
            await asyncio.sleep(0)
        with pytest.raises((EOFError, OSError)):
            await stream.receive()

    uvloop.run(send())

"""What a rank leaves as its last words, where it cannot say them to its executor."""

from __future__ import annotations

import pytest

from phalanx.distributed.address import Address, node_id
from phalanx.distributed.transports.abort import GroupBroken, PeerLost, Unreachable
from phalanx.executor import rank
from phalanx.executor.death import describe, kind_of
from phalanx.executor.kept_image import KeptImage, Line, socket_pair
from phalanx.executor.messages import RankStart


class Stream:
    """From an executor that says nothing until the connection ends for this reason."""

    def __init__(self, error: GroupBroken):
        self._error = error

    def send(self, *message: object) -> None:
        pass

    def receive(self, limit: int) -> tuple[int, bytes]:
        raise self._error


@pytest.mark.parametrize(
    ("error", "words", "kind"),
    [
        (
            Unreachable("the executor", 2.4),
            " (the executor has not answered for 2.4 s: the network or its node is down)",
            "network",
        ),
        (PeerLost("The connection to the executor ended."), "", "ended"),
    ],
)
def test_why_it_ended(error: GroupBroken, words: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only one direction of the network is down, its end is seen there, and would be taken for its own doing."""
    monkeypatch.setattr(rank, "_reach", lambda start, abort: Stream(error))
    ours, theirs = socket_pair()
    with theirs:
        rank.run_rank(RankStart(0, Address(-1, node_id(), "nowhere"), b""), Line("", None, theirs))
    cause = describe(0, KeptImage().take(ours) or None)
    assert cause == f"it ended with status 0{words}" and kind_of(cause) == kind

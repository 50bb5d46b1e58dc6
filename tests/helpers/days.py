"""A server of this machine with one fault that waits to be let off, and streams that are checked afterwards.

with day(model, faults="at=step,rank=1,do=kill") as (place, serving):
    oracle, clients = under_way(place, "greedy", "seeded")
    place.let_off()
    check(place, oracle, clients)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.helpers.asks import Oracle, wait_for_events
from tests.helpers.history import check_stream
from tests.helpers.pace import STEP_S
from tests.helpers.serving import Client, Serving
from tests.helpers.worlds import World


class Day(World):
    """`faults` as PHALANX_FAULT has them, let off by a file `now` of its folder; `env` for the server."""

    def __init__(self, model: str, layout: str = "tp2", faults: str = "", step_s: float = STEP_S, **env: str):
        self._own = faults
        super().__init__("mp", layout, model, step_s=step_s)
        self._env |= env

    def _faults(self) -> str:
        return f"{self._own},file={self.folder / 'now'}" if self._own else ""

    def let_off(self) -> None:
        (self.folder / "now").touch()

    @property
    def waiting(self) -> bool:
        """Whether the fault is let off and has not happened yet."""
        return (self.folder / "now").exists()


@contextlib.contextmanager
def day(
    model: str, layout: str = "tp2", faults: str = "", step_s: float = STEP_S, **env: str
) -> Iterator[tuple[Day, Serving]]:
    made = Day(model, layout, faults, step_s, **env)
    try:
        yield made, made.open(ask=False)
    finally:
        made.close()


def under_way(place: Day, *names: str) -> tuple[Oracle, list[Client]]:
    """Streams that are far from their end, as long as `place.pace` is held."""
    serving = place.open(ask=False)
    oracle = Oracle(serving, names)
    place.pace.hold()
    clients = [oracle.ask(serving, name) for name in names]
    assert wait_for_events(clients, 20 * len(clients)), serving.output
    return oracle, clients


def check(place: Day, oracle: Oracle, clients: list[Client]) -> None:
    serving = place.open(ask=False)
    place.pace.release()
    for client in clients:
        client.join(60)
        assert not client.is_alive(), serving.output
        assert check_stream(client.saw, oracle.answers[client.saw.ask]) == [], serving.output
    assert serving.at_rest(30), serving.status()


def recovering(serving: Serving) -> bool:
    return serving.status()["state"] == "recovering"

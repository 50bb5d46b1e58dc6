"""What a server process knows of others that share its engines: `Siblings`. `Alone` has none."""

from __future__ import annotations

from typing import Protocol

from phalanx.config import ServerConfig
from phalanx.engine.front_messages import ServerProcess
from phalanx.metrics.counts import Counts
from phalanx.server.places import Places, bytes_for


def owners(server: ServerConfig) -> int:
    """Numbers that a request's owner may have: one for each API key, and 0 for nobody in particular."""
    return 1 + len(set(server.api_key))


class Siblings(Protocol):
    places: Places
    """Over all of them."""
    has_engines: bool
    """This process has started the engines, so that it counts what becomes of them."""

    def servers(self) -> list[ServerProcess]:
        """All of them; empty where there is one process for everything."""
        ...

    async def counts(self, own: Counts) -> list[Counts]:
        """What all have counted; `own` is what this one has."""
        ...


class Alone:
    has_engines = True

    def __init__(self, server: ServerConfig):
        self.places = Places(bytearray(bytes_for(1, owners(server))), owners(server))

    def servers(self) -> list[ServerProcess]:
        return []

    async def counts(self, own: Counts) -> list[Counts]:
        return [own]

"""How ranks exchange tensors: `--transport`. What `bootstrap` connects is right for where the ranks are (`auto`); a
`Transport` may put something before it, or in its place, for each group of more than one rank.

    auto      shared memory, TCP between nodes, NCCL between GPUs
    packed    the same, and large tensors between nodes as 8-bit integers (`transports.compressed`)

An installed package may supply others (entry points `phalanx.transports`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from phalanx import plug_ins
from phalanx.distributed.address import Address
from phalanx.distributed.collectives import OpenGroup
from phalanx.distributed.transports.abort import Abort
from phalanx.distributed.transports.compressed import AT_LEAST, CompressedGroup


@dataclass(frozen=True)
class Link:
    """What a transport may want to know of a group, apart from its rank and size."""

    axis: str
    """Of the mesh: `tp`, `pp`, `cp` or `dp`."""
    members: tuple[Address, ...]
    """Where each rank of the group is."""
    abort: Abort
    """Every wait must end with GroupBroken when it is set (`fileno`, `check`)."""
    timeout: float | None
    """Seconds that one exchange may take."""

    @property
    def between_nodes(self) -> bool:
        return len({member.node for member in self.members}) > 1


class Transport(Protocol):
    def connect(self, group: OpenGroup, link: Link) -> OpenGroup:
        """This rank's way into the group for one epoch: `group`, which is connected and works, or one that does as the
        protocol says in its place. All ranks of the group call it at the same time, so they may meet through `group`.
        Whoever gets the result closes it; it closes `group`."""
        ...


class Automatic:
    def connect(self, group: OpenGroup, link: Link) -> OpenGroup:
        return group


class Packed:
    def __init__(self, at_least: int = AT_LEAST):
        """From so many bytes on."""
        self._at_least = at_least

    def connect(self, group: OpenGroup, link: Link) -> OpenGroup:
        return CompressedGroup(group, self._at_least) if link.between_nodes else group


_OWN: Mapping[str, Callable[[], Any]] = {"auto": Automatic, "packed": Packed}


def make_transport(name: str) -> Transport:
    """Raises ConfigError."""
    made: Transport = plug_ins.make(plug_ins.TRANSPORT, "--transport", name, _OWN, ("connect",))
    return made

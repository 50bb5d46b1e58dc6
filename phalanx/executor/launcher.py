"""What an executor asks of whoever starts its ranks, and how the model is laid out over them. Only declares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from phalanx.distributed.mesh import Mesh
from phalanx.executor.messages import RankStart
from phalanx.worker.capacity import Capacity


class Layout(msgspec.Struct, frozen=True):
    """How the model is laid out over ranks: what the launcher and `Begin` need."""

    mesh: Mesh
    tensor_weights: tuple[tuple[float, ...], ...] = ()
    """Shares of each stage's tensor ranks; empty is even."""
    stage_layers: tuple[int, ...] = ()
    """Empty is even."""

    def __str__(self) -> str:
        """`3 ranks in stages of 2 and 1`."""
        ranks, widths = self.mesh.world_size, self.mesh.widths
        if ranks == 1:
            return "1 rank"
        if len(widths) == 1:
            return f"{ranks} tensor ranks"
        if max(widths) == 1:
            return f"{ranks} pipeline stages"
        return f"{ranks} ranks in stages of {', '.join(map(str, widths[:-1]))} and {widths[-1]}"


class Launcher(Protocol):
    """Starts and ends rank processes. A rank's death is noticed by the hub; the launcher knows what it died of.

    Ranks are in seats, at first rank r in seat r (`phalanx.executor.seating`). `available`, `arriving`, `assign` and
    `capacity` are only called where the layout may change."""

    @property
    def host(self) -> str | None:
        """This node's address when ranks run on other nodes, which makes the hub listen there; None keeps it local.
        Asked for once, before the first launch; the seats are found then. Raises UserError, WorkerDied; nothing is
        left then."""
        ...

    def launch(self, starts: list[RankStart]) -> None:
        """Start these ranks; returns at once. Raises UserError when they cannot be placed."""
        ...

    def kill(self, rank: int) -> None:
        """End a rank that is still there; returns when it is gone, or cannot be reached any more."""
        ...

    def cause(self, rank: int, wait: float = 0.0) -> str | None:
        """What a dead rank died of, such as "it was killed by SIGKILL (…)"; None when it is not known to be dead. Waits
        up to `wait` seconds to get to know it."""
        ...

    def close(self) -> None:
        """End every process that was started. Idempotent; `launch` may be called again."""
        ...

    def available(self) -> set[int]:
        """The seats where a rank runs or could be started now. Does not wait."""
        ...

    def arriving(self) -> set[int]:
        """The seats that are about to be available: their place is there and is being looked at. Does not wait."""
        ...

    def assign(self, seats: Sequence[int]) -> None:
        """From now on rank r is at `seats[r]`. No rank is there at this moment."""
        ...

    def node(self, seat: int) -> str:
        """The name of its node, for people."""
        ...

    def capacity(self, seat: int) -> Capacity | None:
        """The device that a rank there has, or has with others, as its node measured it; None where nobody did. Known
        after `host`."""
        ...

"""`Replicas`: the engine processes behind one front end, and another in the place of one that is lost.

On one machine they share it: each has cores of its own (none is pinned where a control group's quota counts cores, or
when there are more replicas than cores), and as many threads. The front end is not pinned. What each may have of the
memory is decided with the rest of the configuration (`planner.resolution`). On several nodes, and on Ray, the engine
processes are here all the same and each has its ranks elsewhere: only tokens and plans come here. Does not send
requests.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Mapping
from functools import partial

from phalanx.config import EngineConfig, ParallelConfig
from phalanx.engine.replica import Replica
from phalanx.executor.base import StartProgress
from phalanx.executor.kept_image import KeptImage
from phalanx.executor.progress import in_words


class Replicas:
    """`config` need not be resolved, but must have passed `layout_rules`. `doors` are where the nodes of each
    replica call, by number, if they are open already."""

    def __init__(
        self,
        config: ParallelConfig,
        *,
        progress: StartProgress | None = None,
        doors: Mapping[int, socket.socket] | None = None,
    ):
        self._config = config
        self._doors = doors or {}
        self._places = _places(config.data_parallel_size, here=config.replicas_share_machine)
        self._lives = [itertools.count(2) for _ in self._places]
        self._images = [KeptImage() for _ in self._places]
        self._prepared: tuple[EngineConfig, str] | None = None
        shared = SharedProgress(progress, len(self._places)) if progress is not None else None
        self.first = [self._new(n, None if shared is None else partial(shared, n)) for n in range(len(self._places))]
        """Those that begin; `spawn` and `configure` are for them."""

    def _new(self, number: int, progress: StartProgress | None = None, life: int = 1) -> Replica:
        cores, threads = self._places[number]
        door = self._doors.get(number)
        return Replica(
            progress=progress,
            life=life,
            number=number,
            door=door,
            cores=cores,
            threads=threads,
            ranks=self._config.forks_ranks(number),
            kept=self._images[number],
        )

    def spawn(self) -> None:
        """Start the processes."""
        for replica in self.first:
            replica.spawn()

    def configure(self, config: EngineConfig, name: str) -> None:
        """As `Replica.configure`."""
        self._prepared = (config, name)
        for replica in self.first:
            replica.configure(config, name)

    @property
    def makers(self) -> list[Callable[[], Replica]]:
        """For each, what gives another one in its place, not started."""
        return [partial(self._another, number) for number in range(len(self._places))]

    def ended(self, number: int) -> None:
        """There will be no other in this one's place."""
        self._images[number].let_go()

    def _another(self, number: int) -> Replica:
        replica = self._new(number, life=next(self._lives[number]))
        if self._prepared is not None:
            replica.configure(*self._prepared)
        return replica


def _places(count: int, *, here: bool) -> list[tuple[tuple[int, ...], int]]:
    """Cores and threads of each; (), 0 leaves both to the system."""
    if not here:
        return [((), 0)] * count
    from phalanx.executor.multiprocess import place_ranks

    return place_ranks(count)


class SharedProgress:
    """One progress of several that load at the same time: the phase that not all have passed, and the mean share."""

    def __init__(self, report: StartProgress, count: int):
        self._report = report
        self._phases: list[str] = []
        """In the order in which they were first seen, which is that of each."""
        self._at = [(-1, 0.0)] * count

    def __call__(self, number: int, phase: str, share: float, behind: str) -> None:
        """What one says."""
        if phase not in self._phases:
            self._phases.append(phase)
        self._at[number] = (self._phases.index(phase), share)
        last = max(0, min(position for position, _ in self._at))
        shares = [min(1.0, max(0.0, own)) if at == last else float(at > last) for at, own in self._at]
        words = behind if len(shares) == 1 else in_words("replica", dict(enumerate(shares)))
        self._report(self._phases[last], sum(shares) / len(shares), words)

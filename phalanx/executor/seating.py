"""Where ranks may run, and what happens when a place is lost: wait for it, split the model anew over those that are
left, and take a place that has come back in again.

A seat is a place for one rank: seat 3 is where rank 3 of the layout runs that the engine was started with. A seat is
*free to use* when its launcher says that a rank can be started there, and it has not been *rested*: where ranks fail to
start again and again, none is started for a while, longer each time. Decides; starts and ends nothing. How the model is
split over given seats is decided above (`Choose`), where the model and the planner are known.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from phalanx.errors import NotEnoughMemory, UserError
from phalanx.executor.base import NoCapacity, Shares
from phalanx.executor.launcher import Launcher, Layout
from phalanx.worker.capacity import Capacity
from phalanx.worker.limits import Memory

log = logging.getLogger(__name__)

TRIES = 2
"""Starts in a row that may fail in a place, before it is given up."""

REST_S = 10.0
"""How long a place that was given up is left alone; twice as long the next time."""

MOST_REST_S = 600.0

ARRIVAL_S = 10.0
"""How much longer a lost place is waited for that has come back in time, and is being looked at."""

_LOOK_S = 0.1


@dataclass(frozen=True)
class Seat:
    """A place that is left, for whoever chooses a layout."""

    number: int
    node: str
    memory: Memory | None
    """Bytes without ranks of ours, where that is known; several seats of a host have a part of its memory each."""
    speed: float | None = None
    """As in `Capacity`, where that was measured; several seats of a host have a part of it each."""


@dataclass(frozen=True)
class Choice:
    layout: Layout
    seats: tuple[int, ...]
    """Of each rank."""
    longest: int = 0
    """Tokens of the longest request that is sure to fit; 0 where that is --max-model-len."""

    def told(self, places: Launcher) -> str:
        """For people."""
        nodes = ", ".join(dict.fromkeys(places.node(seat) for seat in self.seats))
        limit = f" There is room for requests of {self.longest} tokens; longer ones wait." if self.longest else ""
        return f"{self.layout}, on {nodes}.{limit}"


def node_of(places: Launcher, seating: Seating | None, rank: int) -> str:
    """The name of the node of a rank that may not have joined."""
    return places.node(rank if seating is None else seating.now.seats[rank])


class NoFit(Exception):
    """The model does not fit; the text says what is missing."""


Choose = Callable[[Sequence[Seat]], Choice]
"""Splits the model over some of these seats. Raises NoFit."""

Share = Callable[[Sequence[Seat]], tuple[Layout, str]]
"""Shares for all of these seats, when ranks have places and are not started yet; and why they are so. Raises UserError
for a model that does not fit."""


@dataclass
class _Rest:
    until: float
    seconds: float


class Seating:
    """The seats of one executor. `patience` in seconds is how long a lost place is waited for."""

    def __init__(
        self, layout: Layout, places: Launcher, choose: Choose, patience: float, share: Share | None = None
    ):  # fmt: skip
        self._whole, self._places, self._choose, self._patience = layout, places, choose, patience
        self._share = share
        self.shares: Shares | None = None
        """Of the layout with all seats, where `share` has decided them."""
        self._all = tuple(range(layout.mesh.world_size))
        self.now = Choice(layout, self._all)
        self._since: float | None = None
        """When the first place was missed since all ranks were ready."""
        self._failures: Counter[int] = Counter()
        """Starts that failed in each seat since then."""
        self._given_up: set[int] = set()
        """Seats, since then."""
        self._resting: dict[int, _Rest] = {}
        self._added: set[int] = set()
        """Seats that are being taken in again."""
        self._memory: dict[int, Mapping[str, int]] = {}
        self._devices: dict[int, str] = {}
        self._lock = threading.Lock()
        """Held while places are asked."""

    @property
    def is_whole(self) -> bool:
        return self.now.seats == self._all

    def begin(self) -> bool:
        """Before the first start: decide shares that are not decided, and whether there is no place for some ranks, so
        that `now` is another layout. Raises NotEnoughMemory when the model does not fit what is there."""
        usable = self.usable()
        if usable >= set(self._all):
            self._share_out()
            self.now = Choice(self._whole, self._all)
            return False
        try:
            self.now = self._choice(usable)
        except NoFit as error:
            raise NotEnoughMemory(f"The model does not fit the places that are there: {error}.") from None
        return True

    def _share_out(self) -> None:
        """Raises UserError."""
        if self._share is None or self.shares is not None:
            return
        seats = []
        for seat in self._all:
            found = self._capacity(seat, self._all)
            memory, speed = (None, None) if found is None else (found.memory, found.speed)
            seats.append(Seat(seat, self._places.node(seat), memory, speed))
        self._whole, why = self._share(seats)
        self.shares = Shares(self._whole.tensor_weights, self._whole.stage_layers, why)
        log.log(logging.INFO if all(seat.memory for seat in seats) else logging.WARNING, "Shares are %s.", why)

    def settle(self, lost: Iterable[int], over: Callable[[], bool]) -> bool:
        """What to do now that these ranks are lost. False: start them again, where they were. True: `now` is another
        layout; all ranks begin anew. Waits for lost places until they are back or `over()`; a place that was given up
        is as good as lost, though its rank may live. Raises NoCapacity."""
        ranks = sorted(lost)
        wanted = {self.now.seats[rank] for rank in ranks} | (self._given_up & set(self.now.seats))
        self._since = self._since or time.monotonic()
        while True:
            usable = self.usable()
            sure = usable - self._given_up
            if wanted <= sure:
                return not wanted and self._grow(usable)
            missing = wanted - usable - self._given_up
            grace = ARRIVAL_S if missing <= self._places.arriving() else 0.0
            if self._late(grace) or not missing or over():
                break
            time.sleep(_LOOK_S)
        try:
            self.now = self._choice(sure)
        except NoFit as error:
            if wanted <= usable:
                return False  # they have rested
            why, first = "it cannot be started again, and the model does not fit what is left", min(wanted)
            rank = self.now.seats.index(first)
            raise NoCapacity(rank, why, missing=str(error), node=self._places.node(first)) from None
        self._begin_anew()
        return True

    def _begin_anew(self) -> None:
        self._since = None
        self._failures.clear()
        self._given_up.clear()

    def _late(self, grace: float = 0.0) -> bool:
        return self._since is not None and time.monotonic() - self._since > self._patience + grace

    def _grow(self, usable: set[int]) -> bool:
        """Nobody is missing: take in again what has come back."""
        found = self._larger(usable)
        if found is None:
            return False
        self._added = set(found.seats) - set(self.now.seats)
        self.now = found
        return True

    def _larger(self, usable: set[int]) -> Choice | None:
        if usable <= set(self.now.seats):
            return None
        try:
            found = self._choice(usable)
        except NoFit:
            return None
        return found if len(found.seats) > len(self.now.seats) else None

    def _choice(self, usable: set[int]) -> Choice:
        if usable == set(self._all):
            try:
                self._share_out()  # some may have been missing from the start
            except UserError as error:
                raise NoFit(error.message) from None
            return Choice(self._whole, self._all)
        if not usable:
            raise NoFit("a place for at least one rank")
        return self._choose(self._offers(sorted(usable)))

    def more(self) -> str | None:
        """What could be taken in again, in words."""
        if self.is_whole:
            return None
        found = self._larger(self.usable())
        if found is None:
            return None
        back = sorted(set(found.seats) - set(self.now.seats))
        nodes = list(dict.fromkeys(self._places.node(seat) for seat in back))
        return f"{len(back)} more place{'s' if len(back) > 1 else ''} on {', '.join(nodes)}"

    def usable(self) -> set[int]:
        with self._lock:
            available = self._places.available()
        now = time.monotonic()
        return {seat for seat in available if seat not in self._resting or self._resting[seat].until <= now}

    # -- what happened

    def failed(self, rank: int, *, surely: bool) -> bool:
        """A start failed, it seems because of this rank; `surely`: the next would too. Whether another layout is worth
        a try at once."""
        if self._added:  # it went well without them
            given_up, self._added = self._added, set()
        else:
            seat = self.now.seats[min(rank, len(self.now.seats) - 1)]
            self._failures[seat] += 1
            given_up = {seat} if surely or self._failures[seat] >= TRIES or self._late() else set()
        self._given_up |= given_up
        for seat in given_up:
            self._rest(seat)
        return bool(given_up)

    def ready(self, memory: Sequence[Mapping[str, int]], devices: Sequence[str]) -> None:
        """All ranks are; each rank's memory and device as in `WorkerStatus`."""
        for seat, used, device in zip(self.now.seats, memory, devices, strict=True):
            self._memory[seat], self._devices[seat] = used, device
            self._resting.pop(seat, None)
        self._added = set()
        self._begin_anew()

    def _rest(self, seat: int) -> None:
        before, now = self._resting.get(seat), time.monotonic()
        if before is not None and before.until > now:
            return
        seconds = REST_S if before is None else min(2 * before.seconds, MOST_REST_S)
        self._resting[seat] = _Rest(now + seconds, seconds)

    # -- memory

    def _offers(self, seats: Sequence[int]) -> list[Seat]:
        offers = []
        for seat in seats:
            found = self._capacity(seat, seats)
            speed = None if found is None else found.speed
            offers.append(Seat(seat, self._places.node(seat), self._room(seat, seats), speed))
        return offers

    def _capacity(self, seat: int, seats: Sequence[int]) -> Capacity | None:
        """What a rank there has where `seats` are used."""
        found = self._places.capacity(seat)
        node = self._places.node(seat)
        return None if found is None else found.part(sum(self._places.node(s) == node for s in seats))

    def _room(self, seat: int, seats: Sequence[int]) -> Memory | None:
        """What ranks had and what was free beside them when they were ready last. A host's memory is its ranks' in
        common, a GPU's is one rank's."""
        if seat not in self._memory:
            return None
        node, sharers = self._places.node(seat), 1
        counted = [seat]
        if self._devices[seat] == "cpu":
            counted = [s for s in self._memory if self._places.node(s) == node]
            sharers = sum(self._places.node(s) == node for s in seats)
        parts = ("weights", "kv_cache", "free")
        size = sum(self._memory[s].get(part, 0) for s in counted for part in parts) // sharers
        return Memory(size, size)

"""How a loss of workers is made good: when it is tried, how often, and what is said about it.

    Recoveries  the account of losses: back-off and budget, the `Recovery` that `/status` shows, the lines of the log
    Restarts    the thread on which the executor starts its workers again, so that the engine's loop goes on

One recovery reaches from a loss to the next committed token. Losses and failed tries on the way belong to it, and do
not change what it is the recovery from. Its budget is a time (`recovery_timeout`) and a number of tries in a row;
waiting for missing devices costs time only.

Covers no requests and no scheduling. `Recoveries` reads no clock: `now` is seconds on the engine's clock, `wall` is
wall-clock time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import msgspec

from phalanx.config import RecoveryConfig
from phalanx.engine.client import Recovery
from phalanx.errors import PhalanxError
from phalanx.executor.base import CacheLayout, ExecutorLost, NoCapacity, WorkerDied

log = logging.getLogger(__name__)

BACK_OFF_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Before the first try, the second in a row, …; the last one repeats."""
MAX_TRIES = 8
"""In a row, without a token committed in between. With the waits between them they take half a minute at least."""
CAPACITY_S = 2.0
"""Between two looks for missing devices."""
KEPT = 8
"""Recoveries that are remembered."""


class Recoveries:
    def __init__(self, config: RecoveryConfig, load_s: float | None = None, replica: int | None = None) -> None:
        """`load_s` is how long loading took, for the first estimate; `replica` is which one this is, of several."""
        self._config = config
        self._load_s = load_s
        self.engine = "engine process" + (f" of replica {replica}" if replica is not None else "")
        """For people."""
        self._elsewhere = False
        """Other replicas took the requests of the one that was lost."""
        self.current: Recovery | None = None
        """The one under way."""
        self.finished: tuple[Recovery, ...] = ()
        """Oldest first."""
        self.failures: dict[str, int] = {}
        """Losses by kind."""
        self._what = ""
        """What the one under way is about, in words."""
        self.next_try: float | None = None
        """When to begin anew; None while workers are starting or there is nothing to begin."""
        self._tries = 0
        """Since the last committed token."""
        self._noticed = 0.0
        self._spent_from = 0.0
        """Since when the time of the budget runs."""

    @property
    def waits_for_devices(self) -> bool:
        return self.current is not None and self.current.plan == "wait"

    def lost(
        self, cause: WorkerDied, epoch: int, now: float, wall: float, *,
        open_requests: int, tokens: int, elsewhere: bool = False,
    ) -> str:  # fmt: skip
        """Workers are gone; `tokens` were computed for the requests that they worked on, and `epoch` comes next.
        `elsewhere`: other replicas take the requests. Returns in words what the recovery is about: the first loss."""
        self.count(cause)
        self._elsewhere = elsewhere
        name = f"Rank {cause.rank}" if cause.rank >= 0 else f"The {self.engine}"
        what = f"{name}{f' on {cause.node}' if cause.node else ''} was lost: {cause.cause}"
        before = self.current
        if before is None:
            self._noticed = self._spent_from = now
        if before is None or before.kind == "regained":
            self._what = what
            self.current = Recovery(
                epoch=epoch,
                rank=cause.rank,
                node=cause.node,
                kind=cause.kind,
                cause=cause.cause,
                since=wall if before is None else before.since,
                plan="restart",
                estimate=self._estimate(),
                detection_s=cause.silent,
                recomputed=tokens + (0 if before is None else before.recomputed),
            )
        else:
            self._change(
                epoch=epoch,
                plan="restart",
                missing="",
                last_try=self._why(cause),
                estimate=self._estimate(),
                reload_s=None,
                recomputed=tokens + before.recomputed,
            )
        self._plan_next(now)
        noticed = f" (noticed after {cause.silent:.2f} s)" if cause.silent is not None else ""
        then = _in_others(open_requests, "go on", "goes on") if elsewhere else _waiting(open_requests)
        log.warning("%s%s. Recovering: %s.", what, noticed, then)
        return self._what

    def regained(self, what: str, epoch: int, now: float, wall: float, *, open_requests: int, tokens: int) -> str:
        """`what` has come back and is taken in; as `lost` otherwise."""
        self._noticed = self._spent_from = now
        self._what = what
        self.current = Recovery(
            epoch, -1, "", "regained", what, wall, "split", estimate=self._estimate(), recomputed=tokens
        )
        self.next_try = now
        log.warning("%s. Taking it in: %s.", what, _waiting(open_requests))
        return what

    def count(self, cause: WorkerDied) -> None:
        self.failures[cause.kind] = self.failures.get(cause.kind, 0) + 1

    def seen(self, now: float) -> Recovery | None:
        """The one under way, as of now."""
        return self.current and msgspec.structs.replace(self.current, lasted=now - self._noticed)

    def time_left(self, now: float) -> float:
        """Seconds of the budget; below 0 when it is spent."""
        return self._config.recovery_timeout - (now - self._spent_from)

    def begin(self, epoch: int) -> None:
        """Workers start now."""
        self._tries += 1
        self.next_try = None
        if self.current is not None:
            self.current = msgspec.structs.replace(self.current, epoch=epoch)

    def failed(self, error: Exception, now: float, *, open_requests: int) -> None:
        """They did not start."""
        if isinstance(error, WorkerDied) and not isinstance(error, NoCapacity):
            self.count(error)
        if isinstance(error, NoCapacity):
            self._tries -= 1
            self.next_try = now + CAPACITY_S
            if not self.waits_for_devices:
                left = max(0.0, self.time_left(now))
                log.warning(
                    "What is left is not enough to go on: %s. Trying again for %.0f s; %s.",
                    error.missing.rstrip("."), left, _waiting(open_requests),
                )  # fmt: skip
            self._change(plan="wait", missing=error.missing, last_try="", estimate=None)
            return
        if isinstance(error, ExecutorLost):
            self._tries = MAX_TRIES
        self._plan_next(now)
        self._change(plan="restart", missing="", last_try=self._why(error))
        if not self.exhausted(now):
            delay = (self.next_try or now) - now
            log.warning("The workers could not be started again: %s Trying again in %g s.", _sentence(error), delay)

    def restarted(self, now: float, plan: str, epoch: int) -> None:
        """All workers are ready; what is missing is a token."""
        self.next_try = None
        self._change(plan=plan, missing="", epoch=epoch, reload_s=now - self._noticed)

    def proven(self, now: float, *, resumed: int, ranks: int) -> str:
        """A token is committed: the recovery is over. Returns it in words."""
        self._tries = 0
        lasted = now - self._noticed
        self._change(first_token_s=lasted, lasted=lasted, resumed=resumed)
        done, self.current = self.current, None
        if done is None:
            return ""
        self.finished = (*self.finished, done)[-KEPT:]
        what = f"rank {done.rank} was" if done.rank >= 0 else f"the {self.engine} was"
        how = f"{what if done.kind != 'regained' else 'the workers were'} started again"
        if done.plan == "split":
            how = f"the model was split over {ranks} rank{'s' * (ranks != 1)}"
        goes_on = f"{resumed} request{'s go' if resumed != 1 else ' goes'} on"
        if self._elsewhere:
            goes_on = _in_others(resumed, "went on", "went on")
        line = (
            f"Recovered in {done.first_token_s or 0:.1f} s: {how} in {done.reload_s or 0:.1f} s, "
            f"next token after {done.first_token_s or 0:.1f} s; {goes_on}, {done.recomputed} tokens were computed again"
        )
        log.warning("%s.", line)
        return line

    def explained(self, now: float) -> None:
        """The cause is known and gone: the budget begins anew."""
        self._tries, self._spent_from = 0, now
        self.next_try = now

    def exhausted(self, now: float) -> bool:
        """The budget is spent: nothing helps."""
        if self.current is None:
            return False
        return self.time_left(now) < 0 or (self.next_try is not None and self._tries >= MAX_TRIES)

    def _plan_next(self, now: float) -> None:
        self.next_try = now + BACK_OFF_S[min(self._tries, len(BACK_OFF_S) - 1)]

    def _why(self, error: Exception) -> str:
        """A failed try in words."""
        if not isinstance(error, WorkerDied):
            return _sentence(error).rstrip(".")
        return f"{f'rank {error.rank}' if error.rank >= 0 else f'the {self.engine}'}: {error.cause}"

    def _change(self, **fields: object) -> None:
        if self.current is not None:
            self.current = msgspec.structs.replace(self.current, **fields)

    def _estimate(self) -> float | None:
        """As long as the latest ones took, in the median; before there are any, as long as loading."""
        times = sorted(done.first_token_s for done in self.finished if done.first_token_s is not None)
        return times[len(times) // 2] if times else self._load_s


def _waiting(count: int) -> str:
    return f"{count} request{'s wait' if count != 1 else ' waits'}"


def _in_others(count: int, several: str, one: str) -> str:
    return f"its {count} request{f's {several}' if count != 1 else f' {one}'} in the other replicas"


def _sentence(error: Exception) -> str:
    text = str(error) if isinstance(error, PhalanxError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split()).rstrip(".") + "."


@dataclass(frozen=True)
class Outcome:
    epoch: int
    layout: CacheLayout | None
    error: Exception | None = None
    """Set when `layout` is not."""


class Restarts:
    """One thread for the life of the engine: what ends with the thread that started it must not end early."""

    def __init__(self, restart: Callable[[int], CacheLayout]) -> None:
        """`restart(epoch)` may raise anything."""
        self._restart = restart
        self._orders: SimpleQueue[int | None] = SimpleQueue()
        self._done = threading.Event()
        self._outcome: Outcome | None = None
        self._thread: threading.Thread | None = None
        self.busy = False
        """From `begin` until `outcome` has given the end of it."""

    def begin(self, epoch: int) -> None:
        """Only when not busy."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="phalanx-restart", daemon=True)
            self._thread.start()
        self.busy = True
        self._done.clear()
        self._orders.put(epoch)

    def outcome(self, wait_s: float) -> Outcome | None:
        """How it ended; None when it has not within `wait_s` seconds."""
        if not self._done.wait(wait_s):
            return None
        self.busy = False
        return self._outcome

    def _run(self) -> None:
        while (epoch := self._orders.get()) is not None:
            try:
                self._outcome = Outcome(epoch, self._restart(epoch))
            except Exception as error:
                self._outcome = Outcome(epoch, None, error)
            self._done.set()

    def close(self, wait_s: float = 5.0) -> None:
        """Once what it calls has been told to end."""
        if self._thread is not None:
            self._orders.put(None)
            self._thread.join(wait_s)

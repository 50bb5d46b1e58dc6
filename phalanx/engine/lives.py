"""`Lives`: one engine through all of its processes. When one is lost, another is started in its place.

When and how often it is tried, and what is said about it, is what `Recoveries` says of workers too: at once, then with
growing pauses, so many times in a row, for so long; the engine process is rank -1. What the front end knows of it is
added to the engine's own status: epochs go on growing, counters go on counting. A recovery is over when a token has
moved again: a request's, or a probe's when nobody waits.

Does not know which requests there are; its owner says how many and sends them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import platform
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from phalanx.checkpoint.fingerprint import changed
from phalanx.config import RecoveryConfig
from phalanx.engine.client import EngineClient, EngineInfo, EngineLost, EngineRequest, EngineStatus, Recovery
from phalanx.engine.recovery import KEPT, Recoveries
from phalanx.errors import ClusterMissing, NotEnoughMemory, PhalanxError
from phalanx.executor.base import NoCapacity, WorkerDied
from phalanx.sampling_params import SamplingParams

log = logging.getLogger(__name__)

ENGINE_RANK = -1
PROBE_AFTER_S = 0.05
"""Those who wait have the first word."""
PROBE_S = 30.0
"""For the step that shows that an idle engine computes."""
SLOWER = 3.0
"""A start may take so many times what the first one took, even beyond `recovery_timeout`."""

SUMMED = (
    "running", "waiting", "blocks", "free_blocks", "preemptions",
    "prefix_queries", "prefix_hits", "computed_tokens", "speculation", "step_seconds", "step",
)  # fmt: skip
"""Fields of EngineStatus that several engines add up to."""
_COUNTERS = SUMMED[4:]
"""Those that only grow while a process lives."""


@dataclass(frozen=True)
class Unfinished:
    """What an engine's requests lose with it."""

    requests: int = 0
    tokens: int = 0
    """Computed before, to be computed again."""
    explained: bool = False
    """The request that ended it is known and will not run again."""
    elsewhere: bool = False
    """Other engines take them at once."""


class Lives:
    """`make` gives another client of the same engine, not started; without it, or with recovery switched off, the
    first life is the only one. `lost` is told of each loss and says what is unfinished; `at_work` says how many
    requests are there now; `changed` is called when some may be sent again, or never more; `renewed` with the facts of
    each new process; `ended` when there will be none any more; `replica` is which one this is, of several."""

    def __init__(
        self,
        client: EngineClient,
        make: Callable[[], EngineClient] | None,
        config: RecoveryConfig,
        *,
        lost: Callable[[], Unfinished],
        at_work: Callable[[], int],
        changed: Callable[[], None],
        renewed: Callable[[EngineInfo], None] = lambda info: None,
        ended: Callable[[], None] = lambda: None,
        replica: int | None = None,
    ):
        self.client = client
        self.gone: EngineLost | None = None
        """Set once nothing helps any more."""
        self._make = make if config.enable_recovery else None
        self._config = config
        self._tell_lost, self._at_work, self._changed, self._renewed = lost, at_work, changed, renewed
        self._ended = ended
        self._replica = replica
        self._account = Recoveries(config)
        self._down = False
        self._weights = ""
        """What the first life has read."""
        self._start_s = 0.0
        """What a start took."""
        self._base = EngineStatus(state="ready")
        """Epochs and counts of former lives."""
        self._former: list[Recovery] = []
        """Recoveries that former lives made themselves."""
        self._unfinished = Unfinished()
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> EngineInfo:
        """The first life. Raises UserError, EngineDead."""
        info = await self._timed_start(self.client, None)
        self._weights = info.weights
        self._account = Recoveries(self._config, self._start_s, self._replica)
        self._keep(self._watch())
        return info

    async def _timed_start(self, client: EngineClient, seconds: float | None) -> EngineInfo:
        began = time.monotonic()
        try:
            async with asyncio.timeout(seconds):
                info = await client.start()
        except TimeoutError:
            raise EngineLost("The engine did not start in time.", "it did not start in time", kind="hung") from None
        self._start_s = time.monotonic() - began
        return info

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def usable(self) -> bool:
        """Whether a request may be sent there now."""
        return not self._down and self.gone is None and self.client.status().state not in ("failed", "loading")

    @property
    def ready(self) -> bool:
        """Usable, and nothing is wrong with it."""
        return not self._down and self.gone is None and self.client.status().state == "ready"

    @property
    def comes_back(self) -> bool:
        """Not usable now, but it may be again."""
        return self.gone is None and not self.usable

    # Losses

    async def _watch(self) -> None:
        while self.gone is None:
            loss = await self.client.lost()
            if self._closed:
                return
            try:
                await self._replace(loss)
            except Exception as error:
                log.exception("the engine could not be started again")
                self.gone = EngineLost(f"{loss.message} {error}", f"{loss.cause}; then {type(error).__name__}")
            self._changed()
        self._ended()

    async def _replace(self, loss: EngineLost) -> None:
        """Another life for the one that is lost, or none any more."""
        old = self.client
        self.note(old, loss)
        if self._make is None:
            self.gone = loss
            log.error("%s Recovery is off: requests end with errors until the server is restarted.", loss.message)
            return
        await old.close()  # its memory is needed
        failure: PhalanxError = loss
        while not self._account.exhausted(time.monotonic()):
            await asyncio.sleep(max(0.0, (self._account.next_try or 0.0) - time.monotonic()))
            self._account.begin(self._base.epoch)
            client = self._make()
            try:
                info = await self._timed_start(client, self._left())
                if info.weights != self._weights:
                    raise changed(f"{info.model} on {platform.node()}")
            except PhalanxError as error:
                await client.close()
                failure = error
                self._account.failed(_as_death(error), time.monotonic(), open_requests=self._unfinished.requests)
                self._changed()
                continue
            except BaseException:
                await client.close()
                raise
            self.client, self._down = client, False
            self._account.restarted(time.monotonic(), "restart", self._base.epoch)
            self._keep(self._prove(client))
            self._renewed(info)
            return
        message = (
            loss.message if failure is loss else f"{loss.message} It could not be started again: {failure.message}"
        )
        self.gone = EngineLost(message, loss.cause, kind=loss.kind, fix=failure.fix)

    def _left(self) -> float:
        """Seconds that a start may take."""
        return max(self._account.time_left(time.monotonic()), SLOWER * self._start_s, 1.0)

    def note(self, client: EngineClient, loss: EngineLost) -> None:
        """`client` is lost: keep what it counted, and begin a recovery. Whoever sees it first says so, before anything
        is sent elsewhere; the others are late."""
        if self._down or client is not self.client:
            return
        base, status = self._base, self.client.status()
        for name in _COUNTERS:
            setattr(base, name, getattr(base, name) + getattr(status, name))
        base.failures, base.ranks = added(base.failures, status.failures), status.ranks
        self._former = [*self._former, *_later(status.recoveries, base.epoch)][-KEPT:]
        base.epoch += status.epoch + 1
        self._down = True
        self._unfinished = self._tell_lost()
        if self._make is None:
            self._account.count(_as_death(loss))
            return
        now, wall = time.monotonic(), time.time()
        if self._unfinished.explained:
            self._account.explained(now)
        if status.recovery is not None and self._account.current is None:
            now -= status.recovery.lasted  # it died over one of its own: that time counts
            wall -= status.recovery.lasted
        self._account.lost(
            _as_death(loss),
            base.epoch,
            now,
            wall,
            open_requests=self._unfinished.requests,
            tokens=self._unfinished.tokens,
            elsewhere=self._unfinished.elsewhere,
        )
        self._changed()

    async def _prove(self, client: EngineClient) -> None:
        """One token by a request of our own if nobody else has one there: an idle engine, too, is to be known to
        compute before it is called ready."""
        await asyncio.sleep(PROBE_AFTER_S)
        while self._at_work() and self.client is client and not self._down:
            if self._account.current is None:
                return
            await asyncio.sleep(PROBE_AFTER_S)
        request = EngineRequest("probe", [0], SamplingParams(max_tokens=1, temperature=0.0, seed=0))
        with contextlib.suppress(PhalanxError, TimeoutError):
            async with asyncio.timeout(PROBE_S), aclosing(client.generate(request)) as outputs:
                async for output in outputs:
                    if output.token_ids:
                        self.moved()

    def moved(self) -> None:
        """A token came from the present life."""
        if self._account.current is not None:
            self._account.proven(time.monotonic(), resumed=self._unfinished.requests, ranks=1)

    # What is known

    def status(self) -> EngineStatus:
        base, current = self._base, self._account.seen(time.monotonic())
        if self._down:  # its numbers are in the base already
            status = msgspec.structs.replace(base, state="recovering")
            theirs = []
        else:
            status = msgspec.structs.replace(self.client.status())
            theirs = _later(status.recoveries, base.epoch)
            if status.recovery is not None:
                (status.recovery,) = _later([status.recovery], base.epoch)
            status.epoch += base.epoch
            for name in _COUNTERS:
                setattr(status, name, getattr(status, name) + getattr(base, name))
            status.failures = added(base.failures, status.failures)
        status.failures = added(status.failures, self._account.failures)
        finished = [*self._former, *theirs, *self._account.finished]
        status.recoveries = sorted(finished, key=lambda each: each.since)[-KEPT:]
        if self.gone is not None:
            status.state, status.cause, status.recovery = "failed", self.gone.message, None
        elif current is not None:
            status.state = "recovering"
            if status.recovery is None:
                status.recovery, status.since = current, current.since
                status.cause = f"The {self._account.engine} was lost: {current.cause}."
        return status

    # The end

    async def drain(self, timeout: float) -> bool:
        return self._down or await self.client.drain(timeout)

    async def close(self) -> None:
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.client.close()
        self._ended()


def added(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    """Both counts together."""
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


def _later(recoveries: list[Recovery], epochs: int) -> list[Recovery]:
    """`recoveries` of a process before which `epochs` had passed."""
    return [msgspec.structs.replace(each, epoch=each.epoch + epochs) for each in recoveries] if epochs else recoveries


def _as_death(error: PhalanxError) -> WorkerDied:
    """What ended the engine process, or kept it from starting, as the death of rank -1."""
    node = platform.node()
    if isinstance(error, EngineLost):
        return WorkerDied(ENGINE_RANK, error.cause, node=node, kind=error.kind, silent=error.silent)
    if isinstance(error, NotEnoughMemory | ClusterMissing):
        return NoCapacity(ENGINE_RANK, error.message, missing=error.message, node=node)
    return WorkerDied(ENGINE_RANK, error.message.rstrip("."), node=node)

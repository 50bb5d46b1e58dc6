"""How a step turns, and what happens when it breaks.

`Engine` owns the scheduler and an executor. A step is: plan, submit, collect, apply. As many plans are in flight as the
executor takes; results are collected in the order of their plans. When the workers are lost, everything they knew is
given up and everyone starts again from the tokens committed so far: nothing is repeated, lost or changed.

    ready ── a loss: fence ── recovering: restart on a thread, again after a while ── a token is committed ── ready
                                          └── the budget is spent ── failed

Guarantees: each accepted request gets an output without tokens first, and ends in exactly one output with a finish
reason, whatever happens to the workers. One request's trouble (its grammar, its row) ends that request only, and one
that ends its workers each time it runs is refused alone. `step` returns within moments while workers start again.

Not here: processes, sockets, text. One thread uses an engine at a time; only `status` may be called from others.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from phalanx import fault_point
from phalanx.config import EngineConfig
from phalanx.engine.client import EngineOutput, EngineRequest, EngineStatus, request_error
from phalanx.engine.compiling import Compilations
from phalanx.engine.poison import Quarantine, refusal
from phalanx.engine.recovery import CAPACITY_S, Recoveries, Restarts
from phalanx.engine.request import Grammar, Request, error_output
from phalanx.engine.scheduler import Scheduler
from phalanx.errors import EngineDead, InvalidRequest, Recovering
from phalanx.executor.base import CacheLayout, Executor, WorkerDied
from phalanx.metrics.speculation import SpeculationCounts
from phalanx.sampling_params import SamplingParams, StructuredOutputs
from phalanx.step import StepResult

log = logging.getLogger(__name__)

_WAIT_S = 0.02
"""How long a step with nothing else to do waits: for a grammar, or for workers."""

_LOOK_S = 1.0
"""Between two looks for devices that have come back."""
_QUIET_S = 60.0
"""How long what has come back waits for a quiet moment."""

PROBE = "\0probe"
"""The id of the request that shows, when nobody else asks for anything, that the workers work."""
_PROBE = EngineRequest(PROBE, [0], SamplingParams(max_tokens=1, temperature=0.0, seed=0), cache_salt=PROBE)


class Engine:
    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        layout: CacheLayout,
        *,
        compile_grammar: Callable[[StructuredOutputs], Grammar] | None = None,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
        load_s: float | None = None,
        life: int = 1,
        debug: bool = False,
    ) -> None:
        """`config` is resolved, `executor` started with `layout`, which took `load_s` seconds. `life` counts the engine
        processes in this one's place. `debug` checks all invariants when idle."""
        self._config, self._ranks = config.recovery, config.parallel.world_size
        self._executor = executor
        self._clock, self._pause = clock, pause
        self._life = life
        self._debug = debug
        self._max_model_len = config.model.max_model_len or layout.blocks * layout.block_size
        self._scheduler = Scheduler(
            config.scheduler,
            layout,
            prefix_caching=config.cache.enable_prefix_caching,
            max_in_flight=executor.max_in_flight,
        )
        self._compilations = Compilations(compile_grammar)
        self._arrivals = itertools.count()
        self._in_flight: deque[Future[StepResult]] = deque()
        self._outputs: list[EngineOutput] = []
        self._recoveries = Recoveries(config.recovery, load_s)
        self._restarts = Restarts(self._restart)
        self._quarantine = Quarantine()
        self._starting = False
        """Workers are lost and not ready again; nothing is planned."""
        self._interrupted: set[str] = set()
        """Requests that ran when workers were lost; those that were given up since are not counted."""
        self._tokens_before = 0
        """Output tokens of all requests when the workers became ready again."""
        self._probing = False
        self._look_again = 0.0
        """When to ask next whether something has come back."""
        self._back: str | None = None
        """What has, in words."""
        self._wanted_from: float | None = None
        """Since when something has."""
        self._failure: Exception = EngineDead("The engine gave up.")
        """The latest."""
        self._shape = self._layout_of_workers()
        self._dead: EngineDead | None = None
        self.turns = 0
        """Calls of `step` and `tick`: the loop is alive."""
        self.committed_step = 0
        self.changed = threading.Event()
        """Set whenever the state changes; whoever waits for it clears it."""
        self._heartbeat = time.time()
        self._state: tuple[str, str | None, float] = ("ready", None, time.time())

    # Requests

    def add(self, request: EngineRequest) -> None:
        """Accept `request`. Raises InvalidRequest, QueueFull, Recovering (while devices are missing, unless it has been
        accepted before), or EngineDead."""
        if self._dead is not None:
            raise self._dead
        current = self._recoveries.current
        if current is not None and current.plan == "wait" and not request.output_token_ids:
            raise Recovering(
                f"The server waits for what was lost: {current.missing.rstrip('.')}.",
                fix="Try again later.",
                retry_after=max(5.0, CAPACITY_S),
            )
        if request.request_id == PROBE:
            raise InvalidRequest("This id is the engine's own.", param="request_id")
        now = self._clock()
        accepted = Request.create(request, next(self._arrivals), now, self._max_model_len)
        if request.request_id in self._compilations:
            raise InvalidRequest("A request with this id is already running.", param="request_id")
        self._scheduler.check(accepted, now, elsewhere=len(self._compilations))
        if request.sampling.structured_outputs is None:
            self._scheduler.add(accepted, now)
        else:
            self._compilations.start(accepted, request.sampling.structured_outputs)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests; their blocks are free at once, or with the result of the plan they are in. Ids that are
        not running are ignored."""
        for request_id in request_ids:
            if request_id in self._compilations:
                request = self._compilations.cancel(request_id)
                self._outputs.append(EngineOutput(request_id, request.num_output, finish_reason="abort"))
            else:
                self._scheduler.abort(request_id, self._clock())

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to say."""
        return bool(
            self._dead
            or self._outputs
            or self._compilations
            or self._scheduler.has_work
            or self._recoveries.current is not None
        )

    # The step

    def step(self) -> list[EngineOutput]:
        """Plan, submit, collect, apply; returns what is new. When workers are lost, this and the next steps see to it
        that they are replaced. When nothing helps, every request gets an error output, and the next call raises
        EngineDead."""
        if self._dead is not None:
            raise self._dead
        self.turns += 1
        self._heartbeat = time.time()
        self._add_compiled()
        if self._starting:
            self._await_workers()
        if not self._starting and self._dead is None:
            try:
                self._turn()
            except WorkerDied as cause:
                self.recover(cause)
        return self._take_outputs()

    def _turn(self) -> None:
        """Raises WorkerDied."""
        scheduler, now = self._scheduler, self._clock()
        if self._recoveries.current is not None and len(scheduler.requests) == len(scheduler.parked):
            self._probe()
        if scheduler.parked:
            scheduler.end_parked(now - self._config.recovery_timeout, now)
        what = self._returned(now) if now >= self._look_again else None
        if what is not None:
            self._take_in(what)
            return
        while (alone := self._quarantine.alone) is not None and alone in scheduler.parked:
            self._quarantine.ended(alone)  # it cannot be tried now, and nobody shall wait for that
        scheduler.only = alone
        while len(self._in_flight) < self._executor.max_in_flight:
            plan = scheduler.schedule(self._clock())
            if plan is None:
                break
            self._in_flight.append(self._executor.submit(plan))
        if self._in_flight:
            result = self._in_flight.popleft().result()
            fault_point.reach("before_commit", step=result.step_id, life=self._life)
            self._outputs += scheduler.apply(result, self._clock())
            self.committed_step = result.step_id
            fault_point.reach("after_commit", step=result.step_id, life=self._life)
        elif scheduler.requests:
            self._pause(_WAIT_S)  # all of them are parked

    def _returned(self, now: float) -> str | None:
        """What has come back and is worth an interruption: nobody runs, somebody is too long for the cache without it,
        or it has waited long enough."""
        self._look_again = now + _LOOK_S
        able = self._config.enable_recovery and self._recoveries.current is None
        what = self._back = self._executor.wants_restart if able else None
        if what is None:
            self._wanted_from = None
            return None
        if self._wanted_from is None:
            self._wanted_from = now
        if self._scheduler.running and not self._scheduler.parked and now - self._wanted_from < _QUIET_S:
            return None
        self._wanted_from = None
        return what

    def _add_compiled(self) -> None:
        idle = not (self._outputs or self._scheduler.has_work or self._starting)
        for request, error in self._compilations.take_done(_WAIT_S if idle else 0.0):
            if error is None:
                self._scheduler.add(request, self._clock())
            else:
                self._outputs.append(error_output(request, request_error(error)))

    def _take_outputs(self) -> list[EngineOutput]:
        outputs, self._outputs = self._outputs + self._scheduler.take_outputs(), []
        if self._recoveries.current is not None or self._quarantine or self._probing:
            outputs = self._note(outputs)
        if self._debug and not self.has_work:
            self._scheduler.check_invariants()
        return outputs

    def _note(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        """What `outputs` say about a recovery; returns those that are a client's."""
        failed = False
        for output in outputs:
            if output.token_ids:
                self._quarantine.made(output.request_id, len(output.token_ids))
            if output.finish_reason is not None:
                self._quarantine.ended(output.request_id)
            if output.finish_reason in ("abort", "error"):
                self._interrupted.discard(output.request_id)
            if output.request_id == PROBE and output.finish_reason is not None:
                self._probing = False
                failed |= output.finish_reason == "error"
        # A probe that ended in an error has come back from the workers as well.
        if not self._starting and (failed or self._scheduler.counters.output_tokens > self._tokens_before):
            self._proven()
        return [output for output in outputs if output.request_id != PROBE]

    # When it breaks

    def recover(self, cause: WorkerDied) -> None:
        """The workers cannot be trusted any more: what is in flight is dropped, everyone waits again, the cache and its
        index are empty. Their restart begins."""
        at_work, tokens, now = self._fence()
        self._failure = cause
        if not self._config.enable_recovery:
            self._recoveries.count(cause)
            self._die(cause)
            return
        refused = self._quarantine.lost(at_work if cause.kind != "network" else [])
        waiting = self._open_requests() - len(refused)
        epoch, wall = self._scheduler.epoch, time.time()
        self._become("recovering", self._recoveries.lost(cause, epoch, now, wall, open_requests=waiting, tokens=tokens))
        self._quarantined(refused, now)
        self._try_restart()

    def _take_in(self, what: str) -> None:
        """Nothing is lost: workers start again so that `what` has come back is used."""
        self._back = None
        _, tokens, now = self._fence()
        epoch, wall = self._scheduler.epoch, time.time()
        waiting = self._open_requests()
        self._become(
            "recovering", self._recoveries.regained(what, epoch, now, wall, open_requests=waiting, tokens=tokens)
        )
        self._try_restart()

    def _fence(self) -> tuple[list[str], int, float]:
        """Give up what the workers know and do. Returns who was being computed, how many tokens are to be computed
        again, and the time."""
        scheduler, now = self._scheduler, self._clock()
        at_work = [request_id for request_id in scheduler.at_work() if request_id != PROBE]
        ran = [request for request in scheduler.running if request.request_id != PROBE]
        tokens = sum(request.num_computed for request in ran)
        self._in_flight.clear()
        scheduler.fence(now)
        scheduler.abort(PROBE, now)
        self._interrupted.update(request.request_id for request in ran)
        self._starting = True
        return at_work, tokens, now

    def _open_requests(self) -> int:
        return len(self._scheduler.requests) + len(self._compilations)

    def _quarantined(self, refused: list[str], now: float) -> None:
        for request_id in refused:
            log.warning("Request %r was at work each time, at last alone: it is refused, the others go on.", request_id)
            self._scheduler.fail(self._scheduler.requests[request_id], refusal(), now)
            self._recoveries.explained(now)
        if self._quarantine.suspects:
            log.warning(
                "Requests that were at work at each of the latest losses are tried one at a time: %d.",
                len(self._quarantine.suspects),
            )

    def _restart(self, epoch: int) -> CacheLayout:
        """On a thread of its own."""
        fault_point.reach("recover", step=self._scheduler.step_id, life=self._life)
        return self._executor.restart(epoch)

    def _try_restart(self) -> None:
        """Begin to start workers, when it is time and the thread is free."""
        next_try = self._recoveries.next_try
        if next_try is not None and not self._restarts.busy and self._clock() >= next_try:
            self._recoveries.begin(self._scheduler.epoch)
            self._restarts.begin(self._scheduler.epoch)

    def _await_workers(self) -> None:
        """A moment at most."""
        now = self._clock()
        if self._recoveries.exhausted(now):
            self._die(self._failure)
            return
        self._try_restart()
        if not self._restarts.busy:
            self._pause(min(_WAIT_S, max(0.0, (self._recoveries.next_try or now) - now)))
            return
        outcome = self._restarts.outcome(_WAIT_S)
        if outcome is None or outcome.epoch != self._scheduler.epoch:
            return  # not yet; or workers of an epoch that something else has ended
        if outcome.layout is not None:
            self._resume(outcome.layout)
        elif outcome.error is not None:
            self._failed_restart(outcome.error)

    def _failed_restart(self, error: Exception) -> None:
        self._failure = error
        now, scheduler = self._clock(), self._scheduler
        self._recoveries.failed(error, now, open_requests=self._open_requests())
        scheduler.fence(now)  # the next try is a new epoch
        self.changed.set()

    def _resume(self, layout: CacheLayout) -> None:
        now, scheduler = self._clock(), self._scheduler
        scheduler.restart(layout, now, max_in_flight=self._executor.max_in_flight)
        shape, before = self._layout_of_workers(), self._shape
        self._shape = shape
        self._recoveries.restarted(now, "restart" if shape == before else "split", scheduler.epoch)
        self._starting = False
        self._tokens_before = scheduler.counters.output_tokens

    def _proven(self) -> None:
        """A token was committed: the workers work."""
        if self._recoveries.current is None:
            return
        resumed = len(self._interrupted)
        self._interrupted.clear()
        self._become("ready", self._recoveries.proven(self._clock(), resumed=resumed, ranks=len(self._shape)))

    def _probe(self) -> None:
        """Have a step run that no client asked for."""
        self._probing = True
        self._scheduler.add(Request.create(_PROBE, next(self._arrivals), self._clock(), 2), self._clock())

    def _layout_of_workers(self) -> list[tuple[int, str, int]]:
        return [(worker.rank, worker.layers, worker.heads) for worker in self._executor.check_health()]

    def _die(self, cause: Exception) -> None:
        self._become("failed", str(cause))
        self._dead = EngineDead(f"The engine lost its workers and could not go on: {cause}", fix="Restart the server.")
        self._scheduler.fail_all(self._dead, self._clock())
        for request in self._compilations.cancel_all():
            self._outputs.append(error_output(request, request_error(self._dead)))

    def close(self) -> None:
        """End the compiling threads and the executor. Idempotent."""
        self._compilations.close()
        self._executor.close()
        self._restarts.close()

    # What it looks like from outside

    def tick(self) -> None:
        """The loop is alive; called by it when there is nothing to do. Workers that were lost meanwhile are noticed."""
        self.turns += 1
        self._heartbeat = time.time()
        if self.has_work:
            return
        if any(worker.state in ("dead", "recovering") for worker in self._executor.check_health()):
            self._probe()  # it ends with the word of what was lost
        elif self._clock() >= self._look_again and (what := self._returned(self._clock())) is not None:
            self._take_in(what)

    @property
    def progress(self) -> int:
        """As `Executor.progress`."""
        return self._executor.progress

    def _become(self, state: str, cause: str | None = None) -> None:
        before, _, since = self._state
        self._state = (state, cause, since if state == before else time.time())
        self.changed.set()

    def status(self) -> EngineStatus:
        """A snapshot; never waits for compute. May be called from any thread."""
        scheduler, counters = self._scheduler, self._scheduler.counters
        state, cause, since = self._state
        return EngineStatus(
            state=state,
            epoch=scheduler.epoch,
            step=scheduler.step_id,
            cause=cause,
            since=since,
            running=len(scheduler.running),
            waiting=len(scheduler.queue) + len(self._compilations) + len(scheduler.parked),
            blocks=scheduler.pool.blocks,
            free_blocks=scheduler.pool.num_free,
            preemptions=counters.preemptions,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            computed_tokens=counters.computed_tokens,
            speculation=counters.speculation + SpeculationCounts(),
            step_seconds=counters.step_seconds,
            heartbeat=self._heartbeat,
            ranks=self._ranks,
            returned=self._back,
            workers=self._executor.check_health(),
            recovery=self._recoveries.seen(self._clock()),
            recoveries=list(self._recoveries.finished),
            failures=dict(self._recoveries.failures),
            hang_bound=self._executor.hang_bound,
        )

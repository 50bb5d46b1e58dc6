"""How a step turns, and what happens when it breaks.

`Engine` owns the scheduler and an executor. A step is: plan, submit, collect, apply. As many plans are in flight as the
executor takes; results are collected in the order of their plans. When the workers are lost, everything they knew is
given up and everyone starts again from the tokens committed so far: nothing is repeated, lost or changed.

Guarantees: each accepted request gets an output without tokens first, and ends in exactly one output with a finish
reason, whatever happens to the workers. One request's trouble (its grammar, its row) ends that request only.

Not here: processes, sockets, text. One thread uses an engine at a time; only `status` may be called from others.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from phalanx.config import EngineConfig
from phalanx.engine.client import EngineOutput, EngineRequest, EngineStatus, request_error
from phalanx.engine.compiling import Compilations
from phalanx.engine.request import Grammar, Request, error_output
from phalanx.engine.scheduler import Scheduler
from phalanx.errors import EngineDead, InvalidRequest, PhalanxError
from phalanx.executor.base import CacheLayout, Executor, WorkerDied
from phalanx.sampling_params import StructuredOutputs
from phalanx.step import StepResult

MAX_RECOVERIES = 3
"""In a row, without a token committed in between."""

_COMPILE_WAIT_S = 0.02
"""How long a step with nothing else to do waits for a grammar."""


class Engine:
    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        layout: CacheLayout,
        *,
        compile_grammar: Callable[[StructuredOutputs], Grammar] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        debug: bool = False,
    ) -> None:
        """`config` is resolved, `executor` started with `layout`. `debug` checks all invariants when idle."""
        self._executor = executor
        self._clock = clock
        self._wall_clock = wall_clock
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
        self._recoveries = 0
        self._tokens_at_recovery = 0
        self._dead: EngineDead | None = None
        self._heartbeat = wall_clock()
        self._become("ready")

    # Requests

    def add(self, request: EngineRequest) -> None:
        """Accept `request`. Raises InvalidRequest, QueueFull, or EngineDead."""
        if self._dead is not None:
            raise self._dead
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
        return bool(self._dead or self._outputs or self._compilations or self._scheduler.has_work)

    # The step

    def step(self) -> list[EngineOutput]:
        """Plan, submit, collect, apply; returns what is new. Lost workers are replaced on the way. When that fails too
        often, every request gets an error output, and the next call raises EngineDead."""
        if self._dead is not None:
            raise self._dead
        self.tick()
        self._add_compiled()
        try:
            while len(self._in_flight) < self._executor.max_in_flight:
                plan = self._scheduler.schedule(self._clock())
                if plan is None:
                    break
                self._in_flight.append(self._executor.submit(plan))
            if self._in_flight:
                result = self._in_flight.popleft().result()
                self._outputs += self._scheduler.apply(result, self._clock())
        except WorkerDied as cause:
            self.recover(cause)
        return self._take_outputs()

    def _add_compiled(self) -> None:
        idle = not (self._outputs or self._scheduler.has_work)
        for request, error in self._compilations.take_done(_COMPILE_WAIT_S if idle else 0.0):
            if error is None:
                try:
                    self._scheduler.add(request, self._clock())
                except InvalidRequest as refusal:  # it fitted when it came; the cache has shrunk
                    error = refusal
            if error is not None:
                self._outputs.append(error_output(request, request_error(error)))

    def _take_outputs(self) -> list[EngineOutput]:
        outputs, self._outputs = self._outputs + self._scheduler.take_outputs(), []
        if self._debug and not self.has_work:
            self._scheduler.check_invariants()
        return outputs

    # When it breaks

    def recover(self, cause: WorkerDied) -> None:
        """Begin a new epoch: everyone waits again, the cache and its index are empty, the workers know nothing."""
        self._become("recovering", str(cause))
        self._in_flight.clear()
        self._scheduler.requeue_all()
        committed = self._scheduler.counters.output_tokens
        if committed > self._tokens_at_recovery:
            self._recoveries = 0
        self._tokens_at_recovery = committed
        epoch = self._scheduler.epoch
        failure: PhalanxError = cause
        while self._recoveries < MAX_RECOVERIES:
            self._recoveries += 1
            epoch += 1
            try:
                layout = self._executor.restart(epoch)
            except PhalanxError as error:
                failure = error
                continue
            self._scheduler.restart(epoch, layout, self._clock())
            self._become("ready", str(cause))
            return
        self._die(failure)

    def _die(self, cause: PhalanxError) -> None:
        self._become("failed", str(cause))
        self._dead = EngineDead(f"The engine lost its workers and could not go on: {cause}", fix="Restart the server.")
        self._scheduler.fail_all(self._dead, self._clock())
        for request in self._compilations.cancel_all():
            self._outputs.append(error_output(request, request_error(self._dead)))

    def close(self) -> None:
        """End the compiling threads and the executor. Idempotent."""
        self._compilations.close()
        self._executor.close()

    # What it looks like from outside

    def tick(self) -> None:
        """The loop is alive; called by it when there is nothing to do."""
        self._heartbeat = self._wall_clock()

    def _become(self, state: str, cause: str | None = None) -> None:
        self._state, self._cause, self._since = state, cause, self._wall_clock()

    def status(self) -> EngineStatus:
        """A snapshot; never waits for compute."""
        scheduler, counters = self._scheduler, self._scheduler.counters
        return EngineStatus(
            state=self._state,
            epoch=scheduler.epoch,
            step=scheduler.step_id,
            cause=self._cause,
            since=self._since,
            running=len(scheduler.running),
            waiting=len(scheduler.queue) + len(self._compilations),
            blocks=scheduler.pool.blocks,
            free_blocks=scheduler.pool.num_free,
            preemptions=counters.preemptions,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            computed_tokens=counters.computed_tokens,
            step_seconds=counters.step_seconds,
            heartbeat=self._heartbeat,
            workers=self._executor.check_health(),
        )

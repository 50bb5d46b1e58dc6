"""One worker in this process: the reference that every other executor must equal.

`submit` computes at once and returns a finished future. Nothing can be lost but by an exception in a step; that is
reported as WorkerDied with the exception as its cause, and `restart` begins anew with the weights that are there. When
the process is lost, the next one finds them with a `Keeper`, if there is one.
"""

from __future__ import annotations

import typing
from concurrent.futures import CancelledError, Future

import msgspec

from phalanx.config import EngineConfig
from phalanx.distributed.pulse import Pulse
from phalanx.executor.base import CacheLayout, StartProgress, WorkerDied, WorkerStatus
from phalanx.executor.step_future import StepFuture
from phalanx.fault_point import reach
from phalanx.step import StepPlan, StepResult

if typing.TYPE_CHECKING:
    from phalanx.loading.image import Keeper
    from phalanx.worker.worker import Worker


class InProcessExecutor:
    max_in_flight = 1

    def __init__(self, *, keeper: Keeper | None = None, weights: str = "", life: int = 1):
        """`keeper` and `weights` as in `open_worker`; `life` counts the processes in this one's place."""
        self._keeper, self._weights, self._life = keeper, weights, life
        self._worker: Worker | None = None
        self._ready: WorkerStatus | None = None
        """When it was last ready: measuring takes milliseconds, and the engine asks twenty times a second."""
        self._pulse = Pulse()

    def start(self, config: EngineConfig, progress: StartProgress | None = None) -> CacheLayout:
        """As `Executor.start`. Raises UserError; a worker that breaks while starting raises what broke it."""
        from phalanx.worker.worker import open_worker

        if self._worker is not None:
            raise RuntimeError("the executor has been started already")

        def loading(phase: str, share: float) -> None:
            if phase == "weights" and 0.5 < share < 1.0:
                reach("fill", rank=0, life=self._life)
            if progress is not None:
                progress(phase, share, "")

        worker = open_worker(config, pulse=self._pulse, weights=self._weights, keeper=self._keeper)
        try:
            reach("load", rank=0, life=self._life)
            worker.load(loading)
            layout = worker.allocate(loading)
        except BaseException:
            worker.close()
            raise
        self._worker, self._ready = worker, worker.status()
        return layout

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """As `Executor.submit`. KeyboardInterrupt and SystemExit pass through."""
        try:
            result = self._running().run(plan)
        except Exception as error:
            return StepFuture(_died(error))
        return StepFuture(CancelledError() if result is None else result)

    def restart(self, epoch: int) -> CacheLayout:
        worker = self._running()
        if epoch <= worker.epoch:
            raise ValueError(f"epoch {epoch} does not come after epoch {worker.epoch}")
        worker.reset(epoch)
        self._ready = worker.status()
        return worker.layout()

    @property
    def wants_restart(self) -> str | None:
        return None

    @property
    def hang_bound(self) -> float:
        """Whoever watches this process watches its worker."""
        return 0.0

    @property
    def progress(self) -> int:
        return self._pulse.count

    def check_health(self) -> list[WorkerStatus]:
        worker, ready = self._worker, self._ready
        if worker is None or ready is None:
            return []
        return [msgspec.structs.replace(ready, state=worker.state)]

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _running(self) -> Worker:
        if self._worker is None:
            raise WorkerDied(0, "it is closed or was never started")
        return self._worker


def _died(error: Exception) -> WorkerDied:
    if isinstance(error, WorkerDied):
        return error
    died = WorkerDied(0, f"{type(error).__name__}: {error}".rstrip(".: "))
    died.__cause__ = error
    return died

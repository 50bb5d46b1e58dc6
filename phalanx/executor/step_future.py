"""A plan's result as a future that costs next to nothing: one of the standard library has a lock and a queue."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future

from phalanx.step import StepResult


class StepFuture(Future[StepResult]):
    """One thread asks for it, so it is made, told and asked without a lock; nobody can have himself called when it is
    there."""

    def __init__(self, outcome: StepResult | BaseException | None = None):
        """None: it is on its way."""
        self._outcome = outcome

    __repr__ = object.__repr__

    def result(self, timeout: float | None = None) -> StepResult:
        if isinstance(self._outcome, StepResult):
            return self._outcome
        raise self._outcome or CancelledError()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            self.result(timeout)
        except CancelledError:
            raise
        except Exception as error:
            return error
        return None

    def done(self) -> bool:
        return self._outcome is not None

    def running(self) -> bool:
        return False

    def cancelled(self) -> bool:
        return isinstance(self._outcome, CancelledError)

    def cancel(self) -> bool:
        self._outcome = self._outcome or CancelledError()
        return self.cancelled()

    def set_result(self, result: StepResult) -> None:
        self._outcome = result

    def set_exception(self, exception: BaseException | None) -> None:
        self._outcome = exception

"""A step's result on its way, as the hub's `submit` returns it."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from phalanx.step import StepPlan, StepResult, unpack


class Collector(Protocol):
    def collect(self, wanted: Pending) -> None:
        """Fetch results, in order, until `wanted` has its own."""
        ...


class Pending(Future[StepResult]):
    """Whoever asks for it fetches results until it is there: no thread in between."""

    def __init__(self, executor: Collector, plan: StepPlan):
        super().__init__()
        self._executor = executor
        self._rows = plan.rows

    @property
    def tokens(self) -> int:
        """Of its step."""
        return sum(unpack(self._rows.num_tokens, "H")) + len(unpack(self._rows.proposed))

    def result(self, timeout: float | None = None) -> StepResult:
        if not self.done():
            self._executor.collect(self)
        return super().result(timeout)

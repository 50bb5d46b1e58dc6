"""The numbers of an engine that metrics export, without a dependency on the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.metrics.speculation import SpeculationCounts


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    state: str
    epoch: int
    steps: int
    step_seconds: float
    running: int
    waiting: int
    blocks: int
    free_blocks: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    computed_tokens: int
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)
    failures: dict[str, int] = field(default_factory=dict)
    """Losses of workers and engine processes, by kind."""

    @property
    def kv_usage(self) -> float:
        return 1 - self.free_blocks / self.blocks if self.blocks else 0.0

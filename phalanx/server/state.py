"""What the routes of one application share: the engine, the configuration, requests in flight, metrics, and what is
known of the server's condition. Does not speak HTTP."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from phalanx.config import EngineConfig
from phalanx.errors import ModelNotFound
from phalanx.metrics.engine_snapshot import EngineSnapshot
from phalanx.metrics.serving import ServingMetrics
from phalanx.server.bodies import BodyReader
from phalanx.server.request_fields import UnknownFields
from phalanx.server.streaming import InFlight

if TYPE_CHECKING:
    from phalanx.engine.async_engine import AsyncEngine


class ServerState:
    def __init__(self, engine: AsyncEngine, config: EngineConfig):
        self.engine = engine
        self.config = config
        self.created = int(time.time())
        self.draining = False
        self.in_flight = InFlight(config.server.request_timeout)
        self.bodies = BodyReader(config.limits.max_body_bytes)
        self.unknown_fields = UnknownFields()
        self.metrics = ServingMetrics(self.model_name, self.snapshot)
        self.long_texts = asyncio.Semaphore(1)
        """Held while /tokenize and /detokenize work on a thread, so that they cannot take all of them."""

    # Condition

    def phase(self) -> str:
        """loading, ready, recovering, draining or failed."""
        if self.draining:
            return "draining"
        state = self.engine.status().state
        return "loading" if state == "ready" and self.engine.chat_template is None else state

    def why_not_ready(self) -> str | None:
        """None when a request would be answered now."""
        phase = self.phase()
        return None if phase in ("ready", "recovering") else self._reason(phase)

    def why_not_alive(self) -> str | None:
        """None unless only a restart can help. The engine's clients call it failed when it is gone, and when it shows
        no sign of life for much longer than its slowest step took."""
        phase = self.engine.status().state
        return self._reason(phase) if phase == "failed" and not self.draining else None

    def _reason(self, phase: str) -> str:
        cause = self.engine.status().cause
        return f"{phase}: {cause}" if cause else phase

    def snapshot(self) -> EngineSnapshot:
        status = self.engine.status()
        return EngineSnapshot(
            state=self.phase(),
            epoch=status.epoch,
            steps=status.step,
            step_seconds=status.step_seconds,
            running=status.running,
            waiting=status.waiting,
            blocks=status.blocks,
            free_blocks=status.free_blocks,
            preemptions=status.preemptions,
            prefix_queries=status.prefix_queries,
            prefix_hits=status.prefix_hits,
            computed_tokens=status.computed_tokens,
        )

    # Model

    def model_names(self) -> tuple[str, ...]:
        """Every name that requests may use; the first is the one reported. Empty while nothing is known."""
        if self.config.model.served_model_name:
            return self.config.model.served_model_name
        info = getattr(self.engine, "info", None)
        return (info.model,) if info is not None else ()

    def model_name(self) -> str:
        names = self.model_names()
        return names[0] if names else self.config.model.model or ""

    def check_model(self, asked: str | None) -> str:
        """The name to answer with. Raises ModelNotFound."""
        names = self.model_names()
        if asked is None:
            return self.model_name()
        if asked not in names:
            raise ModelNotFound(
                f"The model '{asked[:200]}' does not exist.", fix=f"This server has {', '.join(names)}.", param="model"
            )
        return asked

    @property
    def max_model_len(self) -> int:
        return self.engine.config.model.max_model_len or self.engine.info.max_model_len

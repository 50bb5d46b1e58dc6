"""What the routes of one application share: the engine, the configuration, requests in flight, metrics, and what is
known of the server's condition. Does not speak HTTP."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from phalanx.config import EngineConfig
from phalanx.engine.client import EngineStatus
from phalanx.errors import ModelNotFound
from phalanx.metrics.engine_snapshot import EngineSnapshot
from phalanx.metrics.serving import ServingMetrics
from phalanx.server.bodies import BodyReader
from phalanx.server.request_fields import UnknownFields
from phalanx.server.siblings import Alone, Siblings
from phalanx.server.streaming import InFlight

if TYPE_CHECKING:
    from phalanx.engine.async_engine import AsyncEngine


class ServerState:
    def __init__(self, engine: AsyncEngine, config: EngineConfig, siblings: Siblings | None = None):
        """`siblings` are the other server processes of the same engines; None: there are none."""
        self.engine = engine
        self.siblings: Siblings = siblings or Alone(config.server)
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

    def status(self) -> EngineStatus:
        """The engine's, with recoveries counted that are over since the last look."""
        status = self.engine.status()
        if self.siblings.has_engines:
            self.metrics.recoveries.look(status.recoveries)
        return status

    def phase(self, status: EngineStatus | None = None) -> str:
        """loading, ready, recovering, draining or failed."""
        if self.draining:
            return "draining"
        state = (status or self.engine.status()).state
        return "loading" if state == "ready" and self.engine.chat_template is None else state

    def admission(self) -> str:
        """As far as it matters to a request that comes in: loading, draining, or anything else. Costs nothing, however
        many engines there are."""
        if self.draining:
            return "draining"
        return self.engine.phase if self.engine.chat_template is not None else "loading"

    def snapshot(self) -> EngineSnapshot:
        status = self.status()
        return EngineSnapshot(
            state=self.phase(status),
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
            speculation=status.speculation,
            failures=status.failures,
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

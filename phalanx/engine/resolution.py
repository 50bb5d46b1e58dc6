"""Where a front end asks the model's own configuration and the machine what `auto` means. Reads no weights.

The one place of the engine layer that knows recipes and hardware facts (neither needs torch); the engine itself
receives what is decided here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.config import EngineConfig, resolve

if TYPE_CHECKING:
    from phalanx.checkpoint.locate import Checkpoint


def resolved(config: EngineConfig, checkpoint: Checkpoint) -> EngineConfig:
    """`config` without automatic values. Raises ConfigError, UnsupportedModel."""
    from phalanx.models.registry import read_spec
    from phalanx.planner.hardware import detect

    return resolve(config, read_spec(checkpoint.config), detect())

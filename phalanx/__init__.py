"""Phalanx serves large language models split over many workers, and keeps serving when some of them die."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from phalanx.cluster.messages import Request as Request
    from phalanx.cluster.messages import Response as Response
    from phalanx.cluster.messages import SamplingConfig as SamplingConfig
    from phalanx.cluster.ray_config import RayConfig as RayConfig
    from phalanx.cluster.ray_engine import RayDistributedEngine as RayDistributedEngine
    from phalanx.config import EngineConfig as EngineConfig
    from phalanx.engine.async_engine import AsyncEngine as AsyncEngine
    from phalanx.llm import LLM as LLM
    from phalanx.outputs import CompletionOutput as CompletionOutput
    from phalanx.outputs import RequestOutput as RequestOutput
    from phalanx.sampling_params import SamplingParams as SamplingParams
    from phalanx.sampling_params import StructuredOutputs as StructuredOutputs

_HOME = {
    "AsyncEngine": "phalanx.engine.async_engine",
    "CompletionOutput": "phalanx.outputs",
    "EngineConfig": "phalanx.config",
    "LLM": "phalanx.llm",
    "RayConfig": "phalanx.cluster.ray_config",
    "RayDistributedEngine": "phalanx.cluster.ray_engine",
    "Request": "phalanx.cluster.messages",
    "RequestOutput": "phalanx.outputs",
    "Response": "phalanx.cluster.messages",
    "SamplingConfig": "phalanx.cluster.messages",
    "SamplingParams": "phalanx.sampling_params",
    "StructuredOutputs": "phalanx.sampling_params",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    # Importing phalanx must stay quick, so that `phalanx --help` is: each name is imported when first used.
    if name not in _HOME:
        raise AttributeError(f"module 'phalanx' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])

"""Models and devices to plan with: configurations without weights, and devices that are only described."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.config import EngineConfig, resolve
from phalanx.models.registry import read_spec
from phalanx.models.spec import DecoderSpec
from phalanx.planner.devices import Device, declared
from phalanx.planner.memory import Demand
from phalanx.planner.search import Plan, choose, lay_out

QWEN_14B = Path(__file__).resolve().parents[1] / "fixtures/qwen-14b-chat"
"""A folder with only the configuration that Qwen-14B-Chat was published with (as far as it says what the model is)."""


@dataclass(frozen=True)
class Machine:
    device: str = "cuda"
    native_bfloat16: bool = True


def qwen_14b() -> DecoderSpec:
    return read_spec(json.loads((QWEN_14B / "config.json").read_text()))


def llama(*, heads: int, kv_heads: int | None = None, layers: int = 8, **changes: Any) -> DecoderSpec:
    return read_spec(
        {
            "model_type": "llama", "hidden_size": 64 * heads, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads or heads, "intermediate_size": 172 * heads, "num_hidden_layers": layers,
            "vocab_size": 32_003, "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
            "tie_word_embeddings": False, **changes,
        }
    )  # fmt: skip


def demand_of(spec: DecoderSpec, **options: Any) -> tuple[Demand, EngineConfig]:
    config = resolve(EngineConfig.from_options(**options), spec, Machine())
    return Demand.of(spec, config), config


def plan_for(spec: DecoderSpec, *devices: str, **options: Any) -> Plan:
    demand, config = demand_of(spec, **options)
    return lay_out(demand, config.parallel, declared(devices))


def chosen(spec: DecoderSpec, *devices: str, **options: Any) -> list[Plan]:
    demand, _ = demand_of(spec, **options)
    return choose(demand, declared(devices))


def gpus(*sizes: int) -> tuple[Device, ...]:
    return declared([f"name=gpu{i},memory={size}G" for i, size in enumerate(sizes)])

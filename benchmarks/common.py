"""What the benchmarks share: medians with spread, the machine and the commit, the demo model for `transformers`."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx import env
from phalanx.bench.report import machine
from phalanx.checkpoint.locate import locate
from phalanx.planner.hardware import detect

ROOT = Path(__file__).resolve().parents[1]


def summary(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def shown(figures: dict[str, float], digits: int = 1) -> str:
    """`12.3 (11.9 to 12.8)`"""
    return f"{figures['median']:.{digits}f} ({figures['min']:.{digits}f} to {figures['max']:.{digits}f})"


def setting() -> dict[str, Any]:
    """Where and of what a figure was taken."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {"machine": machine(detect()), "commit": commit.stdout.strip() or None}


def write(result: dict[str, Any], target: str | None) -> None:
    text = json.dumps(result, indent=2)
    if target:
        Path(target).write_text(text + "\n")
    else:
        print(text)


def demo_for_transformers() -> Path:
    """A folder with the demo model as `transformers` reads it fastest: bfloat16 safetensors. Made once."""
    target = env.cache_dir() / "demo-transformers-bf16"
    if (target / "tokenizer.json").exists():
        return target
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = locate(None).weight_files[0]
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # what was read is no longer quantised, and only that can be saved
    plain: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(target)
    return target

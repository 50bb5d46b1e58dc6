"""From a config's model type to its family: which recipe reads it, and which table names its weights.

Families are listed here by name and imported only when used. Knows nothing of what a family is made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Literal

from phalanx.checkpoint.quantized import read_layout
from phalanx.checkpoint.rules import WeightTable
from phalanx.errors import CheckpointError, UnsupportedModel
from phalanx.models.families.fields import Fields
from phalanx.models.spec import DecoderSpec


@dataclass(frozen=True)
class Family:
    """One row of the support table."""

    title: str
    model_types: tuple[str, ...]
    """Values of `model_type` in config.json."""
    module: str
    """Below phalanx.models.families; has `read`, `weights` and, when `gguf` is set, `gguf_weights`."""
    gguf: tuple[str, ...]
    """Values of `general.architecture` in GGUF files."""
    notes: str = ""


_FAMILIES = (
    Family("Llama 1, 2, 3.x", ("llama",), "llama", ("llama",), "linear, dynamic, llama3, yarn and longrope scaling"),
    Family("Mistral", ("mistral",), "llama", ("llama",), "sliding window"),
    Family("Qwen 2, 2.5", ("qwen2",), "qwen2", ("qwen2",), "sliding window in the upper layers"),
    Family("Qwen 3", ("qwen3",), "qwen3", ("qwen3",), "normed queries and keys"),
    Family("Qwen 1", ("qwen",), "qwen1", ("qwen",), "logn attention and dynamic NTK"),
    Family("GPT-2", ("gpt2",), "gpt2", ("gpt2",), "learned positions"),
    Family("OPT", ("opt",), "opt", (), "learned positions; post-norm and projections of 350m"),
    Family("Phi-3", ("phi3",), "phi3", ("phi3",), "longrope, partial rotary, sliding window"),
    Family("Gemma 2", ("gemma2",), "gemma", ("gemma2",), "soft caps, alternating window"),
    Family(
        "Gemma 3 (text)", ("gemma3_text", "gemma3"), "gemma", ("gemma3",), "two rotary bases, window in 5 of 6 layers"
    ),
)


def supported() -> tuple[Family, ...]:
    return _FAMILIES


def _family(model_type: str) -> Family:
    for family in _FAMILIES:
        if model_type in family.model_types:
            return family
    known = ", ".join(sorted(t for f in _FAMILIES for t in f.model_types))
    raise UnsupportedModel(f"Models of type '{model_type[:80]}' are not supported.", fix=f"Supported types: {known}.")


def _model_type(config: Mapping[str, Any]) -> str:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise CheckpointError("The model's config has no `model_type`.", fix="Check that config.json is a model's.")
    return model_type


def read_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The model that a config dictionary (of config.json or GGUF metadata) describes.

    Raises UnsupportedModel for a family or quantisation we do not have, CheckpointError for a value that cannot be.
    """
    family = _family(_model_type(config))
    layout = read_layout(config)
    spec = import_module(f"phalanx.models.families.{family.module}").read(Fields(config))
    if not isinstance(spec, DecoderSpec):
        raise TypeError(f"family {family.module} gave no DecoderSpec")
    return spec if layout is None else replace(spec, checkpoint_dtype="quantized")


def weight_table(spec: DecoderSpec, format: Literal["safetensors", "gguf"]) -> WeightTable:
    """Which tensor of a checkpoint is which weight of `spec`. Raises UnsupportedModel without a table for `format`."""
    family = _family(spec.family)
    if format == "gguf" and not family.gguf:
        raise UnsupportedModel(f"{family.title} models are not supported as GGUF.", fix="Use a safetensors checkpoint.")
    module = import_module(f"phalanx.models.families.{family.module}")
    table: WeightTable = module.gguf_weights(spec) if format == "gguf" else module.weights(spec)
    return table

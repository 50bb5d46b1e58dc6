"""Qwen 2 and 2.5: Llama's recipe with biases on query, key and value, and windows in the upper layers if asked for."""

from __future__ import annotations

from phalanx.checkpoint.rules import WeightTable
from phalanx.models.families import llama
from phalanx.models.families.fields import Fields
from phalanx.models.spec import DecoderSpec


def read(fields: Fields) -> DecoderSpec:
    return llama.llama_like(fields, family="qwen2", windows=windows(fields), qkv_bias=True)


def windows(fields: Fields) -> list[int | None]:
    """Per layer: with `use_sliding_window`, layers from `max_window_layers` on slide, or those `layer_types` names."""
    count = fields.integer("num_hidden_layers")
    window = fields.optional_integer("sliding_window") if fields.boolean("use_sliding_window", False) else None
    first = fields.integer("max_window_layers", 28, minimum=0)
    sliding = fields.sliding_layers(count, [layer >= first for layer in range(count)])
    return [window if slides else None for slides in sliding]


weights = llama.weights


def gguf_weights(spec: DecoderSpec) -> WeightTable:
    return llama.gguf_table(spec, llama.GGUF_ATTENTION | llama.GGUF_MLP | llama.GGUF_NORMS)

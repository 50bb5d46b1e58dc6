"""Reads a config's rotary embedding in every form that checkpoints use: `rope_parameters`, or `rope_theta` with
`rope_scaling`; one for the model, or one per kind of layer.

Scalings that depend on the length ("dynamic", "longrope") take the length of the *prompt*, for all of the request:
transformers decides anew at every call, so that its keys of the same tokens differ between one call and several.
With the prompt's length, chunks, preemption and recovery change nothing, and prompts within the trained length are
exact. The base of "dynamic" grows in steps (trained length × 1, 2, 4, …), so that prompts of a class share a cache.
"""

from __future__ import annotations

import math

from phalanx.errors import CheckpointError, UnsupportedModel
from phalanx.models.families.fields import Fields
from phalanx.models.spec import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)


def read_rope(
    fields: Fields, head_dim: int, *, theta: float = 10000.0, layer_type: str | None = None, scaled: bool = True
) -> RopeSpec:
    """The rotary embedding of all layers, or of those of `layer_type`. `scaled` False leaves out `rope_scaling`."""
    parameters = fields.section("rope_parameters")
    if parameters is not None and layer_type is not None and parameters.section(layer_type) is not None:
        parameters = parameters.section(layer_type)
    scaling = fields.section("rope_scaling") if parameters is None and scaled else parameters
    base = (parameters or fields).number("rope_theta", fields.number("rope_theta", theta))
    share = (parameters or Fields({})).number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    dim = int(head_dim * share)
    if dim % 2 or not 0 < dim <= head_dim:
        raise CheckpointError(
            f"`partial_rotary_factor` rotates {dim} of {head_dim} numbers a head; it must be an even part."
        )
    return RopeSpec(dim, base, _scaling(fields, scaling, dim) if scaling is not None else None)


def _scaling(fields: Fields, scaling: Fields, dim: int) -> RopeScaling | None:
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(scaling.number("factor"))
        case "dynamic":
            return DynamicScaling(scaling.number("factor"), fields.integer("max_position_embeddings"))
        case "llama3":
            return Llama3Scaling(
                scaling.number("factor"),
                scaling.number("low_freq_factor"),
                scaling.number("high_freq_factor"),
                scaling.integer("original_max_position_embeddings"),
            )
        case "yarn":
            return _yarn(fields, scaling)
        case "longrope" | "su":
            return _longrope(fields, scaling, dim)
    raise UnsupportedModel(
        f"The rotary scaling '{kind[:60]}' is not supported.",
        fix="Supported are default, linear, dynamic, llama3, yarn and longrope.",
    )


def _yarn(fields: Fields, scaling: Fields) -> YarnScaling:
    positions = fields.integer("max_position_embeddings")
    trained = scaling.integer("original_max_position_embeddings", positions)
    factor = scaling.number("factor", positions / trained)
    attention = scaling.optional_number("attention_factor")
    if attention is None:
        own, all_dims = scaling.values.get("mscale"), scaling.values.get("mscale_all_dim")
        if own and all_dims:
            attention = _yarn_scale(factor, scaling.number("mscale")) / _yarn_scale(
                factor, scaling.number("mscale_all_dim")
            )
        else:
            attention = _yarn_scale(factor, 1.0)
    fast, slow = scaling.number("beta_fast", 32.0), scaling.number("beta_slow", 1.0)
    return YarnScaling(factor, trained, fast, slow, attention, scaling.boolean("truncate", True))


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(fields: Fields, scaling: Fields, dim: int) -> LongRopeScaling:
    positions = fields.integer("max_position_embeddings")
    trained = fields.integer(
        "original_max_position_embeddings", scaling.integer("original_max_position_embeddings", positions)
    )
    attention = scaling.optional_number("attention_factor")
    if attention is None:
        factor = scaling.number("factor", positions / trained)
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    return LongRopeScaling(
        scaling.numbers("short_factor", dim // 2), scaling.numbers("long_factor", dim // 2), trained, attention
    )


def stretched(positions: int, rope: RopeSpec) -> int:
    """The longest context that a model with `max_position_embeddings` = positions is made for, scaling included."""
    match rope.scaling:
        case DynamicScaling(factor=factor, trained=trained):
            return max(positions, int(trained * factor))
        case YarnScaling(factor=factor, trained=trained):
            return max(positions, int(trained * factor))
    return positions

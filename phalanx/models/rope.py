"""The numbers behind a `RopeSpec`: frequencies for each class of prompt lengths, under every scaling we know.

Computed in float32 in the order of operations that checkpoints were trained and evaluated with.
"""

from __future__ import annotations

import math

import torch

from phalanx.layers.rotary import Rotary
from phalanx.models.spec import (
    DynamicPowerScaling,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeSpec,
    YarnScaling,
)


def make_rotary(rope: RopeSpec, limits: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Rotary:
    """`limits` are the model's prompt classes (`DecoderSpec.prompt_classes`): class i is of prompts up to limits[i]."""
    if not rope.prompt_classes(max(limits, default=0) + 1):
        limits = ()
    rows = [frequencies(rope, length) for length in (*limits, max(limits, default=0) + 1)]
    return Rotary(torch.stack([r for r, _ in rows]).to(device), [factor for _, factor in rows], dtype)


def frequencies(rope: RopeSpec, prompt_length: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies float32 [dim / 2], and the factor on cos and sin, for prompts of a class.

    `prompt_length` is the longest prompt of the class, or for the last class any length above the one before.
    """
    scaling, dim = rope.scaling, rope.dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    plain = 1.0 / (rope.theta**exponents)
    match scaling:
        case None:
            return plain, 1.0
        case LinearScaling(factor=factor):
            return plain / factor, 1.0
        case DynamicScaling(factor=factor, trained=trained):
            length = _class_length(prompt_length, trained)
            growth = (factor * length / trained) - (factor - 1)
            return 1.0 / ((rope.theta * growth ** (dim / (dim - 2))) ** exponents), 1.0
        case DynamicPowerScaling(trained=trained):
            alpha = max(2 * (_class_length(prompt_length, trained) // trained) - 1, 1)
            return 1.0 / ((rope.theta * alpha ** (dim / (dim - 2))) ** exponents), 1.0
        case Llama3Scaling():
            return _llama3(plain, scaling), 1.0
        case YarnScaling():
            return _yarn(rope.theta, dim, exponents, scaling), scaling.attention_factor
        case LongRopeScaling(trained=trained):
            divisors = scaling.long if prompt_length > trained else scaling.short
            return 1.0 / (torch.tensor(divisors) * rope.theta**exponents), scaling.attention_factor


def _class_length(prompt_length: int, trained: int) -> int:
    """The longest prompt in the class of `prompt_length`: trained, 2 · trained, 4 · trained, …"""
    length = trained
    while length < prompt_length:
        length *= 2
    return length


def _llama3(plain: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Long waves divided by the factor, short ones kept, and a ramp between."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    waves = 2 * math.pi / plain
    smooth = (scaling.trained / waves - low) / (high - low)
    ramp = (1 - smooth) * plain / scaling.factor + smooth * plain
    scaled = torch.where(waves > scaling.trained / low, plain / scaling.factor, plain)
    between = (waves <= scaling.trained / low) & (waves >= scaling.trained / high)
    return torch.where(between, ramp, scaled)


def _yarn(theta: float, dim: int, exponents: torch.Tensor, scaling: YarnScaling) -> torch.Tensor:
    def turning(rotations: float) -> float:
        return dim * math.log(scaling.trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = turning(scaling.beta_fast), turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    periods = theta**exponents
    return (1.0 / (scaling.factor * periods)) * (1 - kept) + (1.0 / periods) * kept

"""Random weights, for trying a model's speed and memory without its checkpoint.

Every rank draws its own numbers, so ranks that share a tensor do not agree: speed is real, text is not.
"""

from __future__ import annotations

import zlib

import torch

from phalanx.layers.weights import WeightSlot


def fill_dummy(slot: WeightSlot) -> None:
    """Norms get ones, vectors zeros, matrices small random numbers that depend on the weight's name alone."""
    if slot.columns is None:
        slot.target.fill_(1.0 if slot.name.endswith("norm.weight") else 0.0)
        return
    generator = torch.Generator(device=slot.target.device)
    generator.manual_seed(zlib.crc32(slot.name.encode()))
    slot.target.normal_(0.0, 0.02, generator=generator)

"""Random weights, for trying a model's speed and memory without its checkpoint.

Every rank draws its own numbers, so ranks that share a tensor do not agree: speed is real, text is not.
"""

from __future__ import annotations

import zlib

import torch

from phalanx.layers.weights import WeightSlot


def fill_dummy(slot: WeightSlot) -> None:
    """Norms get ones, vectors zeros, matrices small random numbers that depend on the weight's name alone."""
    target = slot.target
    if isinstance(target, torch.Tensor) and slot.columns is None:
        target.fill_(1.0 if slot.name.endswith("norm.weight") else 0.0)
        return
    numbers = target if isinstance(target, torch.Tensor) else torch.empty(_shape(slot))
    generator = torch.Generator(device=numbers.device)
    generator.manual_seed(zlib.crc32(slot.name.encode()))
    numbers.normal_(0.0, 0.02, generator=generator)
    if not isinstance(target, torch.Tensor):
        target.put(0, numbers)


def _shape(slot: WeightSlot) -> tuple[int, ...]:
    ranges = (slot.rows,) if slot.columns is None else (slot.rows, slot.columns)
    return tuple(stop - start for start, stop in ranges)

"""How a layer tells the loader what to fill: one `WeightSlot` for each weight it holds a part of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from phalanx.quantization.base import RowTarget


@dataclass(frozen=True)
class WeightSlot:
    """Rows `rows` and columns `columns` of the weight `name` belong in `target`, a tensor of exactly that shape, or
    where the scheme takes them."""

    name: str
    target: torch.Tensor | RowTarget
    rows: tuple[int, int]
    columns: tuple[int, int] | None = None
    """None for a vector."""


class Loadable(Protocol):
    @property
    def nbytes(self) -> int: ...

    def slots(self) -> Iterator[WeightSlot]: ...

    def finish(self) -> None:
        """Every slot is filled."""
        ...

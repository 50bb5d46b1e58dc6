"""How a layer tells the loader what to fill: one `WeightSlot` for each weight it holds a part of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class WeightSlot:
    """Rows `rows` and columns `columns` of the weight `name` belong in `target`, which has exactly that shape."""

    name: str
    target: torch.Tensor
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

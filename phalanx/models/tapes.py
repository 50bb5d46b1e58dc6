"""The blocks of a rank as tapes: a step is one native call or a few, with the same results as layer by layer.

Where some block has no native form, there are no tapes. Sums over tensor ranks are made within the call where the group
shares memory, and by the group's own calls between two parts of it otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.attention.base import LayerCache
from phalanx.distributed.collectives import Group
from phalanx.distributed.transports.rounds import Rounds
from phalanx.kernels.tape import END, PAUSE, WAIT, CannotRecord, Place, Reel, ReelBlock, exchange_of
from phalanx.models.blocks import Block, Step

_TOGETHER = 8
"""Blocks in one call at most: after each, the rank shows that it goes on."""
_FEW_TOKENS = 64
"""More of them are computed block by block: each takes its time."""


def together(tokens: int) -> int:
    """How many blocks a call plays."""
    return _TOGETHER if tokens <= _FEW_TOKENS else 1


_KEPT_SHAPES = 256


class Tapes:
    """Not thread-safe: steps share a workspace, which grows to what the largest has needed."""

    def __init__(self, blocks: Sequence[Block], group: Group):
        """Raises CannotRecord."""
        scaled = sorted({block.log_positions for block in blocks if block.log_positions is not None})
        self._scaled = scaled
        self.blocks = [
            ReelBlock(
                block.record(), block.leaves_delta, -1 if block.turn is None else block.turn,
                -1 if block.log_positions is None else scaled.index(block.log_positions),
            )
            for block in blocks
        ]  # fmt: skip
        self._reel = Reel(self.blocks)
        self._leaves_delta = blocks[-1].leaves_delta
        self.group = group
        self._caches: Sequence[LayerCache] | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._deltas: dict[int, torch.Tensor] = {}
        """By tokens, the workspace's beginning."""
        self._rounds: Rounds | None = None
        self._exchange: Any = None
        """Of these rounds."""

    def play(
        self, x: torch.Tensor, caches: Sequence[LayerCache], step: Step, beat: Callable[[], None]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As the blocks' `forward` one after the other, from x [T, hidden] and no delta. The next step overwrites the
        delta."""
        if caches is not self._caches:
            self._reel.thread([cache.layer for cache in caches])  # type: ignore[attr-defined]
            self._caches = caches
        x = x.contiguous()
        delta = self._delta(x)
        factors = [step.query_factors[positions] for positions in self._scaled]
        reel, most = self._reel, together(len(x))
        playing = reel.begin(self._memory, x, step.plan, step.turns, factors, self.exchange(x.dtype))
        place = Place()
        while (place := reel.play(playing, place, most)).stop != END:
            if place.stop == PAUSE:
                beat()
            elif place.stop == WAIT:
                self.group.join_round()
            elif (total := self.group.all_reduce(delta)) is not delta:
                delta.copy_(total)
        beat()
        return x, delta if self._leaves_delta else None

    def forget_caches(self) -> None:
        """Nothing of them is held on to."""
        self._reel.thread(None)
        self._caches = None

    def _delta(self, x: torch.Tensor) -> torch.Tensor:
        """Where the tapes keep it, for a step as large as `x`; there is a workspace then."""
        found = self._deltas.get(len(x))
        if found is None:
            needed = self._reel.workspace_bytes(len(x))
            if needed > len(self._memory):
                self._memory = torch.empty(needed, dtype=torch.uint8)
                self._deltas.clear()
            if len(self._deltas) >= _KEPT_SHAPES:
                self._deltas.clear()
            found = self._deltas[len(x)] = self._memory[: x.nbytes].view(x.dtype).view(x.shape)
        return found

    def exchange(self, dtype: torch.dtype) -> Any:
        """What native code exchanges with the group by in this epoch; None where it has to be called."""
        rounds = self.group.rounds(dtype) if self.group.size > 1 else None
        if rounds is not self._rounds:
            self._rounds, self._exchange = rounds, None if rounds is None else exchange_of(rounds)
        return self._exchange


def record(blocks: Sequence[Block], group: Group) -> Tapes | None:
    """None where some block is computed layer by layer."""
    try:
        return Tapes(blocks, group) if blocks else None
    except CannotRecord:
        return None

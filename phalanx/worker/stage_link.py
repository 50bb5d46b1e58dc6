"""How hidden states pass from one pipeline stage to the next.

The first tensor rank of a stage sends to the first of the next, which shares them with its tensor group: every rank of
a stage has the same hidden states, so between nodes they travel once, and stages may have different widths.
"""

from __future__ import annotations

import torch

from phalanx.distributed.collectives import Groups
from phalanx.distributed.mesh import Place


class StageLink:
    def __init__(self, groups: Groups, place: Place, hidden_size: int, dtype: torch.dtype, device: torch.device):
        self._groups, self._place = groups, place
        self._hidden_size, self._dtype, self._device = hidden_size, dtype, device

    @torch.inference_mode()
    def receive(self, tokens: int) -> torch.Tensor:
        """The stage before's result, [tokens, hidden]."""
        shape = (tokens, self._hidden_size)
        if self._place.tp == 0:
            hidden = self._groups.pp.recv(shape, self._dtype, self._place.pp - 1).to(self._device)
        else:
            hidden = torch.empty(shape, dtype=self._dtype, device=self._device)
        return self._groups.tp.broadcast(hidden, 0) if self._groups.tp.size > 1 else hidden

    @torch.inference_mode()
    def send(self, hidden: torch.Tensor) -> None:
        if self._place.tp == 0:
            self._groups.pp.send(hidden, self._place.pp + 1)

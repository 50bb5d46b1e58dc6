"""Steps in which each request has one token to compute, and perhaps proposed ones behind it, in a native call or a few:
nearly all steps of a server.

With small models what Python does for a step takes a good part of its time. Between the plan's rows and the sampled
tokens there is none of it here, but for waits that take longer than a moment. What it computes and exchanges with other
ranks is what `Decoder` and the sampler do, to the bit, and it says no to every step that needs more: whether the others
of a group compute a step here or there makes no difference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.attention.base import LayerCache
from phalanx.distributed.pulse import Pulse
from phalanx.kernels import decoding as kernels
from phalanx.kernels.request_rows import TableView
from phalanx.kernels.tape import END, WAIT, Place, Reel, ReelBlock, Tape
from phalanx.layers.rotary import Rotary
from phalanx.models.tapes import Tapes, together
from phalanx.step import Rows

MOST_ROWS = 64
"""With more of them, what Python does is little beside what is computed, and logits would keep much memory."""


class Decoding:
    def __init__(
        self, tapes: Tapes, first: Tape, last: Tape, caches: Sequence[LayerCache], rotaries: Sequence[Rotary],
        first_token: int, pulse: Pulse,
    ):  # fmt: skip
        """`first` is the token table's tape, `last` that of norm and head, whose logits begin with `first_token`. They
        are empty in other stages than these. Raises CannotRecord."""
        reel = Reel([ReelBlock(first, False, -1, -1), *tapes.blocks, ReelBlock(last, False, -1, -1)])
        reel.thread([cache.layer for cache in caches])  # type: ignore[attr-defined]
        self._stream = torch.empty(MOST_ROWS, first.hidden, dtype=first.dtype)
        self._logits = torch.empty(MOST_ROWS, last.logits)  # takes memory for the rows that there are
        self._steps = kernels.Decoding(
            reel, [(rotary.inverse_frequencies[0], float(rotary.factors[0])) for rotary in rotaries], self._stream,
            self._logits, first_token,
        )  # fmt: skip
        self._tapes = tapes
        self._pulse = pulse
        self._count = 0

    def begin(self, table: TableView, how: kernels.SamplingView, rows: Rows) -> bool:
        """The table has the plan's rows, which `play` computes; False, with nothing changed, for rows that the kernel's
        `begin` says no to, and where the group's exchanges are calls."""
        group, exchange = self._tapes.group, None
        if group.size > 1:
            exchange = self._tapes.exchange(self._stream.dtype)
            if exchange is None:
                return False
        self._count = len(rows.slots) // 2 + len(rows.proposed) // 4
        return self._steps.begin(table, how, rows, exchange)

    @property
    def hidden(self) -> torch.Tensor:
        """[tokens, hidden]: before `play`, for what the stage before has computed; then, for the next one."""
        return self._stream[: self._count]

    @property
    def logits(self) -> torch.Tensor:
        """[tokens, this rank's tokens], when `play` has sampled none."""
        return self._logits[: self._count]

    def play(self) -> tuple[bytes, bytes]:
        """Slots and tokens, as `kernels.Decoding.tokens`. No tokens before the last stage, and where the ranks have to
        tell each other more than is done here: then there are logits."""
        place, most = Place(), together(self._count)
        while (place := self._steps.play(place, most)).stop != END:
            if place.stop == WAIT:
                self._tapes.group.join_round()
            else:
                self._pulse.beat()
        self._pulse.beat()
        return self._steps.tokens()

"""Steps in which each request has one token to compute, in a native call or a few: nearly all steps of a server.

With small models what Python does for a step takes a good part of its time. Between the plan's rows and the sampled
tokens there is none of it here. What it computes is what `Decoder` and the sampler do, to the bit, and it says no to
every step that needs more.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.attention.base import LayerCache
from phalanx.distributed.pulse import Pulse
from phalanx.kernels import decoding as kernels
from phalanx.kernels.request_rows import TableView
from phalanx.kernels.tape import END, CannotRecord, Place, Reel, ReelBlock, Tape
from phalanx.layers.rotary import Rotary
from phalanx.models.tapes import Tapes, together
from phalanx.step import Rows

MOST_ROWS = 64
"""With more of them, what Python does is little beside what is computed, and logits would keep much memory."""


class Decoding:
    def __init__(
        self, tapes: Tapes, first: Tape, last: Tape, caches: Sequence[LayerCache], rotaries: Sequence[Rotary],
        pulse: Pulse,
    ):  # fmt: skip
        """`first` is the token table's tape, `last` that of norm and head. Raises CannotRecord."""
        if tapes.group.size > 1:
            raise CannotRecord("ranks add up what they compute")
        reel = Reel([ReelBlock(first, False, -1, -1), *tapes.blocks, ReelBlock(last, False, -1, -1)])
        reel.thread([cache.layer for cache in caches])  # type: ignore[attr-defined]
        self._steps = kernels.Decoding(
            reel, [(rotary.inverse_frequencies[0], float(rotary.factors[0])) for rotary in rotaries],
            first.dtype, first.hidden, last.logits,
        )  # fmt: skip
        self._pulse = pulse

    def run(self, table: TableView, how: kernels.SamplingView, rows: Rows) -> bytes | None:
        """The token of each row, as `kernels.Decoding.tokens`; None, with nothing changed, for more than `MOST_ROWS`,
        and for rows that `begin` there says no to."""
        count = len(rows.slots) // 2
        if count > MOST_ROWS or not self._steps.begin(table, how, rows):
            return None
        place, most = Place(), together(count)
        while (place := self._steps.play(place, most)).stop != END:
            self._pulse.beat()
        self._pulse.beat()
        return self._steps.tokens()

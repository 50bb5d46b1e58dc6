"""How far loading is, for people: a line that is rewritten on a terminal, a line for every quarter elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_WIDTH = 30
_REDRAW_S = 0.1


class LoadingLine:
    """A `StartProgress` callback. `finish` leaves the cursor on a new line."""

    def __init__(self, stream: TextIO | None = None):
        self._stream = stream if stream is not None else sys.stderr
        self._rewrites = self._stream.isatty()
        self._phase = ""
        self._quarter = -1
        self._drawn = 0.0
        self._open = False

    def __call__(self, phase: str, share: float, behind: str = "") -> None:
        share = min(max(share, 0.0), 1.0)
        said = f"{share:.0%} ({behind})" if behind else f"{share:.0%}"
        if phase != self._phase:
            self.finish()
            self._phase, self._quarter, self._drawn = phase, -1, 0.0
        if self._rewrites:
            self._draw(share, said)
        elif int(share * 4) > self._quarter:
            self._quarter = int(share * 4)
            print(f"loading: {phase} {said}", file=self._stream, flush=True)

    def _draw(self, share: float, said: str) -> None:
        now = time.monotonic()
        if share < 1.0 and now - self._drawn < _REDRAW_S:
            return
        self._drawn, self._open = now, True
        filled = round(_WIDTH * share)
        bar = "█" * filled + "░" * (_WIDTH - filled)
        print(f"\r{self._phase:<12} {bar} {said}\x1b[K", end="", file=self._stream, flush=True)

    def finish(self) -> None:
        if self._open:
            print(file=self._stream, flush=True)
            self._open = False

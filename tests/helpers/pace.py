"""Engines whose steps take their time while a test wants it, so that answers last as long as it needs on any machine.

pace = Pace(tmp_path)                                # before the engine starts: PHALANX_FAULT=pace.fault
with pace.slow():                                    # an answer of 200 tokens takes 6 seconds now, at least …
    ask(); wait_for_the_first_tokens(); kill()
read_to_the_end()                                    # … and goes on as fast as it can
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from phalanx import env

STEP_S = 0.03


class Pace:
    def __init__(self, folder: Path, step_s: float = STEP_S):
        self._file = folder / "slow"
        self.fault = f"at=before_commit,do=sleep={step_s},while={self._file}"
        """As `PHALANX_FAULT` has it, for the engine's process."""

    def hold(self) -> None:
        self._file.touch()

    def release(self) -> None:
        self._file.unlink(missing_ok=True)

    @contextlib.contextmanager
    def slow(self) -> Iterator[None]:
        self.hold()
        try:
            yield
        finally:
            self.release()


@contextlib.contextmanager
def pace_of(folder: Path, step_s: float = STEP_S) -> Iterator[Pace]:
    """Of all engines that this process starts within the block."""
    pace = Pace(folder, step_s)
    with env.changed(PHALANX_FAULT=pace.fault):
        yield pace
    pace.release()

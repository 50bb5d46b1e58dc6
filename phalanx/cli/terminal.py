"""Writing to a terminal: text of a model without its control characters, and the progress of loading."""

from __future__ import annotations

import re
import sys
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """`text` without control characters other than tab and line feed: a model must not steer the terminal."""
    return _CONTROL.sub("", text)


def dim(text: str, stream_is_terminal: bool) -> str:
    return f"\033[2m{text}\033[0m" if stream_is_terminal else text


class Loading:
    """The progress of fetching and loading a model, on standard error when that is a terminal; else nothing.

    Call it with a phase and the share of it that is done, 0 to 1, as `AsyncEngine.start` does. Use it as a context.
    """

    def __init__(self) -> None:
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Loading:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description:<12}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
            self._bars = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bars.start()
        return self

    def __call__(self, phase: str, share: float, behind: str = "") -> None:
        if self._bars is None:
            return
        if phase not in self._tasks:
            self._tasks[phase] = self._bars.add_task(phase, total=1.0)
        self._bars.update(self._tasks[phase], completed=min(share, 1.0), description=f"{phase} {behind}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

"""How a fetch reports how far it is: a callback, and the terminal's bar for it."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class DownloadProgress(Protocol):
    """Called now and then, from any thread, with what is fetched, the bytes so far, and the bytes in all (0 when
    unknown)."""

    def __call__(self, what: str, done: int, total: int, /) -> None: ...


class TerminalProgress:
    """A bar on a terminal, a line per 10 % elsewhere. A context manager: leaving it ends the bar."""

    def __init__(self, stream: TextIO | None = None):
        self._stream = stream or sys.stderr
        self._lines: dict[str, tuple[int, int]] = {}
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._stream.isatty():
            self._draw(what, done, total)
        elif total >= 1e6:
            tenth = 10 * min(done, total) // total
            last, last_total = self._lines.get(what, (-1, total))
            if total != last_total:  # more files were found, so that the share may have become smaller
                last = min(last, tenth)
            self._lines[what] = max(last, tenth), total
            if tenth > last:
                print(f"{what}: {10 * tenth} % of {total / 1e6:.0f} MB", file=self._stream, flush=True)

    def _draw(self, what: str, done: int, total: int) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bar = Progress(*columns, console=Console(file=self._stream))
            self._bar.start()
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what.replace("[", r"\["), total=None)
        self._bar.update(self._tasks[what], completed=done, total=total or None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            self._tasks.clear()

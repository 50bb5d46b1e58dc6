"""Log lines of every process: plain text or one JSON object a line, on standard error.

A message is always one line: control characters (line breaks and terminal escapes too) are written as escapes, so that
a request id or a model name cannot forge a line. Modules log with `logging.getLogger(__name__)`; a process calls
`configure` once. Does not cover metrics or the access log's contents.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import IO

from phalanx.lossy_output import LossyOutput

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def escape(text: str) -> str:
    r"""`text` in one line: each control character as `\n`, `\r`, `\t` or `\x..`."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def is_worth_a_line(count: int) -> bool:
    """Of what others make happen as often as they like: the 1st, 2nd, 4th, 8th, … time, so that they do not fill the
    log."""
    return count & (count - 1) == 0


class TextFormatter(logging.Formatter):
    """`2026-01-31 12:00:00.123 INFO [engine] message`, then a traceback, each of its lines marked with `  | `."""

    def __init__(self, tag: str = ""):
        super().__init__()
        self._tag = f"[{tag}] " if tag else ""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        line = f"{clock}.{int(record.msecs):03d} {record.levelname} {self._tag}{escape(record.getMessage())}"
        if record.exc_info:
            traceback = self.formatException(record.exc_info)
            line = "\n".join([line, *("  | " + escape(part) for part in traceback.splitlines())])
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object: `time` (seconds since 1970), `level`, `logger`, `tag`, `message`, perhaps `exception`."""

    def __init__(self, tag: str = ""):
        super().__init__()
        self._tag = tag

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, str | float] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._tag:
            entry["tag"] = self._tag
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def configure(
    level: str = "info", format: str = "text", *, tag: str = "", stream: IO[str] | None = None
) -> logging.Logger:
    """Send the `phalanx` loggers to `stream` (standard error by default). Calling it again replaces the settings.

    `tag` names the process, such as `engine` or `worker 1`. Loggers of other packages are left alone.
    """
    logger = logging.getLogger("phalanx")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    formatter = JsonFormatter(tag) if format == "json" else TextFormatter(tag)
    handler.setFormatter(formatter)
    if isinstance(raw := getattr(handler.stream, "buffer", None), LossyOutput):
        said = "%d line(s) of output were lost: nobody read them."
        raw.notice = lambda lost: formatter.format(
            logger.makeRecord(logger.name, logging.WARNING, __file__, 0, said, (lost,), None)
        )
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
    return logger

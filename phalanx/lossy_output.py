"""Standard output and error that lose lines rather than wait for whoever should read them.

A pipe that nobody reads is full one day, and a write to it waits for ever; a full disk or a reader that is gone raises.
A line is not worth that: `never_wait` has both streams leave out what cannot be written at once, count the lines, and
say how many they were before the next one that can. For servers; a command whose output is its answer has to wait.

The descriptors stay as they are, and so does what others, such as child processes, share with us. What C code writes by
itself is not covered.
"""

from __future__ import annotations

import io
import os
import select
import stat
import sys
from collections.abc import Callable
from typing import Any


def never_wait() -> None:
    """From now on, for this process. Streams that are no files stay as they are."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            stream.flush()
            raw = LossyOutput(stream.fileno())
        except (AttributeError, OSError, ValueError):  # it has been closed or replaced
            continue
        lossy = io.TextIOWrapper(raw, encoding=stream.encoding, errors=stream.errors, line_buffering=True)  # type: ignore[type-var]
        setattr(sys, name, lossy)


class LossyOutput(io.RawIOBase):
    """Writes to a descriptor, which it does not own. Takes everything, and never raises."""

    def __init__(self, descriptor: int):
        self.notice: Callable[[int], str] = "{} line(s) of output were lost: nobody read them.".format
        """A line that says how many were lost."""
        self._descriptor = descriptor
        self._write = _writer(descriptor)
        self._lost = 0
        self._torn = False
        """The last line has been written in part."""

    def write(self, data: Any) -> int:
        text = bytes(data)
        head = b"\n" if self._torn else b""
        if self._lost:
            head += self.notice(self._lost).encode("utf-8", "replace") + b"\n"
        whole = head + text
        try:
            done = self._write(whole)
        except OSError:
            done = 0
        if done >= len(head):
            self._lost = 0
        self._lost += whole.count(b"\n", max(done, len(head)))
        if done:
            self._torn = done < len(whole) and whole[done - 1] != ord("\n")
        return len(text)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)


def _writer(descriptor: int) -> Callable[[bytes], int]:
    """Writes as much as can be written at once, and says how much that was; may raise OSError.

    O_NONBLOCK belongs to an open file, not to a descriptor: on ours it would be felt by all who share it, a shell's
    terminal too. Pipes and terminals can be opened once more. (A file cannot, as it would be written from its start.)
    Where that is not allowed we look first; another process that writes at the same moment may then make us wait."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        try:
            own = os.open(f"/proc/self/fd/{descriptor}", flags)
        except OSError:
            pass
        else:
            return lambda data: os.write(own, data)
    ready = select.poll()
    ready.register(descriptor, select.POLLOUT)

    def write(data: bytes) -> int:
        done = 0
        while done < len(data) and ready.poll(0):
            done += os.write(descriptor, data[done : done + select.PIPE_BUF])
        return done

    return write

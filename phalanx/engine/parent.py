"""How a process that another one has started ends with it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys


def end_with_parent(parent: int) -> None:
    """Have Linux kill this process when its parent ends; elsewhere the closed socket has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)

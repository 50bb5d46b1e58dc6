"""Cleans up after a local Ray cluster, however the process that started it has ended.

Run as `python -m phalanx.executor.ray_reaper MARK FOLDER` by `ray_session`, which holds the other end of its standard
input. When that is closed, every process that was started with the mark in its environment is killed and the cluster's
folder removed. Most of Ray's processes end with their parent; its agents would first try to reach a head that is gone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

MARK = "PHALANX_RAY_SESSION"

_PATIENCE_S = 5.0


def marked(mark: str) -> list[int]:
    """Processes that have the mark, without this one."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):  # it has ended, or is not ours
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def main(mark: str, folder: str) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    deadline = time.monotonic() + _PATIENCE_S
    while (pids := marked(mark)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))

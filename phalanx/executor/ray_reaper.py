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


def remaining(mark: str, folder: str) -> list[int]:
    """Processes that have the mark, and those that have written their title over it but still write to the folder."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            with contextlib.suppress(OSError):  # it has ended, or is not ours
                marked = wanted in (process / "environ").read_bytes().split(b"\0")
                titled = (process / "cmdline").read_bytes().startswith(b"ray::")
                if marked or (titled and _writes_to(process, folder)):
                    found.append(int(process.name))
    return found


def _writes_to(process: Path, folder: str) -> bool:
    return any(os.readlink(fd).startswith(f"{folder}/") for fd in (process / "fd").iterdir())


def main(mark: str, folder: str) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    deadline = time.monotonic() + _PATIENCE_S
    while (pids := remaining(mark, folder)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))

"""The first lines of the `phalanx` command: Ctrl-C ends it without a traceback from here on.

Importing the command line takes some hundredths of a second, in which Python would answer Ctrl-C with the import that
it was busy with. Imports nothing but `signal`. Does not know the commands.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType


def main() -> int:
    """The command of `sys.argv`; returns its exit code."""
    python_s_own = signal.getsignal(signal.SIGINT)
    if python_s_own is signal.default_int_handler:  # not when whoever started us has Ctrl-C ignored
        signal.signal(signal.SIGINT, _leave)
    from phalanx.cli.main import main as run

    try:
        signal.signal(signal.SIGINT, python_s_own)
        return run()
    except KeyboardInterrupt:  # just before or after the command's own care
        return 128 + signal.SIGINT


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())

"""What every command says the same way: errors and warnings, one line each, on standard error."""

from __future__ import annotations

import sys

from phalanx.errors import ConfigError, PhalanxError


class UsageError(ConfigError):
    """A command line that cannot be understood; exit code 2."""


def complain(error: PhalanxError) -> None:
    """`error: what. fix`"""
    print("error: " + " ".join(str(error).split()), file=sys.stderr)


def warn(text: str) -> None:
    print("warning: " + " ".join(text.split()), file=sys.stderr)

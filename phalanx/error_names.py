"""Errors on their way to another process: by the name of their class in `phalanx.errors`, so that they arrive as what
they were. Covers the names; the messages that carry them belong to who sends them."""

from __future__ import annotations

from phalanx import errors
from phalanx.errors import PhalanxError

_CLASSES: dict[str, type[PhalanxError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, PhalanxError)
}


def name_of(error: PhalanxError) -> str:
    """The nearest class that the receiver knows."""
    return next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _CLASSES), PhalanxError.__name__)


def error_named(name: str, message: str, *, fix: str | None, param: str | None, code: str | None) -> PhalanxError:
    """The error again; a name that is not known makes it a PhalanxError."""
    return _CLASSES.get(name, PhalanxError)(message, fix=fix, param=param, code=code)

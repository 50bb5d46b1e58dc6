"""The native library, or the reason why the plain PyTorch twins serve in its place.

Every kernel has a typed wrapper in this package that takes tensors; beside it stands its twin in plain PyTorch, which
tests compare it with and which serves where there is no native library. Wrappers check what they are given; the library
trusts them. `PHALANX_KERNELS` chooses: an instruction set that this machine has, or `torch` for the twins.
"""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

from phalanx import env
from phalanx.errors import ConfigError

_AGAIN = "Phalanx again (in a checkout: `make native`)"
_SLOW = "answers are slow until then"


@cache
def native() -> ModuleType | None:
    """The library; None when it was not built, or is not wanted. Raises ConfigError for an instruction set that this
    machine has not."""
    wanted = env.kernels()
    if wanted == "torch":
        return None
    try:
        library = import_module("phalanx.kernels._native")
    except ImportError:
        return None
    if wanted and not library.choose_instruction_set(wanted):
        known = ", ".join(library.instruction_sets())
        raise ConfigError(
            f"PHALANX_KERNELS is {wanted!r}, which this machine does not have.", fix=f"Use one of: {known}, torch."
        )
    return library


@dataclass(frozen=True)
class Choice:
    """What computes on a CPU here."""

    native: bool
    reason: str
    """What, and why, in one line."""
    remedy: str = ""
    """What to do where something better would be possible."""


def choice() -> Choice:
    """Raises ConfigError as `native` does."""
    wanted, library = env.kernels(), native()
    if library is None:
        if wanted == "torch":
            return Choice(False, "PyTorch, because PHALANX_KERNELS asks for it", "Unset PHALANX_KERNELS.")
        return _missing()
    active, sets = library.active_instruction_set(), library.instruction_sets()
    if active == wanted:
        return Choice(True, f"native, {active}, because PHALANX_KERNELS asks for it (possible: {', '.join(sets)})")
    without = [name for name in library.compiled_instruction_sets() if name not in sets and name != "amx"]
    notes = [f"they lack what {' and '.join(without)} need"] if without else []
    if refusal := library.amx_refusal():
        notes.append(f"no AMX: {refusal}")
    reason = f"native, {active}, the best that processor and system allow"
    return Choice(True, f"{reason} ({'; '.join(notes)})" if notes else reason)


def _missing() -> Choice:
    try:
        import_module("phalanx.kernels._native")
    except ModuleNotFoundError:
        pass
    except ImportError as error:
        return Choice(False, f"PyTorch, because the native library cannot be loaded: {error}", f"Install {_AGAIN}.")
    reason = "PyTorch, because the native library was not built"
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        return Choice(False, f"{reason}: there is no C++ compiler", f"Install one and {_AGAIN}; {_SLOW}.")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        remedy = f"Install them (Debian: python3-dev) and {_AGAIN}; {_SLOW}."
        return Choice(False, f"{reason}: there are no header files of Python", remedy)
    return Choice(False, reason, f"Install {_AGAIN}; {_SLOW}.")


def use_threads(count: int, cores: Sequence[int] = ()) -> None:
    """Kernels share their work among `count` threads, the caller's and others that run on `cores[1:]`."""
    library = native()
    if library is not None:
        library.set_team(count, list(cores))

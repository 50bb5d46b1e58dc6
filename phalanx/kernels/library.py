"""The native library, or the reason why the plain PyTorch twins serve in its place.

Every kernel has a typed wrapper in this package that takes tensors; beside it stands its twin in plain PyTorch, which
tests compare it with and which serves where there is no native library. Wrappers check what they are given; the library
trusts them. `PHALANX_KERNELS` chooses: an instruction set that this machine has, or `torch` for the twins.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import ModuleType

from phalanx import env
from phalanx.errors import ConfigError

log = logging.getLogger(__name__)


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


def describe() -> str:
    """What computes, and why, in one line."""
    library = native()
    if library is not None:
        sets = ", ".join(library.instruction_sets())
        return f"native, {library.active_instruction_set()} (this machine can run: {sets})"
    if env.kernels() == "torch":
        return "PyTorch, because PHALANX_KERNELS asks for it"
    return "PyTorch, because the native library was not built: install a C++ compiler and install Phalanx again"


def use_threads(count: int, cores: Sequence[int] = ()) -> None:
    """Kernels share their work among `count` threads, the caller's and others that run on `cores[1:]`."""
    library = native()
    if library is not None:
        library.set_team(count, list(cores))

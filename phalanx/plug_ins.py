"""Parts that an installed package may supply, chosen by name: what a flag names is one of ours, or an entry point.

Nothing is imported but what is chosen. What comes from a package runs with all rights of the process it is loaded in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from typing import Any

from phalanx.errors import ConfigError

SCHEDULING, ROUTING, TRANSPORT = "phalanx.scheduling", "phalanx.routing", "phalanx.transports"
"""Groups of entry points."""


def make(group: str, flag: str, name: str, own: Mapping[str, Callable[[], Any]], methods: tuple[str, ...]) -> Any:
    """What `name` stands for, made without arguments. Raises ConfigError when nobody supplies it, when two packages do,
    or when it cannot be made or lacks one of `methods`."""
    if name in own:
        return own[name]()
    entry = find(group, flag, name, own)
    package = entry.dist.name if entry.dist is not None else entry.module
    try:
        made = entry.load()()
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{flag} {name}: {entry.value} of the package {package} raised {type(error).__name__}: {text}"
        ) from error
    lacking = [method for method in methods if not callable(getattr(made, method, None))]
    if lacking:
        raise ConfigError(f"{flag} {name}: {entry.value} of the package {package} has no method {lacking[0]}.")
    return made


def find(group: str, flag: str, name: str, own: Iterable[str]) -> metadata.EntryPoint:
    """The entry point `name`, not loaded. Raises ConfigError when nobody supplies it, or two packages do."""
    found = metadata.entry_points(group=group)
    named = [entry for entry in found if entry.name == name]
    if len({entry.value for entry in named}) != 1:
        names = ", ".join([*own, *sorted(found.names)])
        what = f"{len(named)} packages supply it" if named else "nobody supplies it"
        raise ConfigError(f"{flag} is '{name[:80]}', and {what}.", fix=f"There are: {names}.")
    return named[0]

"""The devices that a model is planned for: declared by the user, or those of this machine.

    name=a10,memory=24G[,used=40%|used=2G][,speed=600g][,node=NAME][,count=2]

or a YAML file with a list of such entries. Devices are in rank order. Does not cover what other machines have: what is
not declared and not here is unknown. Speed is what memory delivers, in bytes per second: a decoding step reads every
weight once, so that is what decides how long it takes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.config import parse_size
from phalanx.errors import ConfigError
from phalanx.worker import capacity
from phalanx.worker.limits import Memory

MAX_DEVICES = 4096
_KEYS = ("name", "memory", "used", "speed", "node", "count")
_MAX_FILE = 2**20
_EXAMPLE = "Write name=a10,memory=24G with, where wanted, used=40%, speed=600g, node=NAME and count=2."


@dataclass(frozen=True)
class Device:
    """One device that can carry one rank."""

    name: str
    kind: str
    """cuda or cpu."""
    memory: Memory
    speed: float | None = None
    """Bytes per second read from its memory; None when nobody measured it."""
    node: str = "-"

    def like(self, other: Device) -> bool:
        """Whether the two are interchangeable: same memory, free memory and speed."""
        return (self.kind, self.memory, self.speed) == (other.kind, other.memory, other.speed)


def declared(items: Sequence[str], *, kind: str | None = None) -> tuple[Device, ...]:
    """The devices that `--declare-device` items describe. `kind` (from `--device`) is cpu or cuda; without one, devices
    whose names begin with cpu are CPUs and others GPUs. Raises ConfigError."""
    devices: list[Device] = []
    for entry in _entries(items):
        devices += _devices(entry, kind)
        if len(devices) > MAX_DEVICES:
            raise ConfigError(f"More than {MAX_DEVICES} devices are declared.")
    kinds = {device.kind for device in devices}
    if len(kinds) > 1:
        raise ConfigError("CPUs and GPUs are declared together.", fix="Declare one kind; a model runs on one kind.")
    known = [device.speed is not None for device in devices]
    if any(known) and not all(known):
        name = devices[known.index(False)].name
        raise ConfigError(f"The device {name} has no speed, but others have.", fix="Give all a speed=, or none.")
    return tuple(devices)


def _entries(items: Sequence[str]) -> list[dict[str, str]]:
    """One dictionary a declaration. A list in a variable is cut at every comma; a new device begins at its name."""
    entries: list[dict[str, str]] = []
    open_entry: dict[str, str] | None = None
    for part in (part.strip() for item in items for part in item.split(",")):
        key, equals, value = (text.strip() for text in part.partition("="))
        if not equals:
            entries += _from_file(part)
            open_entry = None
            continue
        if key == "name" or open_entry is None:
            open_entry = {}
            entries.append(open_entry)
        _set(open_entry, key, value, part)
    return entries


def _set(entry: dict[str, str], key: str, value: str, where: str) -> None:
    if key not in _KEYS:
        close = difflib.get_close_matches(key, _KEYS, 1)
        fix = f"Did you mean '{close[0]}'?" if close else f"It has {', '.join(_KEYS)}."
        raise ConfigError(f"--declare-device: a device has no '{key[:40]}'.", fix=fix)
    if key in entry:
        raise ConfigError(f"--declare-device: '{key}' is given twice.", fix="Begin each device with its name.")
    if not value:
        raise ConfigError(f"--declare-device: '{where[:80]}' has no value.", fix=_EXAMPLE)
    entry[key] = value


def _from_file(path: str) -> list[dict[str, str]]:
    import yaml

    try:
        with Path(path).expanduser().open("rb") as file:
            raw = file.read(_MAX_FILE + 1)
    except (OSError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"--declare-device: cannot read the file '{path[:200]}': {why}.", fix=_EXAMPLE) from None
    if len(raw) > _MAX_FILE:
        raise ConfigError(f"{path} is larger than 1 MiB, too large for a list of devices.")
    try:
        content = yaml.safe_load(raw)
    except (yaml.YAMLError, RecursionError, ValueError):
        raise ConfigError(f"{path} is not valid YAML.") from None
    listed = content.get("devices") if isinstance(content, Mapping) else content
    if not isinstance(listed, list) or not listed or not all(isinstance(entry, Mapping) for entry in listed):
        raise ConfigError(f"{path} must hold a list of devices.", fix="One `- {name: a10, memory: 24G}` a line.")
    return [_entry_of(entry, path) for entry in listed]


def _entry_of(listed: Mapping[Any, Any], path: str) -> dict[str, str]:
    entry: dict[str, str] = {}
    for key, value in listed.items():
        if not isinstance(value, (str, int, float)) or isinstance(value, bool):
            raise ConfigError(f"{path}: '{key}' of a device must be text or a number.")
        text = f"{value:.0f}" if isinstance(value, float) and value.is_integer() else str(value)
        _set(entry, str(key), text, f"{key}: {value}")
    return entry


def _devices(entry: Mapping[str, str], kind: str | None) -> list[Device]:
    for key in ("name", "memory"):
        if key not in entry:
            raise ConfigError(f"--declare-device: a device has no {key}.", fix=_EXAMPLE)
    name, total = entry["name"], _size(entry, "memory")
    if total < 1:
        raise ConfigError(f"The device {name} has no memory.")
    used = 0
    if "used" in entry:
        share = re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?)\s*%", entry["used"], re.ASCII)
        used = int(total * float(share[1]) / 100) if share else _size(entry, "used")
        if used >= total:
            raise ConfigError(f"The device {name} has nothing free: {entry['used']} of {entry['memory']} are used.")
    speed = float(_size(entry, "speed")) if "speed" in entry else None
    if speed is not None and speed < 1:
        raise ConfigError(f"The device {name} has the speed 0.", fix="speed= is bytes per second, such as 600g.")
    count = entry.get("count", "1")
    if not re.fullmatch(r"[1-9]\d{0,3}", count, re.ASCII):
        raise ConfigError(f"The device {name} is there '{count[:20]}' times.", fix="count= is a number, at least 1.")
    found = kind or ("cpu" if name.lower().startswith("cpu") else "cuda")
    return [Device(name, found, Memory(total, total - used), speed, entry.get("node", "-"))] * int(count)


def _size(entry: Mapping[str, str], key: str) -> int:
    try:
        return parse_size(entry[key])
    except ConfigError as error:
        raise ConfigError(f"--declare-device: {key}: {error.message}", fix=error.fix) from None


def of_this_machine(kind: str, ranks: int, host: Memory, *, node: str, gpus: Sequence[int] | None = None) -> (
    tuple[Device, ...] | None
):  # fmt: skip
    """What `ranks` ranks on this machine get: equal parts of the host's memory, or one GPU each (`gpus` are the
    numbers that this process may use; None is all). None when the GPUs cannot be asked."""
    if kind == "cpu":
        share = Memory(host.total // ranks, host.available // ranks)
        return (Device("cpu", "cpu", share, None, node),) * ranks
    found = [Device(gpu.name, "cuda", gpu.memory, None, node) for gpu in capacity.gpus()]
    if gpus is not None:
        found = [found[number] for number in gpus if number < len(found)]
    return tuple(found[:ranks]) if len(found) >= ranks else None

"""Which attention backend a worker uses, and why: the first that serves the device, in an order of preference."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from phalanx.attention.base import AttentionBackend
from phalanx.errors import ConfigError


@dataclass(frozen=True)
class Entry:
    name: str
    place: str
    """module:class, imported when chosen."""
    devices: tuple[str, ...]
    """Empty: any."""
    reason: str


_ENTRIES = (
    Entry("cpu", "phalanx.attention.cpu:CpuAttention", ("cpu",), "batched flash attention of PyTorch for CPUs"),
    Entry(
        "sdpa", "phalanx.attention.sdpa:SdpaAttention", (), "the reference in plain PyTorch, which runs on any device"
    ),
)


@dataclass(frozen=True)
class Choice:
    backend: AttentionBackend
    reason: str


def choose(device: str, name: str | None = None) -> Choice:
    """The backend for a device ("cpu", "cuda"), or the one called `name`. Raises ConfigError for one that cannot be."""
    for entry in _ENTRIES:
        fits = not entry.devices or device.partition(":")[0] in entry.devices
        if (name is None and fits) or name == entry.name:
            if not fits:
                raise ConfigError(f"The attention backend '{name}' does not run on {device}.", fix="Leave it out.")
            module, _, cls = entry.place.partition(":")
            return Choice(getattr(import_module(module), cls)(), entry.reason)
    raise ConfigError(f"There is no attention backend '{name}'.", fix=f"Known: {', '.join(e.name for e in _ENTRIES)}.")

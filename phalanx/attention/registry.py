"""Which attention backend a worker uses: the first that serves the device, in an order of preference."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from phalanx.attention.base import AttentionBackend
from phalanx.errors import ConfigError
from phalanx.kernels.library import native


@dataclass(frozen=True)
class Entry:
    name: str
    place: str
    """module:class, imported when chosen."""
    devices: tuple[str, ...]
    """Empty: any."""
    types: tuple[str, ...]
    """Of activations and cache."""
    compiled: bool
    """Needs the native library."""


_TORCH_TYPES = ("float32", "bfloat16", "float16")
_ENTRIES = (
    Entry("native", "phalanx.attention.native:NativeAttention", ("cpu",), ("float32", "bfloat16", "int8"), True),
    Entry("cpu", "phalanx.attention.cpu:CpuAttention", ("cpu",), _TORCH_TYPES, False),
    Entry("sdpa", "phalanx.attention.sdpa:SdpaAttention", (), _TORCH_TYPES, False),
)


def choose(
    device: str, name: str | None = None, *, dtype: str = "float32", cache_dtype: str | None = None
) -> AttentionBackend:
    """The backend for a device ("cpu", "cuda") and the types of activations and cache, or the one called `name`. Raises
    ConfigError for one that cannot be."""
    if name is not None and name not in (entry.name for entry in _ENTRIES):
        known = ", ".join(entry.name for entry in _ENTRIES)
        raise ConfigError(f"There is no attention backend '{name}'.", fix=f"Known: {known}.")
    types = {dtype, cache_dtype or dtype}
    why = ""
    for entry in _ENTRIES:
        if name in (None, entry.name):
            missing = _missing(entry, device, types)
            if not missing:
                module, _, cls = entry.place.partition(":")
                backend: AttentionBackend = getattr(import_module(module), cls)()
                return backend
            why = why or missing
    raise (
        ConfigError(f"The attention backend '{name}' {why}.", fix="Leave it out.")
        if name
        else ConfigError(
            f"No attention backend serves a KV cache of {cache_dtype} here: the native one {why}.",
            fix="Leave --kv-cache-dtype out.",
        )
    )


def _missing(entry: Entry, device: str, types: set[str]) -> str:
    """Why a backend does not serve; empty when it does."""
    if entry.devices and device.partition(":")[0] not in entry.devices:
        return f"does not run on {device}"
    if not types <= set(entry.types):
        return f"does not take {', '.join(sorted(types - set(entry.types)))}"
    if entry.compiled and native() is None:
        return "needs the native library"
    return ""

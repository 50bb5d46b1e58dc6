"""Where a rank can be reached, and on which node it is. Imports no torch."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import msgspec


@cache
def node_id() -> str:
    """Equal for processes that can share memory by descriptor: same kernel since its boot, same network namespace."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/net')}"


class Address(msgspec.Struct, frozen=True):
    """Where a rank can be reached."""

    rank: int
    node: str
    unix: str
    """Name of an abstract Unix socket, without its leading NUL."""
    host: str = ""
    port: int = 0
    """0 when the rank is not reachable from other nodes."""
    device: str = ""
    """What tells this rank's GPU from all others; empty without one."""

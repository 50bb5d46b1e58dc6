"""Callers that have not proven the key yet: whoever calls and says nothing keeps nobody else out."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

MOST = 32

_Caller = TypeVar("_Caller")


def who_goes(addresses: Mapping[_Caller, str]) -> _Caller:
    """Who makes room for the next caller, of these with their addresses, the oldest first: the oldest from the address
    that has most. Those without the key hold places for long; those with it are done before the turn comes to them."""
    ((most, _),) = Counter(addresses.values()).most_common(1)
    return next(caller for caller, address in addresses.items() if address == most)


class Callers:
    """Those that are proving themselves at one door, at most so many. For any thread."""

    def __init__(self, most: int = MOST):
        self._most = most
        self._lock = threading.Lock()
        self._addresses: dict[socket.socket, str] = {}
        """The oldest first."""

    def enter(self, sock: socket.socket, address: str) -> None:
        """When all places are taken, the connection of one that is there ends."""
        with self._lock:
            if len(self._addresses) >= self._most:
                going = who_goes(self._addresses)
                del self._addresses[going]
                with contextlib.suppress(OSError):
                    going.shutdown(socket.SHUT_RDWR)
            self._addresses[sock] = address

    def leave(self, sock: socket.socket) -> bool:
        """Before it is closed. Whether it still had its place, and so has its connection."""
        with self._lock:
            return self._addresses.pop(sock, None) is not None

    def __len__(self) -> int:
        with self._lock:
            return len(self._addresses)

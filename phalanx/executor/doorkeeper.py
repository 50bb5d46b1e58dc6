"""Accepts whoever calls at a socket, on a thread, and has each heard on a thread of its own."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable

from phalanx.distributed.callers import MOST, Callers

_PAUSE_S = 0.1
"""When the system has no descriptor or no thread for a caller."""


class Doorkeeper:
    """From now until `close`. Callers that have proven the key leave `callers`; the others may have to make room."""

    def __init__(self, door: socket.socket, hear: Callable[[socket.socket, str], None], name: str, most: int = MOST):
        """`hear` a caller's whole life: its socket, which is closed afterwards, and its address. Closes `door`."""
        self.callers = Callers(most)
        self._door, self._hear, self._name = door, hear, name
        self._door.setblocking(False)
        self._bell = os.eventfd(0, os.EFD_CLOEXEC)
        """Rung when this is closed."""
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name=f"{name}s", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Callers that are heard stay."""
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._bell, 1)
        self._thread.join()
        self._door.close()
        os.close(self._bell)

    def _accept(self) -> None:
        poll = select.poll()
        poll.register(self._door, select.POLLIN)
        poll.register(self._bell, select.POLLIN)
        while True:
            poll.poll()
            if self._closed:
                return
            try:
                sock, peer = self._door.accept()
            except OSError:  # the caller is gone again, or there are no descriptors
                time.sleep(_PAUSE_S)
                continue
            address = str(peer[0])
            self.callers.enter(sock, address)
            try:
                threading.Thread(target=self._attend, args=(sock, address), name=self._name, daemon=True).start()
            except RuntimeError:  # there are no threads
                self._let_go(sock)
                time.sleep(_PAUSE_S)

    def _attend(self, sock: socket.socket, address: str) -> None:
        try:
            self._hear(sock, address)
        finally:
            self._let_go(sock)

    def _let_go(self, sock: socket.socket) -> None:
        self.callers.leave(sock)
        sock.close()

"""How a wait is broken from outside: one `Abort` a rank and epoch, which every transport of that rank watches."""

from __future__ import annotations

import os
import threading

from phalanx.distributed.pulse import Pulse
from phalanx.errors import PhalanxError


class GroupBroken(PhalanxError):
    """An exchange cannot be finished: it was aborted, a peer is gone, or the ranks disagree about what it is."""


class PeerLost(GroupBroken):
    """Another rank went first: it left, or its connection ended. Its own error says why."""

    code = "peer_lost"


class Unreachable(PeerLost):
    """Nothing that was sent has been acknowledged for `silent` seconds: the network or the peer's node is down."""

    def __init__(self, peer: str, silent: float):
        self.words = f"has not answered for {silent:.1f} s: the network or its node is down"
        super().__init__(f"{peer} {self.words}.")
        self.silent = silent


class Abort:
    """Set once, from any thread; every wait that was given it then raises `GroupBroken` with the reason. Exchanges show
    in `pulse` that they get on, and whom they wait for.

    `fileno` is an eventfd that becomes readable when it is set, so that blocking waits can poll it.
    """

    def __init__(self, pulse: Pulse | None = None) -> None:
        self.pulse = pulse or Pulse()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self.reason: str | None = None

    def fileno(self) -> int:
        return self._fd

    def set(self, reason: str) -> None:
        """The first reason stays. Does nothing but remember it once the abort is closed."""
        with self._lock:
            if self.reason is None:
                self.reason = reason
                if self._fd >= 0:
                    os.eventfd_write(self._fd, 1)

    def check(self) -> None:
        """Raises GroupBroken when it was set."""
        if self.reason is not None:
            raise GroupBroken(f"The exchange was aborted: {self.reason}.")

    def close(self) -> None:
        """When no wait can look at it any more. Idempotent."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

"""How the image of a rank's weights (`phalanx.loading.image`) outlives the rank: whoever has started its process keeps
it for the next one. That is a node's supervisor for its ranks, and the front end for a rank in the engine process.

    rank ── Line.keep ──> socket ── KeptImage.take, when the rank has ended ──> descriptor ──> `Line.left` of the next

Until then the socket holds the descriptor: while all is well nothing is read.
"""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass

_WORDS = 1000
"""Bytes of last words."""
_IMAGE = b"image"
"""What a descriptor comes with."""


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """One end for who keeps, one for the rank's process."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)


@dataclass(frozen=True)
class Line:
    """The rank's end: who has started it, as `loading.image.Keeper`."""

    share: str
    left: int | None
    sock: socket.socket

    def keep(self, fd: int) -> None:
        socket.send_fds(self.sock, [_IMAGE], [fd])

    def say(self, why: str) -> None:
        """Its last words."""
        self.sock.send(why.encode()[:_WORDS])


class KeptImage:
    """At most one image, with those who keep it."""

    def __init__(self) -> None:
        self.fd: int | None = None
        self.share = ""
        """What it is of, where there are several shares."""
        self.weights = ""
        """The fingerprint of those that are wanted, once that is known."""

    def take(self, line: socket.socket, share: str = "") -> str:
        """What a rank that has ended had to say. An image that it has left takes the place of the one that is here."""
        said = ""
        with line, contextlib.suppress(BlockingIOError, ConnectionError):
            while not said:  # somebody it has started may still hold its end
                data, fds, _, _ = socket.recv_fds(line, _WORDS, 1, socket.MSG_CMSG_CLOEXEC)
                if not data:
                    break
                if fds:
                    self.let_go()
                    self.share, self.fd = share, fds[0]
                elif data != _IMAGE:  # else this process has no descriptor left for it
                    said = data.decode(errors="replace")
        return said

    def let_go(self) -> None:
        """Idempotent."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

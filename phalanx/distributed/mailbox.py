"""Short messages between ranks, on sockets of their own: they do not wait behind tensors.

Does not connect: the sockets are a group of `bootstrap` (`Meeting.sockets`).
"""

from __future__ import annotations

import threading

import torch

from phalanx.distributed.transports.abort import GroupBroken
from phalanx.distributed.transports.tcp import TcpGroup

MESSAGE_LIMIT = 1 << 16
"""Bytes of a message; what is larger is a tensor."""


class Mailbox:
    """For use by several threads: messages of one rank to another arrive whole, in the order in which they were sent.
    Raises GroupBroken when the other rank is gone."""

    def __init__(self, sockets: TcpGroup):
        self._sockets = sockets
        self._sending = [threading.Lock() for _ in range(sockets.size)]
        self._receiving = [threading.Lock() for _ in range(sockets.size)]

    @property
    def encrypted(self) -> bool:
        return bool(self._sockets.describe()["encrypted"])

    def send(self, data: bytes, to: int) -> None:
        """Raises ValueError for what is longer than MESSAGE_LIMIT."""
        if len(data) > MESSAGE_LIMIT:
            raise ValueError(f"a message of {len(data)} bytes; at most {MESSAGE_LIMIT}. Larger things are tensors.")
        body = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        with self._sending[to]:
            self._sockets.send(torch.tensor([len(data)]), to)
            self._sockets.send(body, to)

    def receive(self, source: int) -> bytes:
        """The next one of that rank; waits until it comes."""
        with self._receiving[source]:
            length = int(self._sockets.recv((1,), torch.int64, source))
            if not 0 <= length <= MESSAGE_LIMIT:
                raise GroupBroken(f"Rank {source} announced a message of {length} bytes.")
            return self._sockets.recv((length,), torch.uint8, source).numpy().tobytes()

    def close(self) -> None:
        self._sockets.close()

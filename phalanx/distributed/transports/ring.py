"""One writer, many readers, one node: messages through a ring of slots in shared memory.

A message longer than a slot goes in several. The writer waits only when the slowest reader is a whole ring behind. A
reader that waits spins briefly and then sleeps, so an idle ring burns no core. Every message is read by every reader.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.distributed.transports.abort import Abort, GroupBroken
from phalanx.distributed.transports.segment import LINE, WEAK, Segment

SLOTS = 8
SLOT_BYTES = 1 << 20

_MORE = 1 << 32
"""Flag beside a slot's length: the message goes on in the next slot."""


class Ring:
    """Member 0 writes, members 1 to `readers` read. Memory that no message has reached takes no space."""

    def __init__(self, segment: Segment, member: int, readers: int, limit: int):
        self._segment, self._member, self._readers, self._limit = segment, member, readers, limit
        self._others = tuple(range(1, readers + 1))
        self._count = 0
        self._pieces: list[bytes] = []
        self._data = memoryview(segment.memory)[segment.data_offset :]

    @classmethod
    def create(cls, readers: int, abort: Abort, *, limit: int, crowded: bool, writes: bool = True) -> Ring:
        """`limit` bounds a message, in bytes. The creator is the writer, or with `writes` false reader 1."""
        member = 0 if writes else 1
        words, data = _layout(readers)
        return cls(Segment.create(member, _names(readers), words, data, abort, crowded), member, readers, limit)

    @classmethod
    def attach(cls, fds: Sequence[int], member: int, abort: Abort, *, limit: int, crowded: bool) -> Ring:
        """`fds` as given by the creator's `fds`; they belong to the ring from here on."""
        readers = len(fds) - 2
        words, data = _layout(readers)
        segment = Segment(fds[0], list(fds[1:]), member, _names(readers), words, data, abort, crowded)
        return cls(segment, member, readers, limit)

    @property
    def fds(self) -> list[int]:
        return self._segment.fds

    @property
    def unread(self) -> bool:
        """Whether there is something to read, for a reader. Any thread may ask that keeps others from closing it."""
        return bool(self._segment.words[0] > self._count)

    def write(self, message: bytes, timeout: float | None = None) -> None:
        """Raises GroupBroken when aborted, or when a reader has not made room within `timeout` seconds: a long message
        may then be there in part, and the ring is of no more use."""
        if len(message) > self._limit:
            raise GroupBroken(f"A message of {len(message)} bytes is longer than the channel's limit of {self._limit}.")
        words, start = self._segment.words, 0
        while True:
            piece = message[start : start + SLOT_BYTES]
            start += len(piece)
            slot = self._count % SLOTS
            for reader in self._others:
                if words[LINE * reader] <= self._count - SLOTS or WEAK:
                    self._segment.wait(LINE * reader, self._count - SLOTS + 1, reader, lambda: "a full ring", timeout)
            self._data[slot * SLOT_BYTES : slot * SLOT_BYTES + len(piece)] = piece
            words[_length(self._readers, slot)] = len(piece) | (_MORE if start < len(message) else 0)
            self._count += 1
            self._segment.publish(0, self._count, self._others)
            if start >= len(message):
                return

    def read(self, timeout: float | None = None) -> bytes:
        """The next message. Raises GroupBroken when aborted, or after `timeout` seconds (it may be called again)."""
        words, pieces = self._segment.words, self._pieces
        while True:
            slot = self._count % SLOTS
            self._segment.wait(0, self._count + 1, 0, lambda: "an empty ring", timeout)
            length = words[_length(self._readers, slot)]
            more, length = bool(length & _MORE), length & (_MORE - 1)
            if length > SLOT_BYTES or length + sum(map(len, pieces)) > self._limit:
                raise GroupBroken("The ring holds a message that is longer than its limit.")
            pieces.append(bytes(self._data[slot * SLOT_BYTES : slot * SLOT_BYTES + length]))
            self._count += 1
            self._segment.publish(LINE * self._member, self._count, (0,))
            if not more:
                self._pieces = []
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        self._data.release()
        self._segment.close()


def _names(readers: int) -> list[str]:
    return ["the writer", *(f"reader {r}" for r in range(1, readers + 1))]


def _length(readers: int, slot: int) -> int:
    """The word with a slot's length. Line 0 counts slots written, line i those that reader i has read."""
    return LINE * (readers + 1) + slot


def _layout(readers: int) -> tuple[int, int]:
    return LINE * (readers + 1) + SLOTS, SLOTS * SLOT_BYTES

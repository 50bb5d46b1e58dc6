"""Where a rank's weights lie: in one piece of memory, one after the other.

Whoever asks for the same in the same order finds it at the same places. So a rank's memory can be given to the one that
replaces it (`phalanx.loading.image`), which builds itself as ever but has nothing to fill.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Sequence

import torch

More = Callable[[int, int], torch.Tensor]
"""Further memory, uint8 [n] for `more(unused, least)`: at least `least` bytes, of which the first are the last `unused`
bytes of what was given before, if that can be continued."""

CPU = torch.device("cpu")
HUGE_PAGE = 1 << 21

_CHUNK = 1 << 26
_LINE = 64


def reserve(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] that begins at a huge page, on huge pages where the system grants them. Pages that are never
    written take no memory. Given back when no tensor shares it any more."""
    mapped = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    return whole[start : start + nbytes]


def _fresh(unused: int, least: int) -> torch.Tensor:
    return reserve(max(least, _CHUNK))


class WeightMemory:
    """Memory for weights on one device. On the CPU they lie one after the other, each from a cache line on, and on huge
    pages where the system grants them: reading misses fewer translations of addresses."""

    def __init__(self, device: torch.device = CPU, more: More = _fresh, notes: Sequence[object] | None = None):
        """`more` is only asked for the CPU's memory. With `notes`, those that another one has, this is `filled`."""
        self.device = device
        self.filled = notes is not None
        """Whether what is taken has its numbers already. Nobody may write to it then."""
        self.notes = list(notes or ())
        self._more = more
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._asked = hashlib.blake2b(digest_size=16)
        self._read = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor; what is in it, unless this is filled, is nobody's business."""
        if self.device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=self.device)
        self._asked.update(f"{tuple(shape)} {dtype};".encode())
        nbytes = dtype.itemsize
        for length in shape:
            nbytes *= length
        room = -(-nbytes // _LINE) * _LINE
        if room > self._chunk.numel():
            self._chunk = self._more(self._chunk.numel(), room)
        taken, self._chunk = self._chunk[:nbytes], self._chunk[room:]
        return taken.view(dtype).view(shape)

    def full(self, shape: tuple[int, ...], dtype: torch.dtype, value: float) -> torch.Tensor:
        """A tensor that has `value` everywhere, until it is filled."""
        taken = self.empty(shape, dtype)
        return taken if self.filled else taken.fill_(value)

    @property
    def asked(self) -> str:
        """The same where the same was asked for in the same order."""
        return self._asked.hexdigest()

    @property
    def unused(self) -> int:
        """Bytes at the end of what `more` has given."""
        return self._chunk.numel()

    def note(self, said: object) -> None:
        """Plain data on what was taken, for whoever takes it when it is filled."""
        self.notes.append(said)

    def next_note(self) -> object:
        """What was noted at this place. Raises ValueError when nothing was."""
        if self._read >= len(self.notes):
            raise ValueError("nothing more was noted of these weights")
        self._read += 1
        return self.notes[self._read - 1]

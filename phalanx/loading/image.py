"""A rank's weights as one read-only file in memory, which outlives the rank: the one that replaces it maps the file and
is ready, without reading, converting or packing anything.

    NewImage ── weights are loaded into its memory ── seal ──> descriptor, kept by the node's supervisor
    descriptor ── open_image ──> Image, whose memory is filled

The file is a memfd: it has no name and is gone with the last process that holds it. From the moment it is sealed nobody
can change it any more, and what is not sealed is no image: a rank that dies while it loads leaves none. Ranks map it
privately and read-only, so its pages exist once on the node. At its end stands what it holds (`Header`), for a `key`
that says everything the order and the form of the weights depend on.

Pages are huge where the kernel can make them so (`MADV_COLLAPSE`), whatever its default for shared memory is. Where
only private memory can have huge ones, an image makes every step slower, for a loss that may never come (`slower`).
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import mmap
import os
import struct
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from phalanx.kernels.weight_memory import HUGE_PAGE, WeightMemory, reserve

log = logging.getLogger(__name__)

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_LENGTH = struct.Struct("<Q")
_SLACK = 1 << 26
_MAP_FIXED, _MADV_COLLAPSE = 0x10, 25
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""Whether private memory has any."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Header(msgspec.Struct, frozen=True):
    """What an image holds. Nothing in it is executed or trusted to be right for another key."""

    key: str
    fingerprint: str
    """Of the checkpoint that was read (`checkpoint.fingerprint`)."""
    asked: str
    """`WeightMemory.asked` of the memory it was loaded into."""
    nbytes: int
    notes: list[object]


def image_key(*parts: object) -> str:
    """Of everything that the image depends on; all parts show themselves whole in their `repr`."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


class NewImage:
    """`memory` is to be loaded into, from beginning to end by one rank, and to be sealed then."""

    def __init__(self, nbytes: int):
        """For about so many bytes of weights. Raises OSError where the system has no such files."""
        self._range = reserve(nbytes + nbytes // 8 + _SLACK)
        self._fd = os.memfd_create("phalanx-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(self._fd, 0o600)
        self._given = 0
        self._whole = True
        self.memory = WeightMemory(more=self._more)

    def _more(self, unused: int, least: int) -> torch.Tensor:
        start = self._given - unused
        stop = -(-(start + least) // HUGE_PAGE) * HUGE_PAGE
        if not self._whole or not self._extend(stop):
            self._whole = False
            return reserve(max(least, _SLACK))
        return self._range[start:stop]

    def _extend(self, stop: int) -> bool:
        if stop > self._range.numel():
            return False
        piece = self._range[self._given : stop]
        try:
            os.ftruncate(self._fd, stop)
            _map_over(piece, self._fd, self._given, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            log.debug("no image of these weights: %s", error)
            return False
        self._given = stop
        piece[::HUGE_PAGE] = 0  # where nobody has written to, there is nothing to make a huge page of
        _libc.madvise(piece.data_ptr(), piece.numel(), _MADV_COLLAPSE)  # some may stay small where memory is scarce
        return True

    def seal(self, key: str, fingerprint: str, nbytes: int) -> int | None:
        """The descriptor of the image, for the caller to close, now that all is loaded; the weights are read-only from
        now on, here too. None when there is more of them than was said, or the system has set another limit.

        Raises OSError."""
        if not self._whole:
            return None
        used = -(-(self._given - self.memory.unused) // mmap.PAGESIZE) * mmap.PAGESIZE
        header = msgspec.msgpack.encode(Header(key, fingerprint, self.memory.asked, nbytes, self.memory.notes))
        os.ftruncate(self._fd, used)
        os.pwrite(self._fd, header + _LENGTH.pack(len(header)), used)
        if used:
            _map_over(self._range[:used], self._fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
        # The rest of the file's mapping has no pages, but would count as a way to write to it.
        _map_over(self._range[used:], -1, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        fd, self._fd = self._fd, -1
        return fd

    def close(self) -> None:
        """Idempotent; what is mapped stays until the weights are given up."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Keeper(Protocol):
    """Who keeps a rank's image beyond the rank's own end, as seen by the rank."""

    @property
    def share(self) -> str:
        """What this rank is to hold, by a name that the next one to hold the same is given too, and nobody else."""
        ...

    @property
    def left(self) -> int | None:
        """The descriptor of what the rank before it has left."""
        ...

    def keep(self, fd: int) -> None:
        """An image of this rank's. Raises OSError."""
        ...


class Image:
    """A sealed one."""

    def __init__(self, fd: int, header: Header, size: int):
        self._fd, self._size = fd, size
        self.header = header

    @property
    def nbytes(self) -> int:
        """What its weights take."""
        return self.header.nbytes

    def memory(self) -> WeightMemory:
        """All of it, mapped read-only. Raises OSError."""
        whole = reserve(max(self._size, 1))[: self._size]
        if self._size:
            _map_over(whole, self._fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ)

        def more(unused: int, least: int) -> torch.Tensor:
            nonlocal whole
            given, whole = whole, whole[:0]
            if least > given.numel():
                raise ValueError("the image has less than is asked for")
            return given

        return WeightMemory(more=more, notes=self.header.notes)


def open_image(fd: int, key: str) -> Image | None:
    """The image behind a descriptor, if it is one and is for `key`."""
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            return None
        end = os.fstat(fd).st_size - _LENGTH.size
        (length,) = _LENGTH.unpack(os.pread(fd, _LENGTH.size, end))
        if length > end:
            return None
        header = msgspec.msgpack.decode(os.pread(fd, length, end - length), type=Header)
    except (OSError, struct.error, msgspec.DecodeError) as error:
        log.debug("no image of weights: %s", error)
        return None
    if header.key != key:
        log.debug("the image of weights that is here is of another share or model")
        return None
    return Image(fd, header, end - length)


def slower() -> bool:
    """Whether weights are read faster from private memory than from an image: only that has huge pages here."""
    if _libc.madvise(None, 0, _MADV_COLLAPSE) == 0:  # of nothing, but it says whether it knows how
        return False
    try:
        return "[never]" not in _HUGE_PAGES.read_text()
    except OSError:
        return False


def _map_over(place: torch.Tensor, fd: int, offset: int, flags: int, protection: int) -> None:
    """Whole pages of `place` become those of a file. Raises OSError."""
    if place.numel():
        address = _libc.mmap(place.data_ptr(), place.numel(), protection, flags | _MAP_FIXED, fd, offset)
        if address != place.data_ptr():
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

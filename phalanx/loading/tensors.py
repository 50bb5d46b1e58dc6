"""Reading tensors out of checkpoint files: whole, or only some of their rows and columns.

Files are mapped, so that only the bytes asked for are read. Both safetensors and GGUF tensors are read here; which
tensor is which weight is not this module's business (`phalanx.loading.loader`).
"""

from __future__ import annotations

import mmap
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from phalanx.checkpoint.tensor_info import PLAIN_TYPES, TensorInfo
from phalanx.errors import CheckpointError, FormatError, UnsupportedModel
from phalanx.loading.gguf_blocks import FORMATS, dequantize

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

_MAP_NORESERVE = 0x4000  # Linux; Python's mmap names it only in later versions


class TensorReader:
    """Reads tensors by their `TensorInfo`. Keeps each file mapped until `close`, or the end of the `with` block.

    `bytes_read` counts the stored bytes that were asked for.
    """

    def __init__(self) -> None:
        self.bytes_read = 0
        self._files: dict[Path, mmap.mmap] = {}

    def read(
        self, info: TensorInfo, rows: tuple[int, int] | None = None, dtype: torch.dtype | None = None, *,
        columns: tuple[int, int] | None = None,
    ) -> Tensor:  # fmt: skip
        """The tensor, or its rows `rows[0]` to `rows[1]` (end excluded) along the first dimension, and of a matrix's
        rows only `columns`. Blocks that are cut by them are read whole.

        Block formats come out as `dtype`, float32 by default; others in their own type, or as `dtype`. A result in its
        own type may share memory with the mapped file (privately: writing to it changes no file) and stays valid after
        `close`. Raises FormatError or CheckpointError when the file is not what `info` says, UnsupportedModel for a
        type that cannot be read, and ValueError for rows or columns that do not exist.
        """
        block = FORMATS.get(info.dtype)
        if block is None and info.dtype not in PLAIN_TYPES:
            raise UnsupportedModel(f"{info.file}: the type {info.dtype} of tensor '{info.name}' is not supported.")
        shape, offset, nbytes = self._span(info, rows)
        if columns is not None and columns != (0, info.shape[-1]):
            return self._read_columns(info, shape, offset, nbytes, columns, dtype)
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype or DTYPES.get(info.dtype, torch.float32))
        raw = torch.frombuffer(self._map(info), dtype=torch.uint8, count=nbytes, offset=offset)
        self.bytes_read += nbytes
        if block is not None:
            return dequantize(raw, info.dtype, shape, target=dtype or torch.float32)
        own = DTYPES[info.dtype]
        if offset % own.itemsize:
            raw = raw.clone()  # the format does not promise alignment, but typed views need it
        values = raw.view(own).view(shape)
        return values if dtype is None else values.to(dtype)

    def _read_columns(
        self, info: TensorInfo, shape: tuple[int, ...], offset: int, nbytes: int, columns: tuple[int, int],
        dtype: torch.dtype | None,
    ) -> Tensor:  # fmt: skip
        """Some columns of the rows at `offset`: of each row one run of bytes, the others are not touched."""
        start, stop = columns
        if len(info.shape) != 2 or not 0 <= start <= stop <= info.shape[1]:
            raise ValueError(f"tensor '{info.name}' of shape {info.shape} has no columns {start} to {stop}")
        block = FORMATS.get(info.dtype)
        count = shape[0]
        if count == 0 or start == stop:
            return torch.empty((count, stop - start), dtype=dtype or DTYPES.get(info.dtype, torch.float32))
        elements, size = (1, DTYPES[info.dtype].itemsize) if block is None else (block.elements, block.nbytes)
        first, last = start // elements, -(-stop // elements)
        whole = torch.frombuffer(self._map(info), dtype=torch.uint8, count=nbytes, offset=offset)
        raw = whole.view(count, -1)[:, first * size : last * size]
        self.bytes_read += raw.numel()
        if block is None:
            own = DTYPES[info.dtype]
            values = raw.contiguous().view(own) if offset % own.itemsize else whole.view(own).view(shape)[:, start:stop]
            return values if dtype is None else values.to(dtype)
        width = (last - first) * elements
        values = dequantize(raw.reshape(-1), info.dtype, (count, width), target=dtype or torch.float32)
        return values[:, start - first * elements : stop - first * elements]

    def read_blocks(
        self, info: TensorInfo, rows: tuple[int, int], columns: tuple[int, int]
    ) -> tuple[Tensor, tuple[int, int]]:
        """Rows of a matrix of blocks as they are stored: uint8 [n, bytes], which shares memory with the mapped file and
        has the whole blocks that hold `columns`; and where these are in it.

        Raises as `read` does, ValueError also for a type that has no blocks.
        """
        start, stop = columns
        block = FORMATS.get(info.dtype)
        if block is None or len(info.shape) != 2 or not 0 <= start <= stop <= info.shape[1]:
            raise ValueError(f"tensor '{info.name}' has no blocks for columns {start} to {stop}")
        shape, offset, nbytes = self._span(info, rows)
        first, last = start // block.elements, -(-stop // block.elements)
        within = (start - first * block.elements, stop - first * block.elements)
        if shape[0] == 0:
            return torch.empty(0, (last - first) * block.nbytes, dtype=torch.uint8), within
        whole = torch.frombuffer(self._map(info), dtype=torch.uint8, count=nbytes, offset=offset)
        raw = whole.view(shape[0], -1)[:, first * block.nbytes : last * block.nbytes]
        self.bytes_read += raw.numel()
        return raw, within

    def _span(self, info: TensorInfo, rows: tuple[int, int] | None) -> tuple[tuple[int, ...], int, int]:
        """Shape, offset in the file and number of bytes of the rows asked for."""
        if rows is None:
            return info.shape, info.offset, info.nbytes
        start, stop = rows
        if not info.shape or not 0 <= start <= stop <= info.shape[0]:
            raise ValueError(f"tensor '{info.name}' of shape {info.shape} has no rows {start} to {stop}")
        if info.shape[0] == 0:
            return info.shape, info.offset, 0
        row_bytes, rest = divmod(info.nbytes, info.shape[0])
        if rest:
            raise ValueError(f"tensor '{info.name}' is one row of blocks of the type {info.dtype} and cannot be cut")
        return (stop - start, *info.shape[1:]), info.offset + start * row_bytes, (stop - start) * row_bytes

    def _map(self, info: TensorInfo) -> mmap.mmap:
        mapped = self._files.get(info.file)
        if mapped is None:
            try:
                with info.file.open("rb") as file:
                    mapped = _map_private(file.fileno())
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{info.file} cannot be read: {error}.") from None
            self._files[info.file] = mapped
        if info.offset + info.nbytes > len(mapped):
            raise FormatError(f"{info.file} has become shorter since its header was read.", fix="Fetch it again.")
        return mapped

    def close(self) -> None:
        """Forget the files. Each is unmapped as soon as no tensor shares its memory any more.

        Never by `mmap.close`: torch keeps the map's object alive, not its buffer, so that would pull the memory away
        from under its tensors.
        """
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _map_private(descriptor: int) -> mmap.mmap:
    """A private writable map: torch wants writable memory, and no write reaches the file. No swap space is set aside
    for it, or a file larger than the memory could not be mapped."""
    if sys.platform == "linux":
        return mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)


if sys.byteorder != "little":
    raise ImportError("Checkpoint files are little-endian, and so must the machine be.")

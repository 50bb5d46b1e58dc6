"""A bounded reader of GGUF headers (versions 2 and 3, little-endian): metadata and tensor records.

Every count, length, dimension and offset is a Python int, checked against the bytes that are really there before
anything is allocated, so time and memory stay proportional to the file's size whatever the file claims. Tensor data is
not touched. Not covered: version 1, big-endian and split files; they are refused in clear words.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import os
import re
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from phalanx.checkpoint.tensor_info import TensorInfo
from phalanx.errors import CheckpointError, FormatError, UnsupportedModel

# ggml type number -> (name, elements per block, bytes per block). The unquantised ones have their safetensors names.
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}

_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9
_U32, _U64 = _SCALARS[4], _SCALARS[10]

_SMALLEST = 4 + 4 + 8 + 8  # letters, version, two counts
_MAX_NAME = 65535  # the format's own limit for keys
_MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
_MAX_ALIGNMENT = 65536
_MAX_NESTING = 4
_MIN_PAIR = 8 + 4 + 1  # shortest metadata entry: empty key, type, one byte
_MIN_TENSOR = 8 + 4 + 8 + 4 + 8  # shortest tensor record: empty name, count, one dimension, type, offset

_SPLIT_NAME = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


@dataclass(frozen=True, eq=False)
class GGUFFile:
    """The header of one GGUF file. `metadata` values are int, float, bool, str or lists of them."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_gguf(path: Path) -> GGUFFile:
    """Read and check the header of `path`.

    Raises FormatError when the file breaks the format or is big-endian or too old, UnsupportedModel for a split file,
    and CheckpointError when it cannot be read at all.
    """
    path = Path(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # before opening it: a pipe would keep us waiting
            raise CheckpointError(f"{path} is not a regular file.")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < _SMALLEST:
                raise FormatError(f"{path} is not a GGUF file: it has only {size} bytes.", fix="Fetch it again.")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Header(path, data, size).read()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from None


class _Header:
    """One pass over the header. `_at` only moves forward, and never beyond `_size`."""

    def __init__(self, path: Path, data: mmap.mmap, size: int):
        self._path = path
        self._data = data
        self._size = size
        self._at = 0

    def read(self) -> GGUFFile:
        self._check_start()
        tensor_count, pair_count = self._scalar(_U64), self._scalar(_U64)
        self._check_count(pair_count, _MIN_PAIR, "metadata entries")
        metadata = self._metadata(pair_count)
        self._check_split(metadata)
        alignment = self._alignment(metadata)
        self._check_count(tensor_count, _MIN_TENSOR, "tensors")
        records = self._tensor_records(tensor_count)
        start = -(-self._at // alignment) * alignment
        return GGUFFile(self._path, metadata, self._place(records, start, alignment))

    def _fail(self, what: str) -> NoReturn:
        raise FormatError(
            f"{self._path} is not a valid GGUF file: {what}.",
            fix="The file may be incomplete or damaged: fetch or convert it again.",
        )

    # -- pieces ------------------------------------------------------------------------------------------------------

    def _check_count(self, count: int, smallest: int, what: str) -> None:
        if count * smallest > self._size - self._at:
            self._fail(f"it claims {count} {what}, more than its {self._size} bytes can hold")

    def _scalar(self, kind: struct.Struct) -> Any:
        at = self._at
        if at + kind.size > self._size:
            self._fail("it ends within its header")
        self._at = at + kind.size
        return kind.unpack_from(self._data, at)[0]

    def _string(self, what: str, limit: int | None = None) -> str:
        length = self._scalar(_U64)
        if length > self._size - self._at:
            self._fail(f"{what} claims {length} bytes, more than the file has left")
        if limit is not None and length > limit:
            self._fail(f"{what} has {length} bytes (at most {limit} are allowed)")
        raw = self._data[self._at : self._at + length]
        self._at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self._fail(f"{what} is not valid UTF-8")

    # -- parts of the header -----------------------------------------------------------------------------------------

    def _check_start(self) -> None:
        magic = self._data[:4]
        if magic != b"GGUF":
            if self._data[:24].startswith(b"version https://git-lfs"):
                raise FormatError(
                    f"{self._path} is a Git LFS pointer, not the model file itself.",
                    fix="Fetch it with `git lfs pull`.",
                )
            raise FormatError(f"{self._path} is not a GGUF file: it does not begin with the letters GGUF.")
        self._at = 4
        version = self._scalar(_U32)
        if version and not version & 0xFFFF:
            raise FormatError(f"{self._path} is a big-endian GGUF file.", fix="Use the model's little-endian file.")
        if version == 1:
            raise FormatError(
                f"{self._path} has GGUF version 1, which is too old.", fix="Convert the model with a current converter."
            )
        if version not in (2, 3):
            self._fail(f"its version is {version} (2 and 3 are known)")

    def _metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = self._string("a metadata key", _MAX_NAME)
            if key in metadata:
                self._fail(f"the metadata key {_short(key)} occurs twice")
            metadata[key] = self._value(self._scalar(_U32), key)
        return metadata

    def _value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string(f"metadata {_short(key)}")
        if kind != _ARRAY:
            self._fail(f"metadata {_short(key)} has the unknown type {kind}")
        if depth >= _MAX_NESTING:
            self._fail(f"metadata {_short(key)} nests arrays more than {_MAX_NESTING} deep")
        element, count = self._scalar(_U32), self._scalar(_U64)
        if element in _SCALARS:
            return self._scalar_array(_SCALARS[element], count, key)
        if element == _STRING:
            return self._string_array(count, key)
        self._check_count(count, 12, f"arrays in {_short(key)}")
        return [self._value(element, key, depth + 1) for _ in range(count)]

    def _scalar_array(self, kind: struct.Struct, count: int, key: str) -> list[Any]:
        self._check_count(count, kind.size, f"elements of {_short(key)}")
        raw = self._data[self._at : self._at + count * kind.size]
        self._at += len(raw)
        return [value for (value,) in kind.iter_unpack(raw)] if count else []

    def _string_array(self, count: int, key: str) -> list[str]:
        """Vocabularies have some 10⁵ entries, so this is the one loop that is written for speed."""
        self._check_count(count, 8, f"strings of {_short(key)}")
        data, at, size = self._data, self._at, self._size
        unpack: Callable[..., tuple[int]] = _U64.unpack_from
        strings: list[str] = []
        try:
            for _ in range(count):
                (length,) = unpack(data, at)
                start = at + 8
                at = start + length
                if at > size:
                    self._fail(f"a string of {_short(key)} claims {length} bytes, more than the file has left")
                strings.append(data[start:at].decode("utf-8"))
        except struct.error:
            self._fail(f"it ends within {_short(key)}")
        except UnicodeDecodeError:
            self._fail(f"a string of {_short(key)} is not valid UTF-8")
        self._at = at
        return strings

    def _check_split(self, metadata: dict[str, Any]) -> None:
        named = _SPLIT_NAME.search(self._path.name)
        count = metadata.get("split.count", int(named[1]) if named else 1)
        if isinstance(count, int) and count > 1:
            raise UnsupportedModel(
                f"{self._path} is one of {count} parts of a split GGUF model, which is not supported.",
                fix="Join the parts with `llama-gguf-split --merge FIRST_PART OUTPUT.gguf`.",
            )

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or isinstance(alignment, bool) or not 1 <= alignment <= _MAX_ALIGNMENT:
            self._fail(f"its alignment is {_short(alignment)} (a power of two up to {_MAX_ALIGNMENT} is needed)")
        if alignment & (alignment - 1):
            self._fail(f"its alignment is {alignment}, which is not a power of two")
        return alignment

    def _tensor_records(self, count: int) -> list[tuple[str, str, tuple[int, ...], int, int]]:
        """Each tensor's (name, type name, shape in torch order, offset after the data's start, bytes)."""
        records = []
        names: set[str] = set()
        for _ in range(count):
            name = self._string("a tensor's name", _MAX_NAME)
            if name in names:
                self._fail(f"the tensor {_short(name)} occurs twice")
            names.add(name)
            dimensions = self._scalar(_U32)
            if not 1 <= dimensions <= _MAX_DIMENSIONS:
                self._fail(f"tensor {_short(name)} has {dimensions} dimensions (1 to {_MAX_DIMENSIONS} are allowed)")
            extents = [self._scalar(_U64) for _ in range(dimensions)]
            kind, offset = self._scalar(_U32), self._scalar(_U64)
            if kind not in GGML_TYPES:
                self._fail(f"tensor {_short(name)} has the unknown type {kind}")
            type_name, block, block_bytes = GGML_TYPES[kind]
            elements = 1
            for extent in extents:
                elements *= extent
            if elements == 0:
                self._fail(f"tensor {_short(name)} has an empty dimension")
            if extents[0] % block:
                self._fail(
                    f"tensor {_short(name)} has rows of {extents[0]} elements, not a multiple of {type_name}'s {block}"
                )
            records.append((name, type_name, tuple(reversed(extents)), offset, elements // block * block_bytes))
        return records

    def _place(
        self, records: list[tuple[str, str, tuple[int, ...], int, int]], start: int, alignment: int
    ) -> dict[str, TensorInfo]:
        """Tensor records with absolute offsets, each inside the file and apart from all others."""
        tensors: dict[str, TensorInfo] = {}
        for name, type_name, shape, offset, nbytes in records:
            if offset % alignment:
                self._fail(f"tensor {_short(name)} is at offset {offset}, not a multiple of the alignment {alignment}")
            if start + offset + nbytes > self._size:
                self._fail(f"tensor {_short(name)} reaches to byte {start + offset + nbytes}, beyond the file's end")
            tensors[name] = TensorInfo(name, type_name, shape, self._path, start + offset, nbytes)
        end, before = 0, ""
        for info in sorted(tensors.values(), key=lambda info: info.offset):
            if info.offset < end:
                self._fail(f"the tensors {_short(before)} and {_short(info.name)} overlap")
            end, before = info.offset + info.nbytes, info.name
        return tensors


def _short(value: object) -> str:
    text = repr(value) if isinstance(value, str | int) else type(value).__name__
    return text if len(text) <= 40 else text[:37] + "..."

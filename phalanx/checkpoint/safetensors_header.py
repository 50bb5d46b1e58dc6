"""A bounded reader of safetensors headers: names, types, shapes and places of tensors, over one or several files.

Lengths and offsets are Python ints, checked against the file's size before anything is allocated. Tensor data is not
touched. The rules are those of the format: offsets cover the data exactly, in any order, without holes or overlaps.

Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from phalanx.checkpoint.tensor_info import TensorInfo
from phalanx.errors import CheckpointError, FormatError

# Bits per element.
SAFETENSORS_TYPES: dict[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "U16": 16,
    "I16": 16,
    "U32": 32,
    "I32": 32,
    "U64": 64,
    "I64": 64,
    "F16": 16,
    "BF16": 16,
    "F32": 32,
    "F64": 64,
    "C64": 64,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E8M0": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}

_MAX_HEADER = 100_000_000  # the format's own limit
_MAX_ELEMENTS = 2**63 - 1


def read_headers(files: Iterable[Path]) -> dict[str, TensorInfo]:
    """All tensors of `files`, by name. Raises FormatError when a file breaks the format or a name occurs twice, and
    CheckpointError when a file cannot be read."""
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in _read_header(Path(file)).items():
            if name in tensors:
                raise FormatError(f"The tensor {_short(name)} is in both {tensors[name].file} and {file}.")
            tensors[name] = info
    return tensors


def _read_header(path: Path) -> dict[str, TensorInfo]:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # before opening it: a pipe would keep us waiting
            raise CheckpointError(f"{path} is not a regular file.")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(24)
            if start.startswith(b"version https://git-lfs"):
                raise FormatError(
                    f"{path} is a Git LFS pointer, not the weights themselves.", fix="Fetch them with `git lfs pull`."
                )
            if len(start) < 8:
                _fail(path, f"it has only {len(start)} bytes")
            length = int.from_bytes(start[:8], "little")
            if length > _MAX_HEADER:
                _fail(path, f"its header claims {length} bytes (at most {_MAX_HEADER} are allowed)")
            if length > size - 8:
                _fail(path, f"its header claims {length} bytes, more than the file has")
            file.seek(8)
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from None
    header = _parse(path, raw)
    data = 8 + length
    tensors = {
        name: _tensor(path, name, entry, data, size - data) for name, entry in header.items() if name != "__metadata__"
    }
    _check_cover(path, tensors, data, size)
    return tensors


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    if not raw.startswith(b"{"):
        _fail(path, "its header is not a JSON object")
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except _DuplicateName as error:
        _fail(path, f"the name {_short(error.name)} occurs twice in its header")
    except (ValueError, RecursionError):
        _fail(path, "its header is not valid JSON")
    if not isinstance(header, dict):
        _fail(path, "its header is not a JSON object")
    return header


def _tensor(path: Path, name: str, entry: Any, data: int, size: int) -> TensorInfo:
    """Check one header entry; `data` is where tensor bytes begin in the file and `size` how many there are."""
    what = f"tensor {_short(name)}"
    if not isinstance(entry, dict):
        _fail(path, f"{what} is not described by an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in SAFETENSORS_TYPES:
        _fail(path, f"{what} has the unknown type {_short(dtype)}")
    if not isinstance(shape, list) or not all(_is_count(extent) for extent in shape):
        _fail(path, f"{what} has no valid shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets):
        _fail(path, f"{what} has no valid offsets")
    begin, end = offsets
    if begin > end:
        _fail(path, f"{what} ends before it begins")
    if end > size:
        _fail(path, f"{what} needs {end} bytes of data, but the file has {size}")
    elements = 1
    for extent in shape:
        elements *= extent
        if elements > _MAX_ELEMENTS:
            _fail(path, f"{what} claims more elements than any file can hold")
    bits = elements * SAFETENSORS_TYPES[dtype]
    if bits != 8 * (end - begin):
        _fail(path, f"{what} has {end - begin} bytes, which is not what its shape and type need")
    return TensorInfo(name, dtype, tuple(shape), path, data + begin, end - begin)


def _check_cover(path: Path, tensors: dict[str, TensorInfo], start: int, size: int) -> None:
    end, before = start, ""
    for info in sorted(tensors.values(), key=lambda info: (info.offset, info.nbytes)):
        if info.offset < end:
            _fail(path, f"the tensors {_short(before)} and {_short(info.name)} overlap")
        if info.offset > end:
            _fail(path, f"there is a hole before tensor {_short(info.name)}")
        end, before = info.offset + info.nbytes, info.name
    if end != size:
        _fail(path, f"it has {size - end} bytes that belong to no tensor")


class _DuplicateName(Exception):
    def __init__(self, name: str):
        super().__init__(name)
        self.name = name


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise _DuplicateName(name)
        result[name] = value
    return result


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _fail(path: Path, what: str) -> NoReturn:
    raise FormatError(
        f"{path} is not a valid safetensors file: {what}.",
        fix="The file may be incomplete or damaged: fetch or convert it again.",
    )


def _short(value: object) -> str:
    text = repr(value) if isinstance(value, str | int) else type(value).__name__
    return text if len(text) <= 40 else text[:37] + "..."

"""What is known of one stored tensor: its name, type, shape and the bytes that hold it.

Both file formats are described in these terms, so that the loader and the planner read one kind of record.
The bytes themselves are read by `phalanx.loading.tensors`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TensorInfo:
    """One tensor in a file.

    `dtype` is a safetensors name ("F32", "BF16", "I64", ...) or the name of a GGUF block type ("Q4_1", "Q6_K", ...).
    `shape` is in torch order, rows first, for both formats. `offset` is absolute in the file; both it and `nbytes`
    are in bytes and have been checked against the file's size.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int

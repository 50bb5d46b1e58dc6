"""What is known of one stored tensor: its name, type, shape and the bytes that hold it.

Both file formats are described in these terms, so that the loader and the planner read one kind of record.
The bytes themselves are read by `phalanx.loading.tensors`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# Types of elements that `phalanx.loading.tensors` can read: plain ones, and GGUF blocks.
PLAIN_TYPES = frozenset({"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"})
BLOCK_TYPES = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"})
READABLE_TYPES = PLAIN_TYPES | BLOCK_TYPES


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

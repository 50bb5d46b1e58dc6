"""The rows of a step in two calls: what a plan changes in the table of requests, and what the model gets of it.

The twins, with what it all means, are in `phalanx.worker.request_table`. They serve without the native library, and
wherever `advance` says None: for rows that do not fit (they know what is wrong), that need wider arrays, or penalties.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import astuple
from numpy.typing import NDArray

from phalanx.kernels.library import native
from phalanx.step import Rows

Ints = NDArray[np.int64]


class TableView:
    """Addresses of a table's arrays, which have to stay where they are. Raises ValueError where types or shapes do not
    fit."""

    def __init__(
        self, *, active: NDArray[np.bool_], penalised: NDArray[np.bool_], tokens: NDArray[np.int32], length: Ints,
        num_prompt: Ints, computed: Ints, block_table: NDArray[np.int32], num_blocks: Ints,
        sampled: NDArray[np.int32], max_length: int, block_size: int, blocks: int, vocab_size: int,
    ):  # fmt: skip
        slots = len(active)
        columns: Sequence[tuple[NDArray[Any], type[np.generic]]] = (
            (active, np.bool_), (penalised, np.bool_), (length, np.int64), (num_prompt, np.int64),
            (computed, np.int64), (num_blocks, np.int64), (sampled, np.int32),
        )  # fmt: skip
        for array, dtype in columns:
            if array.dtype != dtype or array.shape != (slots,) or not array.flags.c_contiguous:
                raise ValueError(f"a column of the table has to be {slots} neighbouring {dtype.__name__}")
        for array in (tokens, block_table):
            if array.dtype != np.int32 or array.ndim != 2 or len(array) != slots or not array.flags.c_contiguous:
                raise ValueError("tokens and block tables have to be contiguous int32, a row a slot")
        self.block_size = block_size
        self.arrays = (active, penalised, tokens, length, num_prompt, computed, block_table, num_blocks, sampled)
        self._numbers = np.array(
            [
                active.ctypes.data, penalised.ctypes.data, tokens.ctypes.data, tokens.shape[1], length.ctypes.data,
                num_prompt.ctypes.data, computed.ctypes.data, block_table.ctypes.data, block_table.shape[1],
                num_blocks.ctypes.data, sampled.ctypes.data, slots, max_length, block_size, blocks, vocab_size,
            ],
            np.int64,
        )  # fmt: skip
        self.address = self._numbers.ctypes.data


def serves() -> bool:
    return native() is not None


def advance(view: TableView, rows: Rows) -> tuple[Ints, Ints, Ints, Ints, NDArray[np.bool_]] | None:
    """Append the tokens and blocks of a plan's rows, and write those proposed behind them: their slots, the tokens
    computed before and in this step, how many of these are proposed, and whether all known ones are computed after it.
    None, with nothing changed, where the twin has to do it."""
    library, count = native(), len(rows.slots) // 2
    if library is None:
        return None
    found = np.empty((4, count), np.int64)
    samples = np.empty(count, np.bool_)
    start, size = found.ctypes.data, 8 * count
    done = library.advance_rows(
        view.address, astuple(rows), start, start + size, start + 2 * size, start + 3 * size, samples.ctypes.data
    )
    return (found[0], found[1], found[2], found[3], samples) if done else None


def gather(view: TableView, slots: Ints, starts: Ints, counts: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints, Any, Ints]:
    """For rows that `advance` gave: token ids, positions, query starts, context lengths, prompt lengths, block tables
    int32 [R, most blocks], and where keys and values go, as fresh arrays. Raises RuntimeError without the library."""
    library, rows = native(), len(slots)
    if library is None:
        raise RuntimeError("there is no native library")
    at = slots.ctypes.data, starts.ctypes.data, counts.ctypes.data
    total, width = library.size_rows(at[1], at[2], rows, view.block_size)
    tokens = np.empty((3, total), np.int64)
    lengths = np.empty((2, rows), np.int64)
    query_start = np.empty(rows + 1, np.int64)
    tables = np.empty((rows, width), np.int32)
    token, length = tokens.ctypes.data, lengths.ctypes.data
    library.gather_rows(
        view.address, *at, rows, width, token, token + 8 * total, query_start.ctypes.data, length, length + 8 * rows,
        tables.ctypes.data, token + 16 * total,
    )  # fmt: skip
    return tokens[0], tokens[1], query_start, lengths[0], lengths[1], tables, tokens[2]

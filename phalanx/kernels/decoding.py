"""Steps in which each request computes its last token, and tokens proposed behind it, and samples after each: from the
table of requests to the tokens.

What is between is a reel from the token table to the logits (`phalanx.kernels.tape`); so Python sees nothing of the
step but pauses. The twin, for all other steps too, is `phalanx.worker.model_runner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from msgspec.structs import astuple
from numpy.typing import NDArray

from phalanx.kernels.library import native
from phalanx.kernels.request_rows import TableView
from phalanx.kernels.tape import CannotRecord, Place, Reel
from phalanx.step import Rows

_TYPES = {torch.float32: 0, torch.bfloat16: 1}


class SamplingView:
    """Addresses of the columns of how requests sample, which have to stay where they are. Raises ValueError where types
    or shapes do not fit."""

    def __init__(
        self, *, simple: NDArray[np.bool_], temperature: NDArray[np.float64], top_p: NDArray[np.float64],
        min_p: NDArray[np.float64], top_k: NDArray[np.int64], choice: NDArray[np.int64], seed: NDArray[np.uint64],
    ):  # fmt: skip
        columns: Sequence[tuple[NDArray[Any], type[np.generic]]] = (
            (simple, np.bool_), (temperature, np.float64), (top_p, np.float64), (min_p, np.float64),
            (top_k, np.int64), (choice, np.int64), (seed, np.uint64),
        )  # fmt: skip
        for array, dtype in columns:
            if array.dtype != dtype or array.shape != simple.shape or not array.flags.c_contiguous:
                raise ValueError(f"a column of the table has to be neighbouring {dtype.__name__}, one a slot")
        self.arrays = tuple(array for array, _ in columns)
        self._numbers = np.array([array.ctypes.data for array in self.arrays], np.int64)
        self.address = self._numbers.ctypes.data


class Decoding:
    def __init__(
        self, reel: Reel, rotaries: Sequence[tuple[torch.Tensor, float]], stream: torch.Tensor, logits: torch.Tensor,
        first: int,
    ):  # fmt: skip
        """`reel` is threaded, and goes from the ids of tokens or the rows of `stream` [most rows, hidden] to `logits`
        float32 [most rows, tokens], those of the tokens from `first` on, or, if there are none, to the stream.
        `rotaries` are float32 frequencies [dim / 2] and a factor, as in `pointwise.turns`. Raises CannotRecord."""
        library, dtype = native(), stream.dtype
        if library is None or dtype not in _TYPES:
            raise CannotRecord(f"there are no kernels for {dtype} here")
        for room in (stream, logits):
            if len(room) != len(stream) or not room.is_contiguous() or not room.is_cpu:
                raise ValueError("rows have to be contiguous, on the CPU, and as many logits")
        if logits.dtype is not torch.float32:
            raise ValueError("logits have to be float32")
        for inverse, _ in rotaries:
            if inverse.dtype is not torch.float32 or inverse.dim() != 1 or not inverse.is_contiguous():
                raise CannotRecord("frequencies have to be a vector of float32")
            if 2 * len(inverse) > reel.narrowest:
                raise CannotRecord("a rotation is wider than a head")
        self._held = reel, rotaries, stream, logits
        self._exchange: Any = None
        self._native = library.Decoding(
            reel.native, [(inverse.data_ptr(), factor, len(inverse)) for inverse, factor in rotaries],
            _TYPES[dtype], stream.shape[1], logits.shape[1], first, stream.data_ptr(), logits.data_ptr(), len(stream),
        )  # fmt: skip

    def begin(self, table: TableView, how: SamplingView, rows: Rows, exchange: Any) -> bool:
        """Change the table by the plan's rows. False, and nothing is changed, when there are too many of them and of
        proposed tokens, or they do not fit, compute anything but a last token and those, or sample in another way than
        `how` says. `exchange` (`tape.exchange_of`) is with the ranks that have the other shares of the model; with None
        there are none. With it, rows whose sums take more than a round are not begun either, nor proposed tokens where
        the logits of one of the rows would be left to the caller."""
        self._exchange = exchange  # held on to
        done: bool = self._native.begin(table.address, how.address, astuple(rows), exchange)
        return done

    def play(self, place: Place, most: int) -> Place:
        """As `Reel.play`, but that no sum is left to the caller; the table and `how` of the beginning are still there.
        At the end the rows' tokens are computed, and the table has those sampled, if there are any, of rows without
        proposed ones."""
        return Place(*self._native.play(*place, most))

    def tokens(self) -> tuple[bytes, bytes]:
        """Slots (uint16) and tokens (int32), in the order of the rows, one for each token that stands: the first one
        sampled of a row, `NO_TOKEN` where the scores are not finite numbers, and those after proposed tokens that were
        sampled in their place. No tokens, and each slot once, where none are sampled: without logits, and where with
        other ranks one of the rows leaves tokens out."""
        found: tuple[bytes, bytes] = self._native.tokens()
        return found

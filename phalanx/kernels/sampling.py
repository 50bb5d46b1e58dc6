"""Passes over whole rows of logits: the largest, a draw, the first candidates in order, log-probabilities. And a draw
where several ranks have parts of the rows: what each tells of its own, and what all then decide.

The twins are in `phalanx.sampling`, with what the results mean: `sampler` with `race` and `truncation`, `order`,
`logprobs`, `random`, `split_vocabulary`. They serve where `serves` says no. A row's result depends on no other row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.kernels.library import native


def serves(logits: torch.Tensor) -> bool:
    """Whether the functions here take these logits: [R, V] in float32 on a CPU, contiguous, fewer than 2^31 a row."""
    return (
        native() is not None
        and logits.is_cpu
        and logits.dtype is torch.float32
        and logits.is_contiguous()
        and 0 < logits.shape[1] < 2**31
    )


@dataclass(slots=True)
class Draws:
    """How rows draw, each array [R]. At temperature 0 a row takes the largest logit, and the rest has no meaning."""

    temperature: NDArray[np.float64]
    top_k: NDArray[np.int64]
    """0 keeps all."""
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    keys: NDArray[np.uint64]


def choose(logits: torch.Tensor, draws: Draws | None, first: int = 0) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Of each row a token, [R], and the largest logit: NaN where there is one. The token is a drawn one, or the first
    of the largest (all rows: `draws` is None); -1 where the largest logit is not a finite number. Column 0 is token
    `first`."""
    rows, vocab = logits.shape
    tokens, bests = np.empty(rows, np.int64), np.empty(rows, np.float32)
    how = (0, 0, 0, 0, 0) if draws is None else _addresses(draws, rows)
    _library(logits).choose_tokens(logits.data_ptr(), rows, vocab, first, *how, tokens.ctypes.data, bests.ctypes.data)
    return tokens, bests


def first_candidates(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Columns int64 [R, count] of the first candidates: by falling logit, ties by column. Of logits without NaN."""
    rows, vocab = logits.shape
    if not 0 <= count <= vocab:
        raise ValueError(f"{count} candidates are not to be had of {vocab}")
    columns = torch.empty(rows, count, dtype=torch.int64)
    if count:
        _library(logits).candidates(logits.data_ptr(), rows, vocab, count, columns.data_ptr())
    return columns


def tell_candidates(
    logits: torch.Tensor, best: NDArray[np.float32], temperature: NDArray[np.float64], count: int, first: int
) -> NDArray[np.int32]:
    """What `choose_told` needs to know of these columns, the first of which is token `first`, as words: of each row,
    whose largest logit is `best`, the log of the sum of exp((logit - best) / temperature), [R]; tokens [R, count] of
    the first candidates; their logits. Behind those that there are, -1 and NaN."""
    rows, vocab = logits.shape
    if count < 1:
        raise ValueError(f"{count} candidates are too few")
    words = np.empty(rows * (1 + 2 * count), np.int32)
    tokens, values = words[rows:], words[rows * (1 + count) :]
    _library(logits).tell_candidates(
        logits.data_ptr(), rows, vocab, first, _address(best, np.float32, rows),
        _address(temperature, np.float64, rows), count, words.ctypes.data, tokens.ctypes.data, values.ctypes.data,
    )  # fmt: skip
    return words


def choose_told(
    tokens: NDArray[np.int32], logits: NDArray[np.float32], log_sum: NDArray[np.float64], draws: Draws, most: int, *,
    whole: bool,
) -> NDArray[np.int64] | None:  # fmt: skip
    """Of each row a token that is drawn, [R], from the candidates of all parts of a vocabulary, [parts, R, count];
    `log_sum` is of all of it. Each part's are in order, and those of the lower part have the lower tokens. The first
    `most` are looked at, which are all there are if `whole`; -1 where it takes more to know. None without the native
    library."""
    library, (parts, rows, count) = native(), tokens.shape
    if library is None:
        return None
    if most < 1 or count < 1:
        raise ValueError(f"there are no candidates among {most} of {count}")
    chosen = np.empty(rows, np.int64)
    library.choose_told(
        _address(tokens, np.int32, parts, rows, count), _address(logits, np.float32, parts, rows, count), parts, rows,
        count, most, whole, _address(log_sum, np.float64, rows), *_addresses(draws, rows), chosen.ctypes.data,
    )  # fmt: skip
    return chosen


@dataclass(slots=True)
class Logprobs:
    own: NDArray[np.float32]
    """[R]: of the row's token."""
    ranks: NDArray[np.int64]
    """[R]: of the row's token, from 1."""
    top_ids: NDArray[np.int32]
    """[R, count]: the first candidates."""
    top: NDArray[np.float32]


def logprobs(logits: torch.Tensor, tokens: NDArray[np.integer[Any]], count: int) -> Logprobs:
    """Log-softmax of each row's token, and of its first `count` candidates. Of logits without NaN."""
    rows, vocab = logits.shape
    columns = tokens.astype(np.int64)
    if not 0 <= count <= vocab or len(columns) != rows or not bool(((columns >= 0) & (columns < vocab)).all()):
        raise ValueError(f"tokens or candidates are outside a vocabulary of {vocab}")
    found = Logprobs(
        np.empty(rows, np.float32), np.empty(rows, np.int64), np.empty((rows, count), np.int32),
        np.empty((rows, count), np.float32),
    )  # fmt: skip
    _library(logits).logprobs(
        logits.data_ptr(), rows, vocab, columns.ctypes.data, count, found.own.ctypes.data, found.ranks.ctypes.data,
        found.top_ids.ctypes.data, found.top.ctypes.data,
    )  # fmt: skip
    return found


def row_keys(
    seed: NDArray[np.uint64], choice: NDArray[np.int64], position: NDArray[np.int64], purpose: int
) -> NDArray[np.uint64] | None:
    """`phalanx.sampling.random.row_keys` of arrays of these types, [R] each; None without the native library."""
    library, rows = native(), len(seed)
    if library is None:
        return None
    keys = np.empty(rows, np.uint64)
    library.row_keys(
        _address(seed, np.uint64, rows), _address(choice, np.int64, rows), _address(position, np.int64, rows),
        purpose, rows, _address(keys, np.uint64, rows),
    )  # fmt: skip
    return keys


def _library(logits: torch.Tensor) -> Any:
    if not serves(logits):
        raise ValueError("logits have to be [R, V] in float32 on a CPU, contiguous, with the native library")
    return native()


def _addresses(draws: Draws, rows: int) -> tuple[int, ...]:
    return (
        _address(draws.temperature, np.float64, rows), _address(draws.top_k, np.int64, rows),
        _address(draws.top_p, np.float64, rows), _address(draws.min_p, np.float64, rows),
        _address(draws.keys, np.uint64, rows),
    )  # fmt: skip


def _address(array: NDArray[Any], dtype: type[np.generic], *shape: int) -> int:
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(f"{math.prod(shape)} numbers of type {dtype.__name__} were to come, one after the other")
    return torch.from_numpy(array).data_ptr()

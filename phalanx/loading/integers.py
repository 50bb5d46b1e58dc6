"""Rows and columns of quantised matrices (GPTQ, AWQ, compressed-tensors), as the integers that they are or as numbers.

A number is scale · (integer - zero), taken in float32. Four-bit integers lie in int32 words, eight in each: along the
inputs in GPTQ and compressed-tensors, along the outputs in AWQ, where the words' nibbles belong to the outputs 0, 2, 4,
6, 1, 3, 5, 7 of eight. GPTQ (not `gptq_v2`) stores zeros less one, subtracted from the word as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from phalanx.checkpoint.quantized import QuantizedInfo
from phalanx.errors import FormatError
from phalanx.kernels.block_layout import BLOCK, place_in_group, shift_of
from phalanx.kernels.block_matmul import IntegerRows
from phalanx.loading.tensors import TensorReader

_WORD = 8
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""Of the eight outputs, the nibble that each is in."""
_ONES = 0x11111111
_ROWS = 256
"""That are made numbers at a time."""

Range = tuple[int, int]


@dataclass(frozen=True)
class QuantizedRows:
    """What a checkpoint has of some rows and columns."""

    integers: Tensor
    """int8, or uint8 below 16: [rows, columns]."""
    scales: Tensor
    """float32 [rows, sets]."""
    zeros: Tensor | None
    """uint8 [rows, sets]; None where they are 0."""
    sets: Tensor
    """int64 [columns]: the set of scale and zero that each belongs to."""
    ordered: bool
    """Sets are not of neighbouring columns."""
    group: int
    """Columns of the whole matrix that share a set; 0 for all."""
    start: int
    """Column of the whole matrix that is the first of these."""

    def in_order(self, rows: Tensor) -> QuantizedRows:
        """The rows with these numbers (int64)."""
        zeros = None if self.zeros is None else self.zeros[rows]
        return replace(self, integers=self.integers[rows], scales=self.scales[rows], zeros=zeros)


def read(reader: TensorReader, info: QuantizedInfo, rows: Range, columns: Range) -> QuantizedRows:
    """Rows and columns of the matrix. Raises FormatError when the tensors contradict each other, and what
    `TensorReader.read` does."""
    _check_shape(reader, info)
    group, inputs = info.form.group, info.shape[1]
    sets = torch.zeros(columns[1] - columns[0], dtype=torch.int64)
    ordered = False
    if group:
        sets = torch.arange(*columns) // group
        if info.order is not None:
            own = reader.read(info.order, columns).to(torch.int64)
            # compressed-tensors has -1 where groups are of neighbours.
            ordered = not torch.equal(own, sets) and not bool((own == -1).all())
            sets = own if ordered else sets
    if ordered and len(sets) and not 0 <= int(sets.min()) <= int(sets.max()) < info.form.groups(inputs):
        raise FormatError(f"{info.file}: '{info.order.name if info.order else ''}' names a group that there is not.")
    needed = (0, info.form.groups(inputs)) if ordered or not group else (columns[0] // group, -(-columns[1] // group))
    if columns[0] == columns[1]:
        needed = (0, 0)
    scales, zeros = _scales(reader, info, rows, needed), _zeros(reader, info, rows, needed)
    integers = _integers(reader, info, rows, columns)
    return QuantizedRows(integers, scales, zeros, sets - needed[0], ordered, group, columns[0])


def _check_shape(reader: TensorReader, info: QuantizedInfo) -> None:
    if info.stored_shape is not None:
        shape = tuple(reader.read(info.stored_shape).tolist())
        if shape != info.shape:
            raise FormatError(
                f"{info.file}: '{info.stored_shape.name}' is {list(shape)}, but the matrix is {list(info.shape)}."
            )


def _nibbles(words: Tensor) -> Tensor:
    """int32 [n, k] -> uint8 [n, k, 8], lowest first."""
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), -1).view(*words.shape, _WORD)


def _words(span: Range) -> Range:
    return span[0] // _WORD, -(-span[1] // _WORD)


def _cut(numbers: Tensor, span: Range) -> Tensor:
    """Of columns that begin at a word, those of `span`."""
    skip = span[0] % _WORD
    return numbers[:, skip : skip + span[1] - span[0]]


def _integers(reader: TensorReader, info: QuantizedInfo, rows: Range, columns: Range) -> Tensor:
    main = info.integers
    match info.form.packing:
        case "int8":
            return reader.read(main, rows, columns=columns)
        case "packed":
            return _cut(_nibbles(reader.read(main, rows, columns=_words(columns))).flatten(1), columns)
        case "gptq" | "gptq_v2":
            return _cut(_nibbles(reader.read(main, _words(columns), columns=rows).t()).flatten(1), columns)
        case "awq":
            found = _nibbles(reader.read(main, columns, columns=_words(rows)))[..., _AWQ_ORDER]
            return _cut(found.flatten(1), rows).t().contiguous()


def _scales(reader: TensorReader, info: QuantizedInfo, rows: Range, sets: Range) -> Tensor:
    if info.form.packing in ("int8", "packed"):
        return reader.read(info.scales, rows, columns=sets).float()
    return reader.read(info.scales, sets, columns=rows).t().float().contiguous()


def _zeros(reader: TensorReader, info: QuantizedInfo, rows: Range, sets: Range) -> Tensor | None:
    """For INT4 always: what is stored symmetrically is stored plus 8."""
    if info.form.packing == "int8":
        return None
    if info.zeros is None:
        return torch.full((rows[1] - rows[0], sets[1] - sets[0]), 8, dtype=torch.uint8)
    if info.form.packing == "packed":
        words = reader.read(info.zeros, _words(rows), columns=sets).t()
    else:
        words = reader.read(info.zeros, sets, columns=_words(rows))
    if info.form.packing == "gptq":
        words = words + _ONES
    found = _nibbles(words)
    if info.form.packing == "awq":
        found = found[..., _AWQ_ORDER]
    return _cut(found.flatten(1), rows).t().contiguous()


def numbers(held: QuantizedRows, dtype: torch.dtype = torch.float32) -> Tensor:
    """As numbers [rows, columns], rounded from float32."""
    out = torch.empty(held.integers.shape, dtype=dtype)
    for start in range(0, len(out), _ROWS):
        piece = slice(start, start + _ROWS)
        values = held.integers[piece].float()
        if held.zeros is not None:
            values -= held.zeros[piece].index_select(1, held.sets)
        out[piece] = values.mul_(held.scales[piece].index_select(1, held.sets))
    return out


def packable(reader: TensorReader, info: QuantizedInfo, rows: Range, columns: Range) -> QuantizedRows:
    """As `read`, from the beginning of the block of 32 on that the first column is in, where groups need that."""
    lead = place_in_group(info.dtype, columns[0], info.form.group)[1] if columns[0] < columns[1] else 0
    return read(reader, info, rows, (columns[0] - lead, columns[1]))


def integer_rows(held: QuantizedRows, columns: Range) -> IntegerRows:
    """As the kernels take them; `held` is of `packable` for these columns."""
    if held.zeros is None:
        return IntegerRows("INT8", held.integers, held.scales)
    if not held.group:
        return IntegerRows("INT4", held.integers, held.scales, held.zeros)
    if held.ordered:
        return _in_order(held, held.zeros, columns[0] - held.start)
    unit = BLOCK << shift_of("INT4", held.group)
    first = columns[0] // unit * unit
    sets = torch.arange(first, columns[1], unit) // held.group - held.start // held.group
    return IntegerRows("INT4", held.integers, held.scales[:, sets], held.zeros[:, sets], held.group, columns[0])


def _in_order(held: QuantizedRows, zeros: Tensor, skip: int) -> IntegerRows:
    """Columns from `skip` on, sorted by their sets. Where a set has no whole group of them (a rank has some of its
    inputs), it is filled up to whole blocks with integers that stand for 0, and each block has a scale of its own."""
    own_sets, integers = held.sets[skip:], held.integers[:, skip:]
    order = torch.argsort(own_sets, stable=True)
    counts = torch.bincount(own_sets, minlength=held.scales.shape[1])
    if bool((counts == held.group).all()):
        return IntegerRows("INT4", integers[:, order], held.scales, zeros, held.group, order=order)
    blocks = -(-counts // BLOCK)
    sets = torch.repeat_interleave(torch.arange(len(counts)), blocks)
    places = torch.arange(len(order)) + torch.repeat_interleave((blocks * BLOCK).cumsum(0) - blocks * BLOCK, counts)
    places -= torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    filled = torch.full((len(sets) * BLOCK,), -1)
    filled[places] = order
    scales, zeros = held.scales[:, sets], zeros[:, sets]
    blocked = zeros.repeat_interleave(BLOCK, 1)
    blocked[:, places] = integers[:, order]
    return IntegerRows("INT4", blocked, scales, zeros, BLOCK, order=filled)

"""Fills a decoder from a checkpoint, weight by weight, reading only the rows and columns that its rank holds.

Which tensor is which weight is decided beforehand, for the whole model (`checkpoint.rules.bind`), so that a checkpoint
with anything left over, missing or misshapen is refused before a byte is read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from phalanx.attention.base import AttentionBackend
from phalanx.checkpoint.locate import Checkpoint
from phalanx.checkpoint.quantized import QuantizedInfo
from phalanx.checkpoint.rules import Binding, Part, Piece, bind, bind_copies, spare_biases
from phalanx.checkpoint.tensor_info import BLOCK_TYPES
from phalanx.distributed.collectives import Groups
from phalanx.distributed.mesh import Mesh
from phalanx.errors import CheckpointError
from phalanx.kernels.block_matmul import IntegerRows
from phalanx.kernels.weight_memory import WeightMemory
from phalanx.layers.weights import WeightSlot
from phalanx.loading import integers
from phalanx.loading.dummy import fill_dummy
from phalanx.loading.tensors import TensorReader
from phalanx.models.decoder import Decoder
from phalanx.models.registry import weight_table
from phalanx.models.spec import DecoderSpec
from phalanx.models.split import Split
from phalanx.quantization.base import Scheme

Range = tuple[int, int]

Progress = Callable[[float], None]
"""Called with the share that is done, 0 to 1."""


def load_decoder(
    checkpoint: Checkpoint | None, spec: DecoderSpec, *, mesh: Mesh, rank: int, groups: Groups, dtype: torch.dtype,
    device: torch.device, backend: AttentionBackend, load_format: str = "auto",
    progress: Progress | None = None, scheme: Scheme | None = None, split: Split | None = None,
    memory: WeightMemory | None = None,
) -> Decoder:  # fmt: skip
    """The decoder of `rank`, filled. `load_format` "dummy" fills random numbers and needs no checkpoint; nor is one
    looked at where `memory`, in which the weights lie, is filled.

    Raises CheckpointError when tensors are left over, missing or of the wrong shape, ValueError for memory that was
    filled with something else, as far as that can be told here.
    """

    def build() -> Decoder:
        return Decoder(spec, mesh, rank, groups, dtype, device, backend, scheme=scheme, split=split, memory=memory)

    if memory is not None and memory.filled:
        decoder = build()
        for module in decoder.loadables():
            module.finish()
        return decoder
    if load_format == "dummy":
        decoder = build()
        _fill_all(decoder, fill_dummy, progress)
        return decoder
    if checkpoint is None:
        raise ValueError("a checkpoint is needed")
    table, tensors = weight_table(spec, checkpoint.format), checkpoint.tensors()
    binding = bind(table, tensors, spec.tensors)
    copies = bind_copies(table, tensors, spec.tensors)
    decoder = build()
    with TensorReader() as reader:
        for name, pieces in copies.items():
            _check_copy(pieces[0], binding[name], reader)
        for bias in spare_biases(table, tensors, spec.tensors):
            if reader.read(bias).any():
                raise CheckpointError(
                    f"The checkpoint has '{bias.name}', for which the model has no place.",
                    fix="Check that config.json belongs to these weights.",
                )
        _fill_all(decoder, lambda slot: _fill(slot, binding, reader), progress)
    return decoder


def _check_copy(copy: Piece, pieces: tuple[Piece, ...], reader: TensorReader) -> None:
    """Some rows at both ends and in the middle: training an untied head changes all of them."""
    for piece in pieces:
        middle = piece.length // 2
        for start in {0, middle, max(piece.length - 8, 0)}:
            stop = min(start + 8, piece.length)
            own, other = (_read(p, p.rows(start, stop), reader) for p in (piece, copy))
            if not torch.equal(own.float(), other.float()):
                raise CheckpointError(
                    f"The config says that '{copy.info.name}' is '{piece.info.name}', but the checkpoint's differ.",
                    fix="Set `tie_word_embeddings` to false in the config.",
                )


def _fill_all(decoder: Decoder, fill: Callable[[WeightSlot], None], progress: Progress | None) -> None:
    modules = list(decoder.loadables())
    total = sum(slot.target.nbytes for module in modules for slot in module.slots()) or 1
    done = 0
    with torch.inference_mode():
        for module in modules:
            for slot in module.slots():
                done += slot.target.nbytes
                fill(slot)
                if progress is not None:
                    progress(done / total)
            module.finish()


def _fill(slot: WeightSlot, binding: Binding, reader: TensorReader) -> None:
    """Copies this rank's rows and columns of one weight, piece by piece."""
    start, stop = slot.rows
    for piece in binding[slot.name]:
        first, last = max(start, piece.start), min(stop, piece.start + piece.length)
        if first >= last:
            continue
        rows = (first - piece.start, last - piece.start)
        part: Part = (rows,) if slot.columns is None else (rows, slot.columns)
        if isinstance(slot.target, torch.Tensor):
            # Matrices of blocks come out in the model's type at once: a large table's float32 copy would be the peak.
            blocks = piece.info.dtype in BLOCK_TYPES or isinstance(piece.info, QuantizedInfo)
            data = _read(piece, part, reader, slot.target.dtype if blocks and slot.columns is not None else None)
            slot.target[first - start : last - start].copy_(data)
        elif slot.columns is not None and _has_integers(piece) and slot.target.takes_blocks:
            slot.target.put_integers(first - start, _read_integers(piece, rows, slot.columns, reader))
        elif slot.columns is not None and _has_blocks(piece) and slot.target.takes_blocks:
            raw, columns = _read_blocks(piece, rows, slot.columns, reader)
            slot.target.put_blocks(first - start, piece.info.dtype, raw, columns)
        else:
            slot.target.put(first - start, _read(piece, part, reader))


def _has_blocks(piece: Piece) -> bool:
    return piece.info.dtype in BLOCK_TYPES and piece.keeps_rows


def _has_integers(piece: Piece) -> bool:
    return isinstance(piece.info, QuantizedInfo) and piece.keeps_rows


def _read_integers(piece: Piece, rows: Range, columns: Range, reader: TensorReader) -> IntegerRows:
    """Rows of a quantised matrix, put in the piece's order."""
    info, source = piece.info, piece.source((rows, columns))[0]
    if not isinstance(info, QuantizedInfo):
        raise TypeError(f"'{info.name}' is not quantised")
    held = integers.packable(reader, info, source, columns)
    if piece.operations:
        held = held.in_order(piece.take(torch.arange(source[1] - source[0])[:, None], (rows, (0, 1))).flatten())
    return integers.integer_rows(held, columns)


def _read_blocks(
    piece: Piece, rows: tuple[int, int], columns: tuple[int, int], reader: TensorReader
) -> tuple[torch.Tensor, tuple[int, int]]:
    """Rows of blocks that are rows of the file's, put in the piece's order, and where the columns are in them."""
    raw, within = reader.read_blocks(piece.info, piece.source((rows, columns))[0], columns)
    taken: torch.Tensor = piece.take(raw, (rows, (0, raw.shape[1])))
    return taken, within


def _read(piece: Piece, part: Part, reader: TensorReader, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A part of a piece, of which no more is read than its operations need."""
    rows, *columns = piece.source(part)
    if isinstance(piece.info, QuantizedInfo):
        held = integers.read(reader, piece.info, rows, columns[0])
        data: torch.Tensor = piece.take(integers.numbers(held, dtype or torch.float32), part)
        return data
    data = piece.take(reader.read(piece.info, rows, dtype, columns=columns[0] if columns else None), part)
    return data

"""A decoder's blocks as one native call: their kernels are written down once, and played each step.

A call of a kernel from Python costs some microseconds, and a block has eight of them: as much as the computing of a
small quantised model's token. What is played is what the wrappers in this package do one by one (`phalanx.models.tapes`
says which layers do), on buffers [T, width] in one workspace; native/tape.hpp has their order. The twin is the block
itself, computed layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from phalanx.kernels.attention import HeadNorm, PagedLayer, PagedStep, Rotation, head_norms
from phalanx.kernels.block_matmul import NUMBERS, BlockProduct
from phalanx.kernels.library import native
from phalanx.kernels.matmul import PackedMatrix
from phalanx.kernels.pointwise import ACTIVATIONS, NORM_TYPES

STREAM, DELTA, NORMED, WIDE, INNER, LOGITS = range(6)
"""Buffers: the residual stream, what is left to add to it, three of use within a block, and float32 logits."""
_NONE = 6

_TYPES = {torch.float32: 0, torch.bfloat16: 1}


class CannotRecord(Exception):
    """Something in a block has no native form; it is computed layer by layer."""


SUM, WAIT, PAUSE, END = range(4)


class Place(NamedTuple):
    """Where a reel has stopped, and why."""

    block: int = 0
    """What there is to do is counted here instead where sums are made in pieces (native/tape.hpp)."""
    entry: int = 0
    stop: int = PAUSE
    """A `SUM` of the delta over ranks is to be made, or to be `WAIT`ed for; it is a `PAUSE`, or the `END`."""


class Tape:
    """One block, or what is before or behind them. Holds on to the tensors whose addresses it has."""

    def __init__(self, dtype: torch.dtype, hidden: int, wide: int = 0, inner: int = 0, logits: int = 0):
        """`wide`, `inner` and `logits` numbers in a row of these buffers. Raises CannotRecord."""
        library = native()
        if library is None or dtype not in _TYPES:
            raise CannotRecord(f"there are no kernels for {dtype} here")
        self.dtype = dtype
        self.hidden = hidden
        self.logits = logits
        self._room = (hidden, hidden, hidden, wide, inner, logits)
        self._width = [hidden, hidden, 0, 0, 0, 0]
        """Of what is in each buffer now."""
        self.attends = (0, 0)
        """Numbers of query, key and value of a token, and of a head."""
        self.native = library.Tape(_TYPES[dtype], hidden, wide, inner)
        self._held: list[Any] = []

    # -- recording

    def look_up(self, table: PackedMatrix | BlockProduct | torch.Tensor | None, start: int) -> None:
        """The stream is the rows of a table that the step's tokens name. The table begins with row `start`; for rows
        that it does not have there are zeros. None: it is not in one piece."""
        if table is None or (not isinstance(table, BlockProduct) and table.dtype is not self.dtype):
            raise CannotRecord(f"there is no table of {self.dtype}")
        width = table.shape[1] if isinstance(table, torch.Tensor) else table.inputs
        if width != self.hidden:
            raise ValueError(f"the rows of a table have {width} numbers, a token has {self.hidden}")
        self._held.append(table)
        if isinstance(table, BlockProduct):
            self.native.look_up_blocks(*table.parts, width, table.lead, start)
        elif isinstance(table, torch.Tensor):
            self.native.look_up_plain(self._address(table), len(table), start)
        else:
            self.native.look_up_packed(table.data.data_ptr(), width, table.outputs, start)

    def norm(
        self, x: int, delta: int | None, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float,
        layer: bool, to: int,
    ) -> None:  # fmt: skip
        """As `pointwise.add_norm`. A delta that a tape begins with is the block before's, and may be missing."""
        types = NORM_TYPES.get((self.dtype, self.dtype if weight is None else weight.dtype))
        if types is None or any(t is not None and t.numel() != self.hidden for t in (weight, bias)):
            raise CannotRecord("a norm has weights of another type or size")
        self._take(x, self.hidden)
        self._fill(to, self.hidden)
        self.native.norm(
            x, _NONE if delta is None else delta, self._address(weight), self._address(bias), to, eps, layer, types
        )

    def multiply(
        self, x: int, matrices: Sequence[PackedMatrix | BlockProduct] | None, bias: torch.Tensor | None, to: int
    ) -> None:
        """`to` is the products with the matrices side by side; `bias` is that of all. None: torch multiplies."""
        if matrices is None:
            raise CannotRecord("a product is not native")
        pitch, column = sum(m.outputs for m in matrices), 0
        self._fill(to, pitch)
        for matrix in matrices:
            self._take(x, matrix.inputs)
            part = None if bias is None else bias[column : column + matrix.outputs]
            self._held += [matrix, part]
            if isinstance(matrix, BlockProduct):
                kind = 0 if part is None else NUMBERS[part.dtype]
                self.native.multiply_blocks(
                    x, to, column, pitch, *matrix.parts, self._address(part), kind, matrix.inputs, matrix.lead
                )
            elif matrix.dtype is not self.dtype or (part is not None and part.dtype is not self.dtype):
                raise CannotRecord(f"a product is not in {self.dtype}")
            else:
                address = matrix.data.data_ptr()
                self.native.multiply_packed(
                    x, to, column, pitch, address, self._address(part), matrix.inputs, matrix.outputs
                )
            column += matrix.outputs

    def attend(
        self, qkv: int, query_norm: HeadNorm | None, key_norm: HeadNorm | None, heads: int, kv_heads: int,
        head_dim: int, to: int,
    ) -> None:  # fmt: skip
        """As `attention.attend_merged`; the rotation and the factor of queries come when it is played."""
        self.attends = (heads + 2 * kv_heads) * head_dim, head_dim
        self._take(qkv, self.attends[0])
        self._fill(to, heads * head_dim)
        self._held += [query_norm, key_norm]
        self.native.attend(qkv, to, *head_norms(query_norm, key_norm, head_dim))

    def activate(self, name: str, x: int, width: int, to: int, *, gated: bool) -> None:
        """As `pointwise.activate`, or `activate_gated`; `width` is the result's."""
        if name not in ACTIVATIONS:
            raise CannotRecord(f"the activation {name} is not native")
        self._take(x, 2 * width if gated else width)
        self._fill(to, width)
        self.native.activate(x, to, width, ACTIVATIONS[name], gated)

    def sum_delta(self) -> None:
        """Over the ranks of the tensor group."""
        self._take(DELTA, self.hidden)
        self.native.sum(DELTA)

    def sum_stream(self) -> None:
        """Over the ranks of the tensor group. Only for tapes that are played where a sum takes one round."""
        self._take(STREAM, self.hidden)
        self.native.sum(STREAM)

    def add_bias(self, bias: torch.Tensor) -> None:
        """To the delta."""
        if bias.dtype is not self.dtype or bias.numel() != self.hidden:
            raise CannotRecord("a bias has another type or size")
        self.native.add_bias(self._address(bias))

    def _take(self, buffer: int, width: int) -> None:
        if self._width[buffer] != width:
            raise ValueError(f"{width} numbers a row are read where {self._width[buffer]} are")

    def _fill(self, buffer: int, width: int) -> None:
        if width > self._room[buffer]:
            raise ValueError(f"{width} numbers a row are written where {self._room[buffer]} have room")
        self._width[buffer] = width

    def _address(self, tensor: torch.Tensor | None) -> int:
        if tensor is None:
            return 0
        if not tensor.is_contiguous() or not tensor.is_cpu:
            raise CannotRecord("a tensor is not contiguous, or not on the CPU")
        self._held.append(tensor)
        return tensor.data_ptr()


class ReelBlock(NamedTuple):
    tape: Tape
    leaves_delta: bool
    """Beside the stream, for the next block to add."""
    turn: int
    """Which of a step's rotations; -1: none."""
    factor: int
    """Which of a step's factors of queries; -1: none."""


class Reel:
    """The tapes of a rank's blocks, and of what is before and behind them."""

    def __init__(self, blocks: Sequence[ReelBlock]):
        library = native()
        if library is None or len({block.tape.dtype for block in blocks}) != 1:
            raise CannotRecord("blocks are computed in different types")
        self._library = library
        self._blocks = tuple(blocks)
        self.native = library.Reel([(b.tape.native, b.leaves_delta, b.turn, b.factor) for b in blocks])
        self._layers: Sequence[PagedLayer] = ()
        self.narrowest = 0
        """Of their heads."""
        self._room = (0, 0)
        """Tokens of the last step, and the bytes of workspace that they took."""

    def thread(self, layers: Sequence[PagedLayer] | None) -> None:
        """These are the blocks' caches, or there are none. Raises ValueError for those of other shapes."""
        if layers is None:
            self._layers = ()
            self.native.thread([])
            return
        attending = [block for block in self._blocks if block.tape.attends != (0, 0)]
        for block, layer in zip(attending, layers, strict=True):
            if (layer.width, layer.dim) != block.tape.attends:
                raise ValueError("a layer of attention is not of the recorded shape")
        self._layers = layers  # held on to
        self.narrowest = min(layer.dim for layer in layers)
        self.native.thread([layer.layer for layer in layers])

    def workspace_bytes(self, rows: int) -> int:
        if self._room[0] != rows:
            self._room = rows, self.native.workspace_bytes(rows)
        return self._room[1]

    def begin(
        self, workspace: torch.Tensor, stream: torch.Tensor, step: PagedStep, turns: Sequence[Rotation],
        factors: Sequence[torch.Tensor], exchange: Any,
    ) -> Any:  # fmt: skip
        """A step for `play`: blocks compute on `stream` [T, hidden], in place, and a delta, which stands first in
        `workspace` (uint8, aligned to a cache line). `exchange` is an `exchange_of` the group's rounds, or None. The
        caller keeps all of it until the step is over."""
        first = self._blocks[0].tape
        if (
            stream.shape != (step.tokens, first.hidden) or stream.dtype is not first.dtype
            or not stream.is_contiguous() or workspace.nbytes < self.workspace_bytes(step.tokens)
            or any(f.numel() != step.tokens or f.dtype is not first.dtype or not f.is_contiguous() for f in factors)
        ):  # fmt: skip
            raise ValueError("the stream, its workspace or the factors do not fit the step")
        return self._library.TapeStep(
            workspace.data_ptr(), stream.data_ptr(), step.tokens, step.plan,
            [step.rotation(turn, self.narrowest) for turn in turns], [f.data_ptr() for f in factors], exchange,
        )  # fmt: skip

    def play(self, step: Any, place: Place, most: int) -> Place:
        """On from `place`, where what it stopped for is done, for `most` blocks."""
        return Place(*self.native.play(step, *place, most))


def exchange_of(rounds: Sequence[Any]) -> Any:
    """What native code exchanges with, from the numbers of a group's rounds (native/exchange.hpp has their order)."""
    library = native()
    if library is None:
        raise ValueError("there is no native library")
    return library.Exchange(*rounds)

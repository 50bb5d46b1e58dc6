"""The group of ranks on one node: tensors are exchanged through a shared segment.

Every collective is one or more rounds. In a round each rank writes its piece into its own slot, raises its flag to
the round's number and waits for all others' flags. Slots are double, by the parity of the round: a rank that raises
its flag to n + 1 has read what it wanted of round n, and writes for round n + 2 only when everybody has raised theirs
to n + 1, so what is being read is never overwritten. Beside its flag a rank leaves what it thinks the round is
(operation, dtype, bytes and a check of the shapes), double for the same reason, so that ranks that disagree find out
at once instead of adding up unrelated numbers. `send` and `recv` use a mailbox a pair, with its own flags and two
slots, and wait for each other only.

Sums are taken in rank order everywhere, so that all ranks hold the same bits; narrow floats are summed in float32 when
more than two ranks take part. A large sum is made slice by slice, each by one rank; one of many rows in pieces of whole
rows, a round each, so that native code can compute some rows while it waits for others. A rank whose exchange fails
leaves the group, so that nobody waits for it. Does not start or watch processes: a peer that was killed is noticed by
whoever started it, and told through the `Abort`.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from phalanx.distributed.transports.abort import Abort, GroupBroken
from phalanx.distributed.transports.rounds import Rounds
from phalanx.distributed.transports.segment import LINE, WEAK, Segment
from phalanx.distributed.transports.sums import (
    ALL_REDUCE,
    BARRIER,
    BROADCAST,
    DTYPES,
    GATHER,
    SCATTER,
    SEND,
    TO_ALL,
    add_up,
    as_bytes,
    described,
    matrix,
    slices,
)

SLOT = 1 << 21
"""Bytes a rank can hand over in one round."""

_WHOLE_SUM = 1 << 19
"""Up to this many bytes of all ranks together, every rank adds everything up itself, in one round; above, each adds up
a slice and the slices are shared, unless they are rows."""
_PIECE_ROWS = 256
"""Rows that are more are summed so many at a time, or as many as make a small sum: who computes rows can go on then."""

_SMALL_SHAPES = 512

_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}


class _Gather(NamedTuple):
    """What is the same in every gather of one shape."""

    what: int
    shape: list[int]
    rows: int
    widths: list[int]
    """Entries that each rank puts into a row."""
    views: list[list[torch.Tensor]] | None
    """By parity and rank, the slot as such a part; None when a part is longer than a slot."""


class SharedMemoryGroup:
    def __init__(self, segment: Segment, rank: int, ranks: Sequence[int], timeout: float | None):
        """`ranks` are the members' numbers in the world, for messages; `timeout` in seconds bounds every wait."""
        self.rank, self.size = rank, len(ranks)
        self._segment, self._ranks, self._timeout = segment, tuple(ranks), timeout
        self._pulse = segment.pulse
        self._mine = LINE * rank
        self._others = tuple(r for r in range(self.size) if r != rank)
        self._peers = tuple((r, LINE * r) for r in self._others)
        self._rounds = array("q", [0])
        """The number of the last round, where others who begin rounds count it too."""
        self._what = 0
        self._known_rounds: dict[torch.dtype, Rounds] = {}
        self._sent = [0] * self.size
        self._received = [0] * self.size
        self._views: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._sliced: dict[tuple[int, torch.dtype], list[list[tuple[torch.Tensor, ...]]]] = {}
        self._gathers: dict[tuple[torch.Size, torch.dtype, int, tuple[int, ...]], _Gather] = {}
        self._small: dict[tuple[torch.Size, torch.dtype], tuple[int, list[list[torch.Tensor]]]] = {}

    @classmethod
    def create(
        cls, rank: int, ranks: Sequence[int], abort: Abort, crowded: bool, timeout: float | None
    ) -> SharedMemoryGroup:
        """In the member that makes the segment; the others need `group.fds`."""
        words, data = _layout(len(ranks))
        return cls(Segment.create(rank, _names(ranks), words, data, abort, crowded), rank, ranks, timeout)

    @classmethod
    def attach(
        cls, fds: Sequence[int], rank: int, ranks: Sequence[int], abort: Abort, crowded: bool, timeout: float | None
    ) -> SharedMemoryGroup:
        """The descriptors belong to the group from here on."""
        words, data = _layout(len(ranks))
        segment = Segment(fds[0], list(fds[1:]), rank, _names(ranks), words, data, abort, crowded)
        return cls(segment, rank, ranks, timeout)

    def describe(self) -> dict[str, Any]:
        return {"transport": "shared memory", "sliced_from_bytes": _WHOLE_SUM // self.size + 1, "round_bytes": SLOT}

    @property
    def fds(self) -> list[int]:
        return self._segment.fds

    # -- one round ---------------------------------------------------------------------------------------------

    def _exchange(self, what: int) -> int:
        """This rank's piece is in its slot; returns, when everybody's is, the parity that says which slots those are.

        `what` must be equal on all ranks.
        """
        rounds, segment = self._rounds, self._segment
        rounds[0] = number = rounds[0] + 1
        segment.words[self._mine + 1 + (number & 1)] = what
        segment.publish(self._mine, number, self._others)
        self._join(number, what)
        return number & 1

    def _join(self, number: int, what: int) -> None:
        """Until everybody's piece of this round is there."""
        self._what = what
        self._pulse.count += 1
        words, said = self._segment.words, 1 + (number & 1)
        for other, theirs in self._peers:
            if words[theirs] < number or WEAK:
                self._wait(theirs, number, other, self._describe_round)
            if words[theirs + said] != what:
                raise self._disagreement(other, words[theirs + said])

    def rounds(self, dtype: torch.dtype) -> Rounds:
        found = self._known_rounds.get(dtype)
        if found is None:
            segment = self._segment
            if segment.fd < 0:
                raise GroupBroken("The group is closed.")
            words = torch.frombuffer(segment.memory, dtype=torch.uint8).data_ptr()
            found = self._known_rounds[dtype] = Rounds(
                self.rank, self.size, words, self._rounds.buffer_info()[0], LINE, segment.sleeping,
                tuple(segment.bells), words + segment.data_offset, SLOT, _WHOLE_SUM, _PIECE_ROWS,
                _what(ALL_REDUCE, dtype, 0), _what(GATHER, torch.int32, 0), segment.spins,
            )  # fmt: skip
        return found

    def join_round(self) -> None:
        number = self._rounds[0]
        self._join(number, self._segment.words[self._mine + 1 + (number & 1)])

    def _wait(self, word: int, target: int, other: int, what: Callable[[], str]) -> None:
        try:
            self._segment.wait(word, target, other, what, self._timeout)
        except GroupBroken:
            self._segment.leave()
            raise

    def _broken(self, message: str) -> GroupBroken:
        """This rank leaves; its error."""
        self._segment.leave()
        return GroupBroken(message)

    def _disagreement(self, other: int, theirs: int) -> GroupBroken:
        mine, others = _describe(self._what), _describe(theirs)
        shapes = ", but of other shapes" if mine == others else ""
        return self._broken(
            f"Ranks disagree in exchange {self._rounds[0]}: rank {self._ranks[self.rank]} is in {mine}, "
            f"rank {self._ranks[other]} in {others}{shapes}."
        )

    def _describe_round(self) -> str:
        return f"exchange {self._rounds[0]}, {_describe(self._what)}"

    def _slot(self, parity: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
        """The whole slot as a flat tensor."""
        return self._view(parity * self.size + rank, dtype)

    def _view(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        view = self._views.get((index, dtype))
        if view is None:
            view = self._views[index, dtype] = torch.frombuffer(
                self._segment.memory,
                dtype=dtype,
                count=SLOT // dtype.itemsize,
                offset=self._segment.data_offset + index * SLOT,
            )
        return view

    @property
    def _next(self) -> int:
        return (self._rounds[0] + 1) & 1

    # -- collectives -------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """In place where `tensor` is contiguous."""
        known = self._small.get((tensor.shape, tensor.dtype))
        if known is None or not tensor.is_contiguous():
            nbytes = tensor.numel() * tensor.element_size()
            if nbytes * self.size > _WHOLE_SUM or not nbytes:
                rows = _piece_rows(tensor, self.size)
                return self._all_reduce_rows(tensor, rows) if rows else self._all_reduce_large(tensor, nbytes)
            tensor = tensor.contiguous()
            known = self._remember(tensor, nbytes)
        what, views = known
        views[self._next][self.rank].copy_(tensor)
        pieces = views[self._exchange(what)]
        if self.size == 2:
            return torch.add(pieces[0], pieces[1], out=tensor)
        add_up(pieces, tensor)
        return tensor

    def _remember(self, tensor: torch.Tensor, nbytes: int) -> tuple[int, list[list[torch.Tensor]]]:
        """The slots seen as tensors of this shape: most calls of a model have one of a few shapes."""
        if len(self._small) >= _SMALL_SHAPES:
            self._small.clear()
        count, shape, dtype = tensor.numel(), tensor.shape, tensor.dtype
        views = [[self._slot(parity, r, dtype)[:count].view(shape) for r in range(self.size)] for parity in (0, 1)]
        known = self._small[shape, dtype] = (_what(ALL_REDUCE, dtype, nbytes), views)
        return known

    def _all_reduce_rows(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        """`rows` at a time, each in one round, as native code does it (native/tape.hpp)."""
        out = tensor.contiguous()
        for piece in torch.split(out.view(-1), rows * out.shape[1]):
            count = piece.numel()
            self._slot(self._next, self.rank, out.dtype)[:count].copy_(piece)
            parity = self._exchange(_what(ALL_REDUCE, out.dtype, count * out.element_size()))
            add_up([self._slot(parity, r, out.dtype)[:count] for r in range(self.size)], piece)
        return out

    def _all_reduce_large(self, tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
        """Each rank adds up one slice of every piece."""
        out = tensor.contiguous()
        flat, what = out.view(-1), _what(ALL_REDUCE, out.dtype, nbytes)
        me, ranks = self.rank, range(self.size)
        for piece in torch.split(flat, SLOT // out.element_size()):
            lengths = [b - a for a, b in slices(piece.numel(), self.size)]
            views = self._slices(lengths, piece.dtype)
            mine = torch.split(piece, lengths)
            slot = views[self._next][me]
            for r in self._others:
                slot[r].copy_(mine[r])
            slots = views[self._exchange(what)]
            add_up([mine[r] if r == me else slots[r][me] for r in ranks], views[self._next][me][me])
            slots = views[self._exchange(what)]
            for r in ranks:
                mine[r].copy_(slots[r][r])
        return out

    def _slices(self, lengths: list[int], dtype: torch.dtype) -> list[list[tuple[torch.Tensor, ...]]]:
        """By parity and rank: the front of the slot in slices, one a rank. Kept: pieces have few lengths."""
        count = sum(lengths)
        views = self._sliced.get((count, dtype))
        if views is None:
            if len(self._sliced) >= _SMALL_SHAPES:
                self._sliced.clear()
            slots = [[self._slot(parity, r, dtype)[:count] for r in range(self.size)] for parity in (0, 1)]
            views = self._sliced[count, dtype] = [[torch.split(slot, lengths) for slot in half] for half in slots]
        return views

    def all_gather(self, tensor: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        mine = tensor.contiguous()
        key = (mine.shape, mine.dtype, dim, tuple(lengths))
        known = self._gathers.get(key)
        if known is None:
            if len(self._gathers) >= _SMALL_SHAPES:
                self._gathers.clear()
            known = self._gathers[key] = self._plan_gather(mine, dim, lengths)
        out = mine.new_empty(known.shape)
        source, target = mine.view(known.rows, known.widths[self.rank]), out.view(known.rows, sum(known.widths))
        parts = torch.split(target, known.widths, 1)
        parts[self.rank].copy_(source)
        if known.views is None:
            self._gather_in_pieces(source, parts, known)
            return out
        known.views[self._next][self.rank].copy_(source)
        slots = known.views[self._exchange(known.what)]
        for r in self._others:
            parts[r].copy_(slots[r])
        return out

    def _plan_gather(self, mine: torch.Tensor, dim: int, lengths: Sequence[int]) -> _Gather:
        rows, inner = matrix(mine.shape, dim)
        dim %= mine.dim()
        if len(lengths) != self.size or lengths[self.rank] != mine.shape[dim]:
            raise self._misfit(lengths, mine.shape[dim])
        shape = [*mine.shape[:dim], sum(lengths), *mine.shape[dim + 1 :]]
        widths = [n * inner for n in lengths]
        nbytes = rows * sum(widths) * mine.element_size()
        plain = mine.dim() == 1 and len(set(lengths)) == 1  # then the bytes say all of it
        what = _what(GATHER, mine.dtype, nbytes, *(() if plain else (rows, inner, *lengths)))
        if rows * max(widths) * mine.element_size() > SLOT:
            return _Gather(what, shape, rows, widths, None)
        views = [
            [self._slot(parity, r, mine.dtype)[: rows * w].view(rows, w) for r, w in enumerate(widths)]
            for parity in (0, 1)
        ]
        return _Gather(what, shape, rows, widths, views)

    def _gather_in_pieces(self, source: torch.Tensor, parts: Sequence[torch.Tensor], known: _Gather) -> None:
        """Some rows at a time, or some columns of one row."""
        dtype, widest = source.dtype, max(known.widths)
        across = min(widest, SLOT // dtype.itemsize)
        down = SLOT // dtype.itemsize // across
        for row in range(0, known.rows, down):
            for column in range(0, widest, across):
                piece = source[row : row + down, column : column + across]
                self._slot(self._next, self.rank, dtype)[: piece.numel()].view(piece.shape).copy_(piece)
                parity = self._exchange(known.what)
                for r in self._others:
                    part = parts[r][row : row + down, column : column + across]
                    part.copy_(self._slot(parity, r, dtype)[: part.numel()].view(part.shape))

    def reduce_scatter(self, tensor: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        if len(lengths) != self.size or sum(lengths) != tensor.shape[dim]:
            raise self._misfit(lengths, tensor.shape[dim])
        leading = tensor.movedim(dim, 0).contiguous()
        row = leading.shape[1:].numel()
        first = sum(lengths[: self.rank]) * row
        out = leading.new_empty([lengths[self.rank], *leading.shape[1:]])
        flat, mine = leading.view(-1), out.view(-1)
        what = _what(SCATTER, leading.dtype, flat.numel() * flat.element_size(), row, *lengths)
        step = SLOT // tensor.element_size()
        for start in range(0, max(flat.numel(), 1), step):
            piece = flat[start : start + step]
            self._slot(self._next, self.rank, tensor.dtype)[: piece.numel()].copy_(piece)
            parity = self._exchange(what)
            low, high = max(start, first), min(start + piece.numel(), first + mine.numel())
            if low < high:
                parts = [self._slot(parity, r, tensor.dtype)[low - start : high - start] for r in range(self.size)]
                add_up(parts, mine[low - first : high - first])
        return out.movedim(0, dim).contiguous()

    def all_to_all(self, tensors: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        dtype = tensors[0].dtype
        out = [tensors[0].new_empty(shape) for shape in shapes]
        outgoing = torch.cat([tensor.reshape(-1) for tensor in tensors])
        sizes = torch.tensor([[t.numel() for t in tensors], [t.numel() for t in out]], dtype=torch.int64)
        what = _what(TO_ALL, dtype, 0)
        self._slot(self._next, self.rank, torch.int64)[: 2 * self.size].view(2, -1).copy_(sizes)
        parity = self._exchange(what)
        tables = [self._slot(parity, r, torch.int64)[: 2 * self.size].view(2, -1).tolist() for r in range(self.size)]
        for source in range(self.size):
            for to in range(self.size):
                sent, expected = tables[source][0][to], tables[to][1][source]
                if sent != expected:
                    raise self._broken(
                        f"Ranks disagree in exchange {self._rounds[0]}: in all_to_all, "
                        f"rank {self._ranks[source]} sends {sent} entries, rank {self._ranks[to]} expects {expected}."
                    )
        step = SLOT // dtype.itemsize
        for start in range(0, max(sum(sent) for sent, _ in tables), step):
            piece = outgoing[start : start + step]
            self._slot(self._next, self.rank, dtype)[: piece.numel()].copy_(piece)
            parity = self._exchange(what)
            for r in range(self.size):
                first = sum(tables[r][0][: self.rank])
                low, high = max(start, first), min(start + step, first + out[r].numel())
                if low < high:
                    source_piece = self._slot(parity, r, dtype)[low - start : high - start]
                    out[r].view(-1)[low - first : high - first].copy_(source_piece)
        return out

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        mine = self.rank == source
        out = tensor.contiguous() if mine else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        flat = out.view(-1)
        what = _what(BROADCAST, out.dtype, flat.numel() * flat.element_size(), source)
        step = SLOT // out.element_size()
        for start in range(0, max(flat.numel(), 1), step):
            piece = flat[start : start + step]
            if mine:
                self._slot(self._next, source, out.dtype)[: piece.numel()].copy_(piece)
            parity = self._exchange(what)
            if not mine:
                piece.copy_(self._slot(parity, source, out.dtype)[: piece.numel()])
        return out

    def barrier(self) -> None:
        self._exchange(_what(BARRIER, torch.uint8, 0))

    def _misfit(self, lengths: Sequence[int], mine: int) -> GroupBroken:
        return self._broken(
            f"Rank {self._ranks[self.rank]} was given lengths {list(lengths)}, which do not fit its own {mine}."
        )

    # -- pairs -------------------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Returns when the last of it is in the mailbox, which holds two slots."""
        box = _box(self.size, self.rank, to)
        words = self._segment.words
        flat = as_bytes(tensor.contiguous())
        what = _what(SEND, tensor.dtype, flat.numel())
        for start in range(0, max(flat.numel(), 1), SLOT):
            piece = flat[start : start + SLOT]
            count = self._sent[to]
            if words[box + LINE] < count - 1 or WEAK:  # two pieces fit: wait for all but the last to be read
                self._wait(box + LINE, count - 1, to, lambda: f"send of {_describe(what)}")
            self._mail(self.rank, to, count & 1)[: piece.numel()].copy_(piece)
            words[box + 1 + (count & 1)] = what
            self._sent[to] = count + 1
            self._segment.publish(box, count + 1, (to,))

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> torch.Tensor:
        box = _box(self.size, source, self.rank)
        words = self._segment.words
        out = torch.empty(shape, dtype=dtype)
        flat = as_bytes(out)
        what = _what(SEND, dtype, flat.numel())
        for start in range(0, max(flat.numel(), 1), SLOT):
            piece = flat[start : start + SLOT]
            count = self._received[source]
            if words[box] < count + 1 or WEAK:
                self._wait(box, count + 1, source, lambda: "recv")
            if words[box + 1 + (count & 1)] != what:
                raise self._broken(
                    f"Ranks disagree: rank {self._ranks[source]} does a {_describe(words[box + 1 + (count & 1)])}, "
                    f"rank {self._ranks[self.rank]} expects a {_describe(what)}."
                )
            piece.copy_(self._mail(source, self.rank, count & 1)[: piece.numel()])
            self._received[source] = count + 1
            self._segment.publish(box + LINE, count + 1, (source,))
        return out

    def _mail(self, source: int, to: int, parity: int) -> torch.Tensor:
        return self._view(2 * self.size + 2 * (source * self.size + to) + parity, torch.uint8)

    def close(self) -> None:
        """Leave the group and let go of the memory. Idempotent."""
        if self._segment.fd >= 0:
            self._segment.leave()
        self._views.clear()
        self._sliced.clear()
        self._gathers.clear()
        self._small.clear()
        self._known_rounds.clear()
        self._segment.close()


def _piece_rows(tensor: torch.Tensor, size: int) -> int:
    """How many rows of a large tensor are summed at a time; 0 where it is not made of more rows than that."""
    if tensor.dim() != 2 or not tensor.numel():
        return 0
    width = tensor.shape[1] * tensor.element_size()
    rows = min(max(_PIECE_ROWS, _WHOLE_SUM // size // width), SLOT // width)
    return rows if rows < len(tensor) else 0


def _names(ranks: Sequence[int]) -> list[str]:
    return [f"rank {rank}" for rank in ranks]


def _what(operation: int, dtype: torch.dtype, nbytes: int, *shape: int) -> int:
    """What a rank says it does: operation, dtype, a check of what else must be equal, and bytes, in one word."""
    number = _NUMBERS.get(dtype)
    if number is None:
        raise ValueError(f"{dtype} cannot be exchanged")
    check = zlib.crc32(repr(shape).encode()) & 0x1FFF if shape else 0
    return operation << 58 | number << 53 | check << 40 | nbytes & (1 << 40) - 1


def _describe(what: int) -> str:
    return described(what >> 58 & 0xF, what >> 53 & 0x1F, what & (1 << 40) - 1)


def _box(size: int, source: int, to: int) -> int:
    """A pair's mailbox flags: pieces written (and what each parity holds); a line later, pieces read. They lie behind
    the ranks' own lines, each of which holds a rank's round and what it did in the last two."""
    return LINE * (size + 2 * (source * size + to))


def _layout(size: int) -> tuple[int, int]:
    """Words and data bytes of a group's segment. Memory that is never written takes no space."""
    return LINE * (size + 2 * size * size), SLOT * (2 * size + 2 * size * size)

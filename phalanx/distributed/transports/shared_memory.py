"""The group of ranks on one node: tensors are exchanged through a shared segment.

Every collective is one or more rounds. In a round each rank writes its piece into its own slot, raises its flag to
the round's number and waits for all others' flags. Slots are double: a rank can be at most one round ahead of the
slowest, so what is being read is never overwritten. Beside its flag a rank leaves what it thinks the round is
(operation and bytes), so that ranks that disagree find out at once instead of adding up unrelated numbers.
`send` and `recv` use a mailbox a pair, with their own flags, and wait for each other only.

Sums are taken in rank order everywhere, so that all ranks hold the same bits; bfloat16 is summed in float32 when more
than two ranks take part. Does not start or watch processes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.distributed.transports.abort import Abort, GroupBroken
from phalanx.distributed.transports.segment import LINE, WEAK, Segment

SLOT = 1 << 20
"""Bytes a rank can hand over in one round."""

_WHOLE_SUM = 1 << 16
"""Up to this many bytes every rank adds everything up itself; above, each adds up a slice and the slices are shared."""

_SMALL_SHAPES = 512

_ALL_REDUCE, _SHARE, _GATHER, _SCATTER, _TO_ALL, _BROADCAST, _BARRIER = range(1, 8)
_OPERATIONS = (
    "nothing",
    "all_reduce",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "barrier",
)


class SharedMemoryGroup:
    def __init__(self, segment: Segment, rank: int, size: int, ranks: Sequence[int], timeout: float | None):
        """`ranks` are the members' numbers in the world, for messages; `timeout` in seconds bounds every wait."""
        self.rank, self.size = rank, size
        self._segment, self._ranks, self._timeout = segment, tuple(ranks), timeout
        self._others = tuple(r for r in range(size) if r != rank)
        self._round = 0
        self._sent = [0] * size
        self._received = [0] * size
        self._views: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._small: dict[tuple[torch.Size, torch.dtype], list[list[torch.Tensor]]] = {}

    @classmethod
    def create(
        cls, rank: int, ranks: Sequence[int], abort: Abort, crowded: bool, timeout: float | None
    ) -> SharedMemoryGroup:
        """In the member that makes the segment; the others need `group.fds`."""
        words, data = _layout(len(ranks))
        return cls(Segment.create(len(ranks), rank, words, data, abort, crowded), rank, len(ranks), ranks, timeout)

    @classmethod
    def attach(
        cls, fds: Sequence[int], rank: int, ranks: Sequence[int], abort: Abort, crowded: bool, timeout: float | None
    ) -> SharedMemoryGroup:
        words, data = _layout(len(ranks))
        segment = Segment(fds[0], list(fds[1:]), rank, words, data, abort, crowded)
        return cls(segment, rank, len(ranks), ranks, timeout)

    @property
    def fds(self) -> list[int]:
        return self._segment.fds

    # -- one round ---------------------------------------------------------------------------------------------

    def _exchange(self, operation: int, amount: int) -> int:
        """This rank's piece is in its slot; returns, when everybody's is, the parity that says which slots those are.

        `operation` and `amount` must be equal on all ranks.
        """
        self._round = number = self._round + 1
        parity = number & 1
        what = operation << 48 | amount
        segment, mine = self._segment, LINE * self.rank
        words = segment.words
        words[mine + 1 + parity] = what
        segment.publish(mine, number, *self._others)
        for other in self._others:
            theirs = LINE * other
            if words[theirs] < number or WEAK:
                segment.wait(theirs, number, self._blame, self._timeout)
            if words[theirs + 1 + parity] != what:
                raise GroupBroken(
                    f"Ranks disagree in round {number}: rank {self._ranks[self.rank]} is in {_describe(what)}, "
                    f"rank {self._ranks[other]} in {_describe(words[theirs + 1 + parity])}."
                )
        return parity

    def _blame(self) -> str:
        late = [str(self._ranks[r]) for r in self._others if self._segment.words[LINE * r] < self._round]
        return f"rank {self._ranks[self.rank]} waits in round {self._round} for rank {', '.join(late) or 'nobody'}"

    def _slot(self, parity: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
        """The whole slot as a flat tensor."""
        index = parity * self.size + rank
        view = self._views.get((index, dtype))
        if view is None:
            view = self._views[index, dtype] = self._flat(index * SLOT, SLOT, dtype)
        return view

    def _flat(self, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.frombuffer(
            self._segment.memory, dtype=dtype, count=nbytes // dtype.itemsize, offset=self._segment.data_offset + offset
        )

    @property
    def _next(self) -> int:
        return (self._round + 1) & 1

    # -- collectives -------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """In place where `tensor` is contiguous."""
        if tensor.numel() * tensor.element_size() <= _WHOLE_SUM and tensor.is_contiguous() and tensor.numel():
            return self._all_reduce_small(tensor)
        out = tensor if tensor.is_contiguous() else tensor.contiguous()
        flat = out.view(-1)
        step = SLOT // out.element_size()
        for start in range(0, flat.numel(), step):
            piece = flat[start : start + step] if flat.numel() > step else flat
            nbytes = piece.numel() * piece.element_size()
            self._slot(self._next, self.rank, piece.dtype)[: piece.numel()].copy_(piece)
            self._sum_slices(self._exchange(_ALL_REDUCE, nbytes), piece)
        return out

    def _all_reduce_small(self, tensor: torch.Tensor) -> torch.Tensor:
        """One round, with the slots' views kept from call to call: most calls of a model have one of a few shapes."""
        key = (tensor.shape, tensor.dtype)
        views = self._small.get(key)
        if views is None:
            if len(self._small) >= _SMALL_SHAPES:
                self._small.clear()
            count, shape = tensor.numel(), tensor.shape
            views = self._small[key] = [
                [self._slot(parity, r, tensor.dtype)[:count].view(shape) for r in range(self.size)] for parity in (0, 1)
            ]
        views[self._next][self.rank].copy_(tensor)
        pieces = views[self._exchange(_ALL_REDUCE, tensor.numel() * tensor.element_size())]
        if self.size == 2:
            return torch.add(pieces[0], pieces[1], out=tensor)
        _add_up(pieces, tensor)
        return tensor

    def _sum(self, parity: int, start: int, stop: int, out: torch.Tensor) -> None:
        """Entries start to stop of all ranks' slots, added in rank order into `out`."""
        pieces = [self._slot(parity, r, out.dtype)[start:stop] for r in range(self.size)]
        _add_up(pieces, out)

    def _sum_slices(self, parity: int, piece: torch.Tensor) -> None:
        bounds = [piece.numel() * r // self.size for r in range(self.size + 1)]
        start, stop = bounds[self.rank], bounds[self.rank + 1]
        mine = self._slot(self._next, self.rank, piece.dtype)[start:stop]
        self._sum(parity, start, stop, mine)
        shared = self._exchange(_SHARE, piece.numel() * piece.element_size())
        for r in range(self.size):
            piece[bounds[r] : bounds[r + 1]].copy_(self._slot(shared, r, piece.dtype)[bounds[r] : bounds[r + 1]])

    def all_gather(self, tensor: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        shapes = [[*tensor.shape[:dim], n, *tensor.shape[dim + 1 :]] for n in lengths]
        parts = [tensor.new_empty(shape) for shape in shapes]
        parts[self.rank] = tensor.contiguous()
        flats = [part.view(-1) for part in parts]
        step = SLOT // tensor.element_size()
        longest = max(flat.numel() for flat in flats)
        for start in range(0, longest, step):
            piece = flats[self.rank][start : start + step]
            self._slot(self._next, self.rank, tensor.dtype)[: piece.numel()].copy_(piece)
            parity = self._exchange(_GATHER, longest)
            for r in self._others:
                part = flats[r][start : start + step]
                part.copy_(self._slot(parity, r, tensor.dtype)[: part.numel()])
        return torch.cat(parts, dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        leading = tensor.movedim(dim, 0).contiguous()
        row = leading[0].numel() if leading.shape[0] else 0
        first = sum(lengths[: self.rank]) * row
        out = leading.new_empty([lengths[self.rank], *leading.shape[1:]])
        flat, mine = leading.view(-1), out.view(-1)
        step = SLOT // tensor.element_size()
        for start in range(0, flat.numel(), step):
            piece = flat[start : start + step]
            self._slot(self._next, self.rank, tensor.dtype)[: piece.numel()].copy_(piece)
            parity = self._exchange(_SCATTER, flat.numel())
            low, high = max(start, first), min(start + piece.numel(), first + mine.numel())
            if low < high:
                self._sum(parity, low - start, high - start, mine[low - first : high - first])
        return out.movedim(0, dim)

    def all_to_all(self, tensors: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        out = [tensors[0].new_empty(shape) for shape in shapes]
        outgoing = torch.cat([tensor.reshape(-1) for tensor in tensors])
        sizes = torch.tensor([tensor.numel() for tensor in tensors], dtype=torch.int64)
        self._slot(self._next, self.rank, torch.int64)[: self.size].copy_(sizes)
        parity = self._exchange(_TO_ALL, 0)
        table = [self._slot(parity, r, torch.int64)[: self.size].tolist() for r in range(self.size)]
        for r in range(self.size):
            if table[r][self.rank] != out[r].numel():
                raise GroupBroken(
                    f"Rank {self._ranks[r]} sends {table[r][self.rank]} numbers, "
                    f"rank {self._ranks[self.rank]} expects {out[r].numel()}."
                )
        step = SLOT // outgoing.element_size()
        for start in range(0, max(sum(row) for row in table), step):
            piece = outgoing[start : start + step]
            self._slot(self._next, self.rank, outgoing.dtype)[: piece.numel()].copy_(piece)
            parity = self._exchange(_TO_ALL, start)
            for r in range(self.size):
                first = sum(table[r][: self.rank])
                low, high = max(start, first), min(start + step, first + out[r].numel())
                if low < high:
                    source = self._slot(parity, r, outgoing.dtype)[low - start : high - start]
                    out[r].view(-1)[low - first : high - first].copy_(source)
        return out

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        out = tensor.contiguous() if self.rank == source else torch.empty_like(tensor).contiguous()
        flat = out.view(-1)
        step = SLOT // out.element_size()
        for start in range(0, flat.numel(), step):
            piece = flat[start : start + step]
            if self.rank == source:
                self._slot(self._next, source, out.dtype)[: piece.numel()].copy_(piece)
            parity = self._exchange(_BROADCAST, flat.numel())
            if self.rank != source:
                piece.copy_(self._slot(parity, source, out.dtype)[: piece.numel()])
        return out

    def barrier(self) -> None:
        self._exchange(_BARRIER, 0)

    # -- pairs -------------------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, to: int) -> None:
        box = _box(self.size, self.rank, to)
        words = self._segment.words
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        for start in range(0, max(flat.numel(), 1), SLOT):
            piece = flat[start : start + SLOT]
            count = self._sent[to]
            self._wait_pair(box + LINE, count - 1, to)  # two pieces fit: wait for all but the last to be read
            self._mail(self.rank, to, count & 1)[: piece.numel()].copy_(piece)
            words[box + 1 + (count & 1)] = flat.numel()
            self._sent[to] = count + 1
            self._segment.publish(box, count + 1, to)

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> torch.Tensor:
        box = _box(self.size, source, self.rank)
        words = self._segment.words
        out = torch.empty(shape, dtype=dtype)
        flat = out.view(-1).view(torch.uint8)
        for start in range(0, max(flat.numel(), 1), SLOT):
            piece = flat[start : start + SLOT]
            count = self._received[source]
            self._wait_pair(box, count + 1, source)
            if words[box + 1 + (count & 1)] != flat.numel():
                raise GroupBroken(
                    f"Rank {self._ranks[source]} sends {words[box + 1 + (count & 1)]} bytes, "
                    f"rank {self._ranks[self.rank]} expects {flat.numel()}."
                )
            piece.copy_(self._mail(source, self.rank, count & 1)[: piece.numel()])
            self._received[source] = count + 1
            self._segment.publish(box + LINE, count + 1, source)
        return out

    def _wait_pair(self, word: int, target: int, other: int) -> None:
        who = f"rank {self._ranks[self.rank]} waits for rank {self._ranks[other]}"
        self._segment.wait(word, target, lambda: who, self._timeout)

    def _mail(self, source: int, to: int, parity: int) -> torch.Tensor:
        index = 2 * self.size + 2 * (source * self.size + to) + parity
        view = self._views.get((index, torch.uint8))
        if view is None:
            view = self._views[index, torch.uint8] = self._flat(index * SLOT, SLOT, torch.uint8)
        return view

    def close(self) -> None:
        self._views.clear()
        self._small.clear()
        self._segment.close()


def _add_up(pieces: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """The sum in the order of `pieces`; narrow floats of more than two ranks are rounded once, at the end."""
    if len(pieces) > 2 and out.dtype in (torch.bfloat16, torch.float16):
        total = pieces[0].float()
        for piece in pieces[1:]:
            total += piece
        out.copy_(total)
        return
    torch.add(pieces[0], pieces[1], out=out)
    for piece in pieces[2:]:
        out += piece


def _describe(what: int) -> str:
    operation, amount = what >> 48, what & (1 << 48) - 1
    return f"{_OPERATIONS[operation] if 0 <= operation < len(_OPERATIONS) else 'garbage'} ({amount})"


def _box(size: int, source: int, to: int) -> int:
    """A pair's mailbox flags: pieces written (and bytes for each parity); a line later, pieces read. They lie behind
    the ranks' own lines, each of which holds a rank's round and what it did in the last two."""
    return LINE * (size + 2 * (source * size + to))


def _layout(size: int) -> tuple[int, int]:
    """Words and data bytes of a group's segment. Memory that is never written takes no space."""
    return LINE * (size + 2 * size * size), SLOT * (2 * size + 2 * size * size)

"""The fast backend for CPUs, in plain PyTorch: batches of prompt chunks and single tokens in one call.

Single-token rows of similar length run as one batch: their blocks are gathered once per layer, and the query heads of
one KV head stand in as queries, so that keys and values are never repeated. Chunks run row by row; the part of a
chunk's context that was already in the cache and the chunk itself are two products merged by log-sum-exp, so that no
mask of chunk times context exists. Windows that cut a context, and soft caps, take a masked path in bounded pieces.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, cached_property

import torch

from phalanx.attention.base import AttentionShape, LayerCache, StepLayout
from phalanx.attention.sdpa import SdpaAttention

_MASK_NUMBERS = 1 << 22
"""A masked piece has at most about this many scores per head group, which bounds its memory."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass
class DecodeBatch:
    """Rows of one query each, padded to the same number of blocks."""

    tokens: torch.Tensor
    """int64 [B]: their places among the step's tokens."""
    blocks: torch.Tensor
    """int64 [B · blocks a row]."""
    lengths: torch.Tensor
    """int64 [B]: keys that count, from the first gathered one on."""
    skipped: torch.Tensor
    """int64 [B]: keys at the front that a window hides."""
    padded: int
    """Keys gathered per row; the first `used` of them can count for some row."""
    used: int
    masked: bool
    masks: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    @cached_property
    def hidden(self) -> torch.Tensor:
        """bool [B, padded]: gathered keys that do not count."""
        at = torch.arange(self.padded)
        return (at >= self.lengths[:, None]) | (at < self.skipped[:, None])

    @cached_property
    def blanks(self) -> torch.Tensor:
        """int64: places in [B · padded] of the hidden keys that are looked at. A mask makes their share zero, but zero
        times what was never written, or was left by a broken request, need not be zero: they are blanked."""
        return self.hidden[:, : self.used].nonzero() @ torch.tensor([self.padded, 1])

    def gather(self, cache: torch.Tensor) -> torch.Tensor:
        """The rows' keys or values: [blocks, block, kv heads, d] -> [B, kv heads, used, d]."""
        rows = len(self.tokens)
        gathered = cache.index_select(0, self.blocks).view(rows * self.padded, *cache.shape[2:])
        if self.masked:
            gathered.index_fill_(0, self.blanks, 0)
        return gathered.view(rows, self.padded, *cache.shape[2:])[:, : self.used].transpose(1, 2)

    def mask(self, dtype: torch.dtype) -> torch.Tensor | None:
        """[B, 1, 1, used], 0 or -inf; None when every gathered key counts."""
        if not self.masked:
            return None
        if dtype not in self.masks:
            hidden = self.hidden[:, : self.used]
            self.masks[dtype] = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)[:, None, None]
        return self.masks[dtype]


@dataclass
class Chunk:
    """A row of several queries: tokens start to stop of the step, whose context fills `slots`."""

    start: int
    stop: int
    context: int
    blocks: torch.Tensor
    """int64 [blocks of the context]."""


class CpuPlan:
    """The step's rows, sorted; the batches of single-token rows depend on a layer's window and are made once for it."""

    def __init__(self, layout: StepLayout):
        self.block_size = layout.block_size
        self.tables = layout.block_tables.long()
        self.contexts = layout.context_lens
        self.single: list[tuple[int, int]] = []
        self.chunks: list[Chunk] = []
        self.tokens = layout.query_start[-1]
        starts = layout.query_start
        for row, context in enumerate(layout.context_lens):
            count = starts[row + 1] - starts[row]
            if count == 1:
                self.single.append((row, starts[row]))
            elif count:
                blocks = self.tables[row, : -(-context // layout.block_size)]
                self.chunks.append(Chunk(starts[row], starts[row + 1], context, blocks))
        self.single.sort(key=lambda item: layout.context_lens[item[0]])
        self._batches: dict[int | None, list[DecodeBatch]] = {}

    def batches(self, window: int | None) -> list[DecodeBatch]:
        if window not in self._batches:
            self._batches[window] = self._make_batches(window)
        return self._batches[window]

    def _make_batches(self, window: int | None) -> list[DecodeBatch]:
        spans = []
        for row, token in self.single:
            context = self.contexts[row]
            first = 0 if window is None else max(context - window, 0) // self.block_size
            spans.append((row, token, first, -(-context // self.block_size)))
        batches: list[DecodeBatch] = []
        start = 0
        for i in range(1, len(spans) + 1):
            # A batch ends where its padding would cost more than starting another one.
            if i == len(spans) or spans[i][3] - spans[i][2] > 1.5 * (spans[start][3] - spans[start][2]) + 4:
                batches.append(self._batch(spans[start:i], window))
                start = i
        return batches

    def _batch(self, spans: list[tuple[int, int, int, int]], window: int | None) -> DecodeBatch:
        size = self.block_size
        width = max(last - first for _, _, first, last in spans)
        rows = [row for row, _, _, _ in spans]
        firsts = torch.tensor([first for _, _, first, _ in spans])
        columns = firsts[:, None] + torch.arange(width)
        blocks = self.tables[torch.tensor(rows)].gather(1, columns.clamp_(max=self.tables.shape[1] - 1)).flatten()
        lengths = [self.contexts[row] - first * size for row, _, first, _ in spans]
        skipped = [
            0 if window is None else max(self.contexts[row] - window, 0) - first * size for row, _, first, _ in spans
        ]
        used = max(lengths)
        masked = min(lengths) != used or any(skipped)
        tokens = torch.tensor([token for _, token, _, _ in spans])
        return DecodeBatch(tokens, blocks, torch.tensor(lengths), torch.tensor(skipped), width * size, used, masked)


@dataclass(frozen=True)
class HeadGroups:
    """Query heads sorted by KV head, every group padded to the largest: [kv heads · group]. The first group is padded
    in front, so that the heads of a rank, which begin and end anywhere in a group, stay together."""

    group: int
    equal: bool
    pick: torch.Tensor
    """int64 [kv heads · group]: the query head at each place."""
    back: torch.Tensor
    """int64 [heads]: each query head's place."""
    start: int | None
    """Where they begin; None when they are not neighbours."""

    def take_back(self, padded: torch.Tensor) -> torch.Tensor:
        """[T, kv heads · group, …] -> [T, heads, …]."""
        if self.start is not None:
            return padded.narrow(1, self.start, len(self.back))
        return padded.index_select(1, self.back)


@cache
def head_groups(kv_head_of: tuple[int, ...], num_kv_heads: int) -> HeadGroups:
    members: list[list[int]] = [[h for h, kv in enumerate(kv_head_of) if kv == k] for k in range(num_kv_heads)]
    group = max(len(m) for m in members)
    front = group - len(members[0])
    pick = [m[i] if i < len(m) else 0 for m in members for i in range(group)]
    pick[:group] = [0] * front + members[0]
    back = [members[kv].index(h) + kv * group + (0 if kv else front) for h, kv in enumerate(kv_head_of)]
    start = back[0] if back == list(range(back[0], back[0] + len(back))) else None
    equal = pick == list(range(len(kv_head_of)))
    return HeadGroups(group, equal, torch.tensor(pick), torch.tensor(back), start)


class CpuAttention(SdpaAttention):
    name = "cpu"

    def plan(self, layout: StepLayout) -> CpuPlan:  # type: ignore[override]
        return CpuPlan(layout)

    def attend(
        self, query: torch.Tensor, cache: LayerCache, layout: StepLayout, plan: CpuPlan, shape: AttentionShape  # type: ignore[override]
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        groups = head_groups(shape.kv_head_of, shape.num_kv_heads)
        if not groups.equal:
            query = query.index_select(1, groups.pick)
        batches = plan.batches(shape.window)
        if (
            len(batches) == 1
            and not plan.chunks
            and len(plan.single) == plan.tokens
            and _in_order(batches[0].tokens, plan)
        ):
            output, lse = self._decode(query, cache, batches[0], shape, groups)
        else:
            output = torch.empty_like(query, memory_format=torch.contiguous_format)
            lse = query.new_empty(query.shape[:2], dtype=torch.float32)
            for batch in batches:
                part, part_lse = self._decode(query.index_select(0, batch.tokens), cache, batch, shape, groups)
                output.index_copy_(0, batch.tokens, part)
                lse.index_copy_(0, batch.tokens, part_lse)
            for chunk in plan.chunks:
                part, part_lse = self._chunk(query[chunk.start : chunk.stop], cache, chunk, shape)
                output[chunk.start : chunk.stop] = part
                lse[chunk.start : chunk.stop] = part_lse
        if not groups.equal:
            output, lse = groups.take_back(output), groups.take_back(lse)
        return output, lse

    def _decode(
        self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, shape: AttentionShape, groups: HeadGroups
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, kv_heads, dim = query.shape[0], shape.num_kv_heads, shape.head_dim
        queries = query.reshape(rows, kv_heads, groups.group, dim)
        key, value = batch.gather(cache.key), batch.gather(cache.value)
        output, lse = _product(queries, key, value, batch.mask(query.dtype), shape, causal=False)
        return output.reshape(query.shape), lse.reshape(query.shape[:2])

    def _chunk(
        self, query: torch.Tensor, cache: LayerCache, chunk: Chunk, shape: AttentionShape
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """query [n, heads, head_dim] -> the same and lse [n, heads]."""
        count, past = chunk.stop - chunk.start, chunk.context - (chunk.stop - chunk.start)
        queries = query.transpose(0, 1)[None]
        key, value = (t.index_select(0, chunk.blocks).flatten(0, 1)[: chunk.context] for t in (cache.key, cache.value))
        key, value = key.transpose(0, 1)[None], value.transpose(0, 1)[None]
        cut = shape.window is not None and chunk.context > shape.window
        if cut or shape.soft_cap is not None:
            output, lse = _masked(queries, key, value, past, shape)
        else:
            output, lse = _product(queries, key[:, :, past:], value[:, :, past:], None, shape, causal=True)
            if past:
                before = _product(queries, key[:, :, :past], value[:, :, :past], None, shape, causal=False)
                output, lse = merge(output, lse, *before)
        return output[0].transpose(0, 1).reshape(count, *query.shape[1:]), lse[0].T


def _in_order(tokens: torch.Tensor, plan: CpuPlan) -> bool:
    """Rows were sorted by length; when that left them in place, nothing has to be picked or put back."""
    del tokens
    return all(token == i for i, (_, token) in enumerate(plan.single))


def merge(
    first: torch.Tensor, first_lse: torch.Tensor, second: torch.Tensor, second_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two parts of a context from the parts' outputs [..., n, d] and log-sum-exps [..., n]."""
    lse = torch.logaddexp(first_lse, second_lse)
    weight = (second_lse - lse).exp()[..., None]
    return torch.lerp(first.float(), second.float(), weight).to(first.dtype), lse


def _masked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, past: int, shape: AttentionShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal and windowed attention in pieces of queries; keys that no query of a piece sees are left out."""
    count, context = query.shape[2], key.shape[2]
    step = max(1, _MASK_NUMBERS // context)
    outputs, sums = [], []
    for start in range(0, count, step):
        stop = min(start + step, count)
        first = 0 if shape.window is None else max(0, past + start - shape.window + 1)
        last = past + stop
        own = torch.arange(past + start, last)[:, None]
        at = torch.arange(first, last)
        hidden = at > own
        if shape.window is not None:
            hidden |= at <= own - shape.window
        mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill_(hidden, -torch.inf)[None, None]
        piece = _product(
            query[:, :, start:stop], key[:, :, first:last], value[:, :, first:last], mask, shape, causal=False
        )
        outputs.append(piece[0])
        sums.append(piece[1])
    return torch.cat(outputs, 2), torch.cat(sums, 2)


def _product(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, shape: AttentionShape, *,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """query [B, H, n, d], key and value [B, KV, m, d], H a multiple of KV -> [B, H, n, d] and float32 [B, H, n]."""
    if shape.soft_cap is None:
        output, lse = _flash(query, key, value, 0.0, causal, attn_mask=mask, scale=shape.scale)
        return output, lse
    return _capped(query, key, value, mask, shape)


def _capped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, shape: AttentionShape
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, count, dim = query.shape
    kv_heads = key.shape[1]
    cap = shape.soft_cap or 1.0
    grouped = query.reshape(batch, kv_heads, heads // kv_heads * count, dim)
    scores = torch.matmul(grouped, key.transpose(-1, -2)).float().mul_(shape.scale / cap).tanh_().mul_(cap)
    scores = scores.view(batch, heads, count, -1)
    if mask is not None:
        scores += mask
    lse = scores.logsumexp(-1)
    share = (scores - lse[..., None]).exp_().to(value.dtype).view(batch, kv_heads, -1, key.shape[2])
    return torch.matmul(share, value).view(batch, heads, count, dim), lse

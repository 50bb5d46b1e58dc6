"""A small driver of a decoder: requests through the paged cache, in chunks of any size, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from phalanx.attention.base import LayerCache, StepLayout
from phalanx.models.decoder import Decoder


@dataclass
class Stream:
    """One request: its tokens so far, how many are computed, and its blocks."""

    tokens: list[int]
    blocks: list[int]
    computed: int = 0
    prompt_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)


def layout_of(
    streams: Sequence[Stream], counts: Sequence[int], block_size: int, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, StepLayout]:
    """token_ids, positions and layout of a step that computes the next counts[i] tokens of streams[i]."""
    ids, positions, slots, starts, contexts = [], [], [], [0], []
    for stream, count in zip(streams, counts, strict=True):
        span = range(stream.computed, stream.computed + count)
        ids += [stream.tokens[p] for p in span]
        positions += list(span)
        slots += [stream.blocks[p // block_size] * block_size + p % block_size for p in span]
        starts.append(starts[-1] + count)
        contexts.append(stream.computed + count)
    width = max(-(-c // block_size) for c in contexts)
    table = [[*s.blocks[:width], *[0] * (width - len(s.blocks[:width]))] for s in streams]
    layout = StepLayout(
        starts, contexts, torch.tensor(table, dtype=torch.int32, device=device), torch.tensor(slots, device=device),
        block_size, [s.prompt_len for s in streams],
    )  # fmt: skip
    return torch.tensor(ids, device=device), torch.tensor(positions, device=device), layout


class Driver:
    """Feeds a decoder of one rank and keeps its cache. Blocks are handed out in a scattered order."""

    def __init__(self, decoder: Decoder, blocks: int = 64, block_size: int = 4):
        self.decoder = decoder
        self.block_size = block_size
        self.caches: list[LayerCache] = decoder.allocate_caches(blocks, block_size)
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(7)).tolist()
        self.free = [int(b) for b in order]

    def stream(self, tokens: Sequence[int], room: int = 0) -> Stream:
        """A request with blocks for its tokens and `room` more."""
        needed = -(-(len(tokens) + room) // self.block_size)
        blocks, self.free = self.free[:needed], self.free[needed:]
        if len(blocks) < needed:
            raise ValueError("the test's cache is too small")
        return Stream(list(tokens), blocks)

    def step(self, streams: Sequence[Stream], counts: Sequence[int]) -> list[torch.Tensor]:
        """Logits [counts[i], vocab] of every token computed, per stream."""
        ids, positions, layout = layout_of(streams, counts, self.block_size, self.decoder.device)
        with torch.inference_mode():
            hidden = self.decoder(ids, positions, self.caches, layout)
            logits = self.decoder.logits(hidden)
        for stream, count in zip(streams, counts, strict=True):
            stream.computed += count
        return list(logits.split(list(counts)))

    def prefill(self, stream: Stream, chunks: Sequence[int] | None = None) -> torch.Tensor:
        """Logits [tokens, vocab] of all the stream's tokens, computed in chunks of these sizes (the last repeats)."""
        left = len(stream.tokens) - stream.computed
        sizes = list(chunks or [left])
        out = []
        while left:
            count = min(left, sizes.pop(0) if len(sizes) > 1 else sizes[0])
            out += self.step([stream], [count])
            left -= count
        return torch.cat(out)

    def greedy(self, stream: Stream, count: int) -> list[int]:
        """`count` greedy tokens after the stream's, which are computed first as far as they are not."""
        return self.greedy_after(stream, self.prefill(stream)[-1], count)

    def greedy_after(self, stream: Stream, logits: torch.Tensor, count: int) -> list[int]:
        """The same for a stream that is computed, whose last logits are these."""
        token = int(logits.argmax())
        out = [token]
        while len(out) < count:
            stream.tokens.append(token)
            token = int(self.step([stream], [1])[0][-1].argmax())
            out.append(token)
        return out

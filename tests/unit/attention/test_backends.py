"""The CPU backend against the reference backend, and the reference against the formula."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.attention.base import AttentionShape, LayerCache, StepLayout
from phalanx.attention.cpu import CpuAttention, merge
from phalanx.attention.registry import choose
from phalanx.attention.sdpa import SdpaAttention
from phalanx.errors import ConfigError


def random_step(rows: list[tuple[int, int]], block_size: int, seed: int = 0) -> StepLayout:
    """`rows`: (queries, context). Blocks are scattered; every row has its own."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-context // block_size) for _, context in rows]
    order = torch.randperm(sum(needed) + 3, generator=generator).tolist()
    width = max(needed)
    table, slots, starts = [], [], [0]
    for (queries, context), count in zip(rows, needed, strict=True):
        blocks, order = order[:count], order[count:]
        table.append(blocks + [0] * (width - count))
        slots += [blocks[p // block_size] * block_size + p % block_size for p in range(context - queries, context)]
        starts.append(starts[-1] + queries)
    contexts = [context for _, context in rows]
    return StepLayout(starts, contexts, torch.tensor(table, dtype=torch.int32), torch.tensor(slots), block_size)


def shape_of(
    heads: int, kv_heads: int, dim: int, head_map: tuple[int, ...] | None = None, **rest: Any
) -> AttentionShape:
    head_map = head_map or tuple(h * kv_heads // heads for h in range(heads))
    return AttentionShape(heads, kv_heads, dim, head_map, dim**-0.5, **rest)


def filled_cache(layout: StepLayout, shape: AttentionShape, dtype: torch.dtype) -> LayerCache:
    blocks = int(layout.block_tables.max()) + 4
    cache = SdpaAttention().allocate(shape, blocks, layout.block_size, dtype, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for tensor in (cache.key, cache.value):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return cache


def both(
    rows: list[tuple[int, int]], shape: AttentionShape, dtype: torch.dtype = torch.float32, block_size: int = 4
) -> None:
    layout = random_step(rows, block_size)
    cache = filled_cache(layout, shape, dtype)
    query = torch.randn(layout.query_start[-1], shape.num_heads, shape.head_dim).to(dtype)
    reference, fast = SdpaAttention(), CpuAttention()
    expected, expected_lse = reference.attend(query, cache, layout, reference.plan(layout), shape)
    plan = fast.plan(layout)
    for _ in range(2):  # a plan serves many layers
        output, lse = fast.attend(query, cache, layout, plan, shape)
        tolerance = 2e-5 if dtype == torch.float32 else 0.03
        assert output.shape == query.shape and lse.shape == query.shape[:2] and lse.dtype == torch.float32
        assert (output.float() - expected.float()).abs().max() < tolerance
        assert (lse - expected_lse).abs().max() < (1e-4 if dtype == torch.float32 else 0.03)


CASES: dict[str, list[tuple[int, int]]] = {
    "one token": [(1, 1)],
    "decode": [(1, 9), (1, 9), (1, 9)],
    "decode of very different lengths": [(1, 130), (1, 3), (1, 40), (1, 1), (1, 129)],
    "prompts": [(7, 7), (1, 1), (12, 12)],
    "later chunks": [(5, 30), (2, 3), (9, 64)],
    "everything at once": [(1, 50), (6, 6), (1, 7), (4, 33), (1, 51), (13, 13)],
}
SHAPES: dict[str, AttentionShape] = {
    "grouped": shape_of(6, 2, 10),
    "one kv head": shape_of(5, 1, 16),
    "no groups": shape_of(3, 3, 7),
    "unequal groups": shape_of(5, 2, 8, (0, 0, 0, 1, 1)),
    "unequal groups of the other rank": shape_of(4, 2, 8, (0, 1, 1, 1)),
    "window": shape_of(6, 2, 10, window=5),
    "window of a block": shape_of(4, 2, 8, window=4),
    "soft cap": shape_of(6, 2, 10, soft_cap=1.5),
    "window and soft cap, unequal": shape_of(5, 2, 8, (0, 0, 0, 1, 1), window=6, soft_cap=2.0),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("rows", CASES.values(), ids=CASES)
def test_cpu_equals_reference(rows: list[tuple[int, int]], shape: AttentionShape) -> None:
    both(rows, shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cpu_equals_reference_in_half_precision(dtype: torch.dtype) -> None:
    for shape in (SHAPES["grouped"], SHAPES["window and soft cap, unequal"]):
        both(CASES["everything at once"], shape, dtype)


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 60)), min_size=1, max_size=6),
    st.sampled_from([None, 1, 3, 8, 17]), st.sampled_from([1, 3, 16]), st.booleans(),
)  # fmt: skip
@settings(max_examples=80)
def test_any_mix(rows: list[tuple[int, int]], window: int | None, block_size: int, decode: bool) -> None:
    steps = [(1 if decode else queries, past + (1 if decode else queries)) for queries, past in rows]
    both(steps, shape_of(4, 2, 8, window=window), block_size=block_size)


def test_masked_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk whose mask would be large is done in pieces."""
    monkeypatch.setattr("phalanx.attention.cpu._MASK_NUMBERS", 100)
    both([(40, 70), (33, 33)], SHAPES["window"])
    both([(40, 70), (33, 33)], SHAPES["soft cap"])


def test_other_rows_blocks_are_never_read() -> None:
    """Poison everything that no row owns: nothing changes."""
    layout, shape = random_step(CASES["everything at once"], 4), SHAPES["grouped"]
    cache = filled_cache(layout, shape, torch.float32)
    query = torch.randn(layout.query_start[-1], 6, 10)
    for backend in (SdpaAttention(), CpuAttention()):
        plan = backend.plan(layout)
        before, _ = backend.attend(query, cache, layout, plan, shape)
        poisoned = LayerCache(torch.full_like(cache.key, 9.0), torch.full_like(cache.value, 9.0))
        for row, context in enumerate(layout.context_lens):
            for p in range(context):
                block = int(layout.block_tables[row, p // 4])
                poisoned.key[block, p % 4] = cache.key[block, p % 4]
                poisoned.value[block, p % 4] = cache.value[block, p % 4]
        after, _ = backend.attend(query, poisoned, layout, plan, shape)
        assert torch.equal(before, after)


def test_reference_is_the_formula() -> None:
    """One row, written out in loops."""
    shape = shape_of(4, 2, 3, window=4, soft_cap=2.0)
    layout = random_step([(3, 6)], 4)
    cache = filled_cache(layout, shape, torch.float32)
    query = torch.randn(3, 4, 3)
    backend = SdpaAttention()
    output, lse = backend.attend(query, cache, layout, backend.plan(layout), shape)
    places = [(int(layout.block_tables[0, p // 4]), p % 4) for p in range(6)]
    for i in range(3):
        own = 3 + i
        for head in range(4):
            seen = [p for p in range(6) if own - 4 < p <= own]
            scores = [float(query[i, head] @ cache.key[(*places[p], head // 2)]) * shape.scale for p in seen]
            weights = [math.exp(2.0 * math.tanh(score / 2.0)) for score in scores]
            mixed = sum(w * cache.value[(*places[p], head // 2)] for w, p in zip(weights, seen, strict=True))
            assert torch.allclose(output[i, head], mixed / sum(weights), atol=1e-6)
            assert abs(float(lse[i, head]) - math.log(sum(weights))) < 1e-5


def test_write_then_read() -> None:
    layout, shape = random_step([(5, 5), (1, 9)], 4), SHAPES["grouped"]
    for backend in (SdpaAttention(), CpuAttention()):
        cache = backend.allocate(shape, 16, 4, torch.float32, torch.device("cpu"))
        key, value = torch.randn(6, 2, 10), torch.randn(6, 2, 10)
        backend.write(cache, key, value, layout)
        assert torch.equal(cache.key.flatten(0, 1)[layout.slot_mapping], key)
        assert torch.equal(cache.value.flatten(0, 1)[layout.slot_mapping], value)
        assert int((cache.key != 0).any(-1).sum()) == 6 * 2


def test_merge_of_parts() -> None:
    scores, values = torch.randn(2, 5, 12), torch.randn(2, 12, 4)
    parts = [
        (scores[..., a:b].softmax(-1) @ values[:, a:b], scores[..., a:b].logsumexp(-1)) for a, b in ((0, 7), (7, 12))
    ]
    output, lse = merge(*parts[0], *parts[1])
    assert torch.allclose(output, scores.softmax(-1) @ values, atol=1e-6)
    assert torch.allclose(lse, scores.logsumexp(-1), atol=1e-6)


def test_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose("cuda:0").name == "sdpa" and choose("cpu", name="sdpa").name == "sdpa"
    assert choose("cpu", dtype="float16").name == "cpu"
    with pytest.raises(ConfigError, match="does not run on cuda"):
        choose("cuda", name="cpu")
    with pytest.raises(ConfigError, match="no attention backend 'flash'"):
        choose("cpu", name="flash")
    with pytest.raises(ConfigError, match="'cpu' does not take int8"):
        choose("cpu", name="cpu", cache_dtype="int8")
    with pytest.raises(ConfigError, match="No attention backend serves a KV cache of int8 here"):
        choose("cuda", cache_dtype="int8")
    monkeypatch.setattr("phalanx.attention.registry.native", lambda: object())
    assert choose("cpu").name == "native"
    assert choose("cpu", dtype="bfloat16", cache_dtype="int8").name == "native"
    monkeypatch.setattr("phalanx.attention.registry.native", lambda: None)
    assert choose("cpu").name == "cpu"
    with pytest.raises(ConfigError, match="needs the native library"):
        choose("cpu", cache_dtype="int8")

"""The native attention kernels against the reference backend, and against themselves in other batches and chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.attention.base import AttentionShape, LayerCache, StepLayout
from phalanx.attention.native import NativeAttention, NativeCache
from phalanx.attention.sdpa import SdpaAttention
from phalanx.kernels.library import use_threads
from phalanx.kernels.weight_memory import WeightMemory
from phalanx.layers.norm import Norm
from phalanx.layers.rotary import Rotary, Turn

CPU = torch.device("cpu")
NATIVE, REFERENCE = NativeAttention(), SdpaAttention()
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.int8: 0.06}


def shape_of(
    heads: int, kv_heads: int, dim: int, head_map: tuple[int, ...] | None = None, **rest: Any
) -> AttentionShape:
    head_map = head_map or tuple(h * kv_heads // heads for h in range(heads))
    return AttentionShape(heads, kv_heads, dim, head_map, dim**-0.5, **rest)


SHAPES = {
    "grouped": shape_of(9, 3, 64),
    "no groups": shape_of(2, 2, 128),
    "one kv head": shape_of(7, 1, 96),
    "unequal groups": shape_of(5, 2, 64, (0, 0, 0, 1, 1)),
    "unequal groups, not in order": shape_of(4, 3, 16, (2, 0, 0, 1)),
    "wide": shape_of(4, 2, 256),
    "odd": shape_of(4, 2, 7),
    "odd and wide": shape_of(3, 1, 77),
    "window": shape_of(6, 2, 32, window=100),
    "window of a token": shape_of(2, 2, 16, window=1),
    "window, odd": shape_of(6, 2, 10, window=70),
    "soft cap": shape_of(4, 2, 64, soft_cap=1.5),
    "window and soft cap": shape_of(5, 2, 80, (0, 0, 0, 1, 1), window=600, soft_cap=20.0),
}
ROWS = {
    "one token": [(1, 1)],
    "decode": [(1, 9), (1, 64), (1, 65), (1, 1), (1, 1300)],
    "prompts": [(7, 7), (1, 1), (130, 130)],
    "later chunks": [(5, 30), (2, 3), (40, 600), (3, 514)],
    "everything": [(1, 50), (6, 6), (1, 513), (4, 33), (0, 40), (1, 512), (70, 1100)],
}


class Cached:
    """Requests with their whole keys and values in a cache whose other places hold NaN, and the same in float32."""

    def __init__(
        self, contexts: list[int], shape: AttentionShape, block_size: int, dtype: torch.dtype, cache: torch.dtype
    ):
        self.shape, self.block_size, self.dtype = shape, block_size, dtype
        needed = [-(-context // block_size) for context in contexts]
        generator = torch.Generator().manual_seed(3)
        order = torch.randperm(sum(needed) + 3, generator=generator).tolist()
        self.tables = []
        for count in needed:
            self.tables.append(order[:count])
            order = order[count:]
        blocks = sum(needed) + 3
        self.mine = NATIVE.allocate(shape, blocks, block_size, cache, CPU)
        self.theirs = REFERENCE.allocate(shape, blocks, block_size, torch.float32, CPU)
        for tensor in (self.mine.key, self.mine.value):
            tensor.view(torch.uint8).fill_(0xFF)
        for row, context in enumerate(contexts):
            key, value = (
                torch.randn(context, shape.num_kv_heads, shape.head_dim, generator=generator).to(dtype) for _ in "kv"
            )
            layout = self.layout([(row, 0, context)])
            NATIVE.write(self.mine, key, value, layout)
            REFERENCE.write(self.theirs, key.float(), value.float(), layout)
        self.queries = [
            torch.randn(context, shape.num_heads, shape.head_dim, generator=generator).to(dtype) for context in contexts
        ]

    def layout(self, rows: list[tuple[int, int, int]]) -> StepLayout:
        """`rows`: (request, first position, end)."""
        starts, slots = [0], []
        width = max(len(self.tables[row]) for row, _, _ in rows) + 1
        tables = torch.zeros(len(rows), width, dtype=torch.int32)
        for i, (row, first, end) in enumerate(rows):
            table = self.tables[row]
            tables[i, : len(table)] = torch.tensor(table, dtype=torch.int32)
            slots += [table[p // self.block_size] * self.block_size + p % self.block_size for p in range(first, end)]
            starts.append(starts[-1] + end - first)
        ends = [end for _, _, end in rows]
        return StepLayout(starts, ends, tables, torch.tensor(slots, dtype=torch.int64), self.block_size)

    def attend(self, rows: list[tuple[int, int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        layout = self.layout(rows)
        query = torch.cat([self.queries[row][first:end] for row, first, end in rows])
        output, lse = NATIVE.attend(query, self.mine, layout, NATIVE.plan(layout), self.shape)
        assert output.dtype == self.dtype and lse.dtype == torch.float32
        return output, lse

    def expected(self, rows: list[tuple[int, int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        layout = self.layout(rows)
        query = torch.cat([self.queries[row][first:end] for row, first, end in rows]).float()
        return REFERENCE.attend(query, self.theirs, layout, REFERENCE.plan(layout), self.shape)


def cached(
    rows: list[tuple[int, int]], shape: AttentionShape, block_size: int = 16, dtype: torch.dtype = torch.float32,
    cache: torch.dtype | None = None,
) -> Cached:  # fmt: skip
    return Cached([context for _, context in rows], shape, block_size, dtype, cache or dtype)


def spans(rows: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    return [(i, context - queries, context) for i, (queries, context) in enumerate(rows)]


@pytest.mark.usefixtures("instruction_set", "threads")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_reference(shape: AttentionShape, dtype: torch.dtype) -> None:
    for rows in ROWS.values():
        for block_size, cache in ((16, dtype), (5, dtype), (16, torch.int8), (7, torch.int8), (32, torch.bfloat16)):
            requests = cached(rows, shape, block_size, dtype, cache)
            output, lse = requests.attend(spans(rows))
            expected, expected_lse = requests.expected(spans(rows))
            tolerance = max(TOLERANCE[dtype], TOLERANCE[cache])
            assert (output.float() - expected).abs().max() < tolerance, (rows, block_size, cache)
            assert (lse - expected_lse).abs().max() < tolerance, (rows, block_size, cache)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_bits_depend_on_the_position_alone(shape: AttentionShape, dtype: torch.dtype) -> None:
    """Whole, in chunks, in single steps; alone or in a batch; with one thread or two: the same bits."""
    activations = torch.bfloat16 if dtype == torch.int8 else dtype
    requests = cached([(0, 700), (0, 60), (0, 1300)], shape, 16, activations, dtype)
    whole, whole_lse = requests.attend([(0, 0, 700), (1, 0, 60), (2, 0, 1300)])
    starts = (0, 700, 760)
    for threads in (1, 2):
        use_threads(threads)
        try:
            for rows in (
                [(2, 0, 1300)],
                [(1, 0, 37), (0, 200, 533), (2, 1290, 1300)],
                [(0, 699, 700), (2, 512, 513), (1, 59, 60), (2, 1299, 1300), (0, 0, 1), (1, 3, 4)],
                [(2, 1299, 1300)],
                [(0, 511, 516), (2, 1022, 1030), (1, 0, 2)],
            ):
                output, lse = requests.attend(rows)
                picked = torch.cat([torch.arange(starts[row] + a, starts[row] + b) for row, a, b in rows])
                assert torch.equal(output, whole[picked]), (rows, threads)
                assert torch.equal(lse, whole_lse[picked]), (rows, threads)
        finally:
            use_threads(1)


@given(
    st.lists(st.tuples(st.integers(1, 70), st.integers(0, 1200)), min_size=1, max_size=6),
    st.sampled_from([None, 1, 3, 64, 500]), st.sampled_from([1, 3, 16, 48]), st.booleans(),
    st.sampled_from([(6, 2, 32), (3, 3, 10), (5, 1, 48)]), st.sampled_from([1, 2]),
)  # fmt: skip
@settings(max_examples=40)
def test_any_mix(
    rows: list[tuple[int, int]], window: int | None, block_size: int, decode: bool, sizes: tuple[int, int, int],
    threads: int,
) -> None:  # fmt: skip
    rows = [(1 if decode else queries, past + (1 if decode else queries)) for queries, past in rows]
    use_threads(threads)
    try:
        requests = cached(rows, shape_of(*sizes, window=window), block_size)
        output, lse = requests.attend(spans(rows))
        expected, expected_lse = requests.expected(spans(rows))
        assert (output - expected).abs().max() < 1e-5 and (lse - expected_lse).abs().max() < 1e-5
    finally:
        use_threads(1)


def norms(dim: int, dtype: torch.dtype, wide: bool) -> list[Norm]:
    made = []
    for name in "qk":
        norm = Norm(name, dim, "rms", 1e-6, affine=True, wide=wide, dtype=dtype, memory=WeightMemory())
        assert norm.weight is not None
        norm.weight.copy_(torch.randn(dim))
        made.append(norm)
    return made


def turn_of(layout: StepLayout, dim: int, dtype: torch.dtype) -> Turn:
    positions = torch.cat(
        [
            torch.arange(context - (end - start), context)
            for start, end, context in zip(
                layout.query_start, layout.query_start[1:], layout.context_lens, strict=False
            )
        ]
    )
    return Rotary(1e4 ** -(torch.arange(0, dim, 2) / dim)[None], [1.0], dtype).turn(positions, None)


@pytest.mark.usefixtures("instruction_set", "threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", ["plain", "turn", "partly", "norms", "wide norms", "everything"])
@pytest.mark.parametrize("shape", [SHAPES["grouped"], SHAPES["odd"], SHAPES["unequal groups, not in order"]])
def test_merged(shape: AttentionShape, what: str, dtype: torch.dtype) -> None:
    """A prompt in two chunks and steps, beside another request: the backend's call against its plain parts."""
    torch.manual_seed(0)
    requests = Cached([90, 600], shape, 16, dtype, dtype)
    for tensor in (requests.mine.key, requests.mine.value):
        tensor.view(torch.uint8).fill_(0xFF)
    dim, even = shape.head_dim, shape.head_dim // 2 * 2
    q_norm = k_norm = None
    if "norms" in what or what == "everything":
        q_norm, k_norm = norms(dim, dtype, what == "wide norms")
    for rows in ([(0, 0, 50), (1, 0, 590)], [(0, 50, 88)], [(1, 590, 591), (0, 88, 89)], [(0, 89, 90), (1, 591, 594)]):
        layout = requests.layout(rows)
        tokens = layout.query_start[-1]
        qkv = torch.randn(tokens, (shape.num_heads + 2 * shape.num_kv_heads) * dim).to(dtype)
        turn = factor = None
        if what in ("turn", "everything"):
            turn = turn_of(layout, even, dtype)
        elif what == "partly":
            turn = turn_of(layout, even // 2 // 2 * 2, dtype)
        if what == "everything":
            factor = (torch.rand(tokens, 1, 1) + 0.5).to(dtype)
        given = qkv.clone()
        output = NATIVE.attend_merged(
            qkv, requests.mine, layout, NATIVE.plan(layout), shape, q_norm, k_norm, turn, factor
        )
        assert torch.equal(qkv, given) and output.shape == (tokens, shape.num_heads * dim)
        wide = [None if norm is None else widened(norm) for norm in (q_norm, k_norm)]
        turn32 = None if turn is None else Turn(turn.cos.float(), turn.signed_sin.float())
        expected = REFERENCE.attend_merged(
            qkv.float(), requests.theirs, layout, REFERENCE.plan(layout), shape, *wide, turn32,
            None if factor is None else factor.float(),
        )  # fmt: skip
        assert (output.float() - expected).abs().max() < (2e-5 if dtype == torch.float32 else 0.06)


def widened(norm: Norm) -> Norm:
    own = WeightMemory()
    wide = Norm(norm.name, norm.size, "rms", norm.eps, affine=True, wide=False, dtype=torch.float32, memory=own)
    assert norm.weight is not None and wide.weight is not None
    wide.weight.copy_(norm.weight)
    return wide


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("dim", [64, 10])
def test_what_is_broken_stays_with_its_request(dtype: torch.dtype, dim: int) -> None:
    """NaN and infinity show in the tokens that see them, and nowhere else."""
    activations = torch.bfloat16 if dtype == torch.int8 else dtype
    shape = shape_of(4, 2, dim)
    for bad in (torch.nan, torch.inf):
        requests = Cached([80, 80], shape, 16, activations, dtype)
        good, _ = requests.attend([(0, 0, 80), (1, 79, 80)])
        layout = requests.layout([(0, 70, 71)])
        key = torch.zeros(1, 2, dim, dtype=activations)
        value = key.clone()
        value[0, 0, 3] = bad
        NATIVE.write(requests.mine, key, value, layout)
        after, _ = requests.attend([(0, 0, 80), (1, 79, 80)])
        assert torch.equal(after[80], good[80]), "another request"
        assert torch.equal(after[:64], good[:64]), "tokens before it"
        assert after[:, 2:].isfinite().all(), "heads that read another KV head"
        assert not after[70:80, :2, 3].isfinite().any()
        step, _ = requests.attend([(0, 69, 70)])
        assert step.isfinite().all()


@pytest.mark.usefixtures("instruction_set")
def test_large_and_small_scores() -> None:
    shape = shape_of(2, 1, 16)
    for size in (1e-30, 1e-3, 30.0, 1e4):
        requests = Cached([100], shape, 16, torch.float32, torch.float32)
        requests.queries[0] *= size
        output, lse = requests.attend([(0, 0, 100)])
        expected, expected_lse = requests.expected([(0, 0, 100)])
        assert output.isfinite().all()
        torch.testing.assert_close(output, expected, atol=1e-5 * max(size, 1), rtol=1e-5)
        torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)


def test_memory_is_not_touched_before_it_is_written() -> None:
    cache = NATIVE.allocate(SHAPES["grouped"], 200_000, 16, torch.bfloat16, CPU)
    assert cache.key.nbytes == 200_000 * 16 * 3 * 64 * 2 and cache.key.data_ptr() % 64 == 0
    with open("/proc/self/statm") as file:
        assert int(file.read().split()[1]) * 4096 < cache.key.nbytes


def test_bad_input_is_refused() -> None:
    shape = SHAPES["grouped"]
    requests = cached([(1, 20)], shape)
    layout = requests.layout([(0, 19, 20)])
    query, cache = torch.randn(1, 9, 64), requests.mine

    def plan_of(**changed: Any) -> Any:
        values = {name: getattr(layout, name) for name in ("query_start", "context_lens", "block_tables")}
        values |= {"slot_mapping": layout.slot_mapping, "block_size": 16} | changed
        return NATIVE.plan(StepLayout(**values))

    for plan in (
        plan_of(block_tables=torch.full_like(layout.block_tables, 1000)),
        plan_of(block_tables=torch.full_like(layout.block_tables, -1)),
        plan_of(slot_mapping=torch.tensor([1 << 40])),
        plan_of(slot_mapping=torch.tensor([-1])),
        plan_of(block_size=32),
    ):
        with pytest.raises(ValueError, match="blocks"):
            NATIVE.attend(query, cache, layout, plan, shape)
    for changed in (
        {"context_lens": [0]},
        {"context_lens": [1000]},
        {"context_lens": [20, 20]},
        {"slot_mapping": torch.tensor([1, 2])},
        {"block_tables": layout.block_tables.long()},
    ):
        with pytest.raises(ValueError, match=r"fit|needed|have to be|entry"):
            plan_of(**changed)
    plan = NATIVE.plan(layout)
    for wrong in (torch.randn(2, 9, 64), torch.randn(1, 9, 64).half(), torch.randn(1, 8, 64)):
        with pytest.raises(ValueError, match="query has to be"):
            NATIVE.attend(wrong, cache, layout, plan, shape)
    with pytest.raises(ValueError, match="qkv has to be"):
        NATIVE.attend_merged(torch.randn(1, 14 * 64), cache, layout, plan, shape, None, None, None, None)
    turn = Turn(torch.ones(2, 1, 64), torch.ones(2, 1, 64))
    with pytest.raises(ValueError, match="rotation"):
        NATIVE.attend_merged(torch.randn(1, 15 * 64), cache, layout, plan, shape, None, None, turn, None)
    with pytest.raises(ValueError, match="factor"):
        NATIVE.attend_merged(torch.randn(1, 15 * 64), cache, layout, plan, shape, None, None, None, torch.ones(2, 1, 1))
    key = torch.randn(1, 3, 64)
    far = StepLayout([0, 1], [20], layout.block_tables, torch.tensor([10**9]), 16)
    with pytest.raises(ValueError, match="slot"):
        NATIVE.write(cache, key, key, far)
    with pytest.raises(ValueError, match="key and value"):
        NATIVE.write(cache, torch.randn(1, 2, 64), torch.randn(1, 2, 64), layout)
    with pytest.raises(ValueError, match="not served"):
        NATIVE.allocate(shape, 4, 16, torch.float16, CPU)
    with pytest.raises(ValueError, match="KV head"):
        NATIVE.allocate(shape_of(2, 1, 16, (0, 1)), 4, 16, torch.float32, CPU)


def test_a_plan_serves_layers_of_several_kinds() -> None:
    kinds = [shape_of(6, 2, 32, window=window) for window in (None, 40, None)] + [shape_of(3, 3, 16)]
    rows = [(1, 700), (20, 130)]
    requests = [cached(rows, shape) for shape in kinds]
    plan = NATIVE.plan(requests[0].layout(spans(rows)))
    for _ in range(2):
        for request in requests:
            layout = request.layout(spans(rows))
            query = torch.cat([request.queries[row][first:end] for row, first, end in spans(rows)])
            output, _ = NATIVE.attend(query, request.mine, layout, plan, request.shape)
            expected, _ = request.expected(spans(rows))
            assert (output - expected).abs().max() < 1e-5


@pytest.mark.parametrize("window", [None, 1, 20, 40])
def test_what_products_fetch_before_attention(window: int | None) -> None:
    if not Path("/sys/devices/system/cpu/cpu0/cache/index3/size").exists():
        pytest.skip("the system does not say how large a third cache there is")
    requests = cached([(1, 40), (1, 50), (3, 20), (16, 16)], shape_of(2, 1, 16, window=window))
    requests.tables[1][0] = requests.tables[0][0]  # a common beginning is fetched once
    rows = spans([(1, 40), (1, 50), (3, 20), (16, 16)])
    step = NATIVE.plan(requests.layout(rows))
    wanted: list[int] = []
    for row, first, _ in rows:  # tokens before the step, those in sight of its first one
        oldest = 0 if window is None else max(0, first - window + 1)
        blocks = range(oldest // 16, -(-first // 16))
        wanted += [requests.tables[row][i] for i in blocks if (row, i) != (1, 0)]
    assert step.plan.blocks_ahead(requests.mine.layer.layer) == wanted
    assert wanted


def test_empty_steps_and_no_heads() -> None:
    requests = cached([(1, 20)], SHAPES["grouped"])
    layout = StepLayout([0, 0], [20], torch.zeros(1, 2, dtype=torch.int32), torch.zeros(0, dtype=torch.int64), 16)
    output, _ = NATIVE.attend(torch.randn(0, 9, 64), requests.mine, layout, NATIVE.plan(layout), SHAPES["grouped"])
    assert output.shape == (0, 9, 64)
    none = AttentionShape(0, 0, 64, (), 1.0)
    cache: LayerCache = NATIVE.allocate(none, 4, 16, torch.float32, CPU)
    layout = requests.layout([(0, 19, 20)])
    assert isinstance(cache, NativeCache)
    assert NATIVE.attend_merged(
        torch.zeros(1, 0), cache, layout, NATIVE.plan(layout), none, None, None, None, None
    ).shape == (1, 0)

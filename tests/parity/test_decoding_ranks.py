"""Steps of one token each are native on the ranks of a group and the stages of a pipeline too, and give what they give
when each part is called: the same results, tables and exchanges. So the ranks of a group need not do the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace as replace_state

from phalanx.distributed.collectives import Groups
from phalanx.distributed.mesh import Mesh
from phalanx.distributed.transports.abort import GroupBroken
from phalanx.kernels.decoding import Decoding as Kernel
from phalanx.kernels.library import native
from phalanx.kernels.tape import WAIT, Place
from phalanx.models.decoder import Decoder
from phalanx.quantization.base import choose_scheme
from phalanx.sampling.sampler import NO_SCORES
from phalanx.step import ON_DEVICE, SamplingState, StepResult, unpack
from phalanx.worker.request_table import RequestTable
from phalanx.worker.stage_link import StageLink
from tests.helpers.both_runners import BLOCK, WAYS, Both
from tests.helpers.decoders import decoder_of
from tests.helpers.meddling import Calls, asleep, die, do_something_else, fall_silent, leave, leave_out
from tests.helpers.plans import GREEDY, Run, admission, answer, plan
from tests.helpers.rank_spawner import Member, Ranks, run_ranks
from tests.helpers.tiny_gguf import to_gguf
from tests.helpers.tiny_models import tiny_checkpoint

if native() is None:
    pytest.skip("the native library was not built", allow_module_level=True)

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
VOCAB = 307
STEPS = 12
FREE = {2: GREEDY, 0: WAYS[0], 3: SamplingState(temperature=1.3, top_k=VOCAB, seed=2**63 + 5)}
"""Ways to sample that leave no token out; `top_k` is more than a rank has."""
FAMILIES = ["llama", "llama-biased", "mistral", "phi3", "qwen2", "qwen3"]
"""Those with nothing between the tables and the blocks, and one class of prompts."""


def both_of(
    member: Member, mesh: Mesh, path: Path, dtype: torch.dtype = torch.float32, scheme: str | None = None,
    **options: Any,
) -> Both:  # fmt: skip
    groups = member.groups.handles()
    chosen = choose_scheme(scheme, dtype, CPU)
    decoders = [
        decoder_of(path, mesh=mesh, rank=member.rank, groups=groups, dtype=dtype, scheme=chosen) for _ in range(2)
    ]
    link = None
    if mesh.pp > 1:
        link = StageLink(groups, mesh.place(member.rank), decoders[0].spec.hidden_size, dtype, CPU)
    return Both(*decoders, **{"ways": FREE, "link": link, **options})


def decoded(member: Member, mesh: Mesh, *args: Any) -> tuple[list[StepResult], int]:
    both = both_of(member, mesh, *args)
    both.begin()
    return both.decode(STEPS), both.natively


def check(mesh: Mesh, *args: Any, transport: str = "shm", natively: int = STEPS) -> list[StepResult]:
    outcomes = run_ranks(decoded, mesh.world_size, mesh, *args, mesh=mesh, transport=transport)
    assert [count for _, count in outcomes] == [natively] * mesh.world_size
    results = outcomes[-1][0]
    assert len(answer(results[-1]).tokens) == len(FREE)
    for rank, (others, _) in enumerate(outcomes):
        assert others == results or mesh.place(rank).pp < mesh.pp - 1
    return results


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks(family: str, ranks: int, dtype: torch.dtype) -> None:
    check(Mesh(tp=ranks), tiny_checkpoint(family), dtype)


def speculated(member: Member, mesh: Mesh, path: Path, ways: Mapping[int, SamplingState]) -> tuple[int, int]:
    """Steps, and how many were native."""
    both = both_of(member, mesh, path, ways=ways)
    both.begin()
    both.decode(STEPS)
    before = both.natively
    return len(both.speculate()), both.natively - before


@pytest.mark.parametrize(
    "mesh", [Mesh(tp=2), Mesh(tp=3), Mesh(pp=2), Mesh(pp=2, tp=2)], ids=["2", "3", "stages", "2x2"]
)
def test_proposed_tokens(mesh: Mesh) -> None:
    for steps, natively in run_ranks(speculated, mesh.world_size, mesh, tiny_checkpoint("llama"), FREE, mesh=mesh):
        assert natively == steps


def test_proposed_tokens_beside_rows_that_leave_tokens_out() -> None:
    """Where the ranks need to know more of each other's tokens, the last stage computes part by part."""
    mesh = Mesh(pp=2, tp=2)
    outcomes = run_ranks(speculated, mesh.world_size, mesh, tiny_checkpoint("llama"), WAYS, mesh=mesh)
    assert [natively == steps for steps, natively in outcomes] == [True, True, False, False]


@pytest.mark.parametrize("family", ["gemma2", "opt-post-norm"])
def test_other_families_are_computed_part_by_part(family: str) -> None:
    check(Mesh(tp=2), tiny_checkpoint(family), natively=0)
    check(Mesh(pp=2), tiny_checkpoint(family), natively=0)


def test_ranks_without_shared_memory_compute_part_by_part() -> None:
    check(Mesh(tp=2), tiny_checkpoint("llama"), transport="tcp", natively=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mesh", [Mesh(pp=2), Mesh(pp=3), Mesh(pp=2, tp=2)], ids=["2", "3", "2x2"])
def test_stages(mesh: Mesh, dtype: torch.dtype) -> None:
    """The last one has the token table too, where it is the head."""
    check(mesh, tiny_checkpoint("qwen3", num_hidden_layers=3), dtype)


def test_stages_without_shared_memory() -> None:
    check(Mesh(pp=2), tiny_checkpoint("llama"), transport="tcp")


@pytest.mark.parametrize("name", ["gguf", "int8"])
@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(pp=2)], ids=["tp", "pp"])
def test_quantized(name: str, mesh: Mesh, tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 256, "head_dim": 32}
    path = tiny_checkpoint("llama", **sizes, intermediate_size=512)
    blocks, _ = to_gguf(path, "F32", tmp_path, lambda name: "Q6_K" if "embd" in name else "Q4_K")
    check(mesh, blocks, torch.bfloat16, name)


def never(*args: Any) -> Any:
    raise AssertionError("rows were sampled in Python")


def sampled_natively(member: Member, path: Path) -> list[StepResult]:
    both = both_of(member, Mesh(tp=member.tp.size), path)
    both.begin()
    both.runners[0].split.sample = never  # type: ignore[union-attr, method-assign]
    return both.decode(STEPS)


def test_such_rows_are_sampled_natively() -> None:
    results = run_ranks(sampled_natively, 2, tiny_checkpoint("llama"))
    assert results[0] == results[1]


def from_part_to_part(member: Member, path: Path, natively: tuple[int, ...]) -> list[StepResult]:
    """Rank by rank: only those compute natively."""
    both = both_of(member, Mesh(tp=member.tp.size), path)
    if member.rank not in natively:
        both.runners[0]._recorded = True
    both.begin()
    return [*both.decode(STEPS), *both.speculate()]


@pytest.mark.parametrize("natively", [(0,), (1,), (0, 2)])
def test_ranks_may_do_as_they_like(natively: tuple[int, ...]) -> None:
    path = tiny_checkpoint("llama")
    outcomes = run_ranks(from_part_to_part, 3, path, natively)
    assert outcomes == [outcomes[0]] * 3 and outcomes[0][:STEPS] == check(Mesh(tp=3), path)


def random_plans(member: Member, path: Path) -> tuple[list[StepResult], int]:
    both, rng, room = both_of(member, Mesh(tp=member.tp.size), path, slots=6, blocks=60), np.random.default_rng(5), 10
    ways = [*FREE.values(), WAYS[3], replace_state(GREEDY, logprobs=2), replace_state(GREEDY, presence_penalty=1.0)]
    table, results = both.runners[1].table, []
    for step in range(120):
        active = np.flatnonzero(table.active).tolist()
        full = [slot for slot in active if table.length[slot] >= room * BLOCK]
        if full or (len(active) > 2 and rng.random() < 0.05):
            results.append(both.run(plan(release=full or active[:1], step=step)))
            continue
        runs = [slot for slot in rng.permutation(active).tolist() if rng.random() < 0.7]
        rows = [_next(table, slot, room, on_device=bool(rng.random() < 0.5)) for slot in runs]
        admitted = []
        if len(active) < 2 or (len(active) < 6 and rng.random() < 0.1):
            slot = int(rng.choice(np.flatnonzero(~table.active)))
            ids, way = rng.integers(0, VOCAB, int(rng.integers(1, 20))).tolist(), ways[int(rng.integers(len(ways)))]
            admitted = [admission(slot, ids, range(room * slot, room * slot + 5), sampling=way)]
            rows.append(Run(slot, len(ids)))
        results.append(both.run(plan(rows, admit=admitted, step=step)))
    return results, both.natively


def _next(table: RequestTable, slot: int, room: int, *, on_device: bool) -> Run:
    blocks = int(table.num_blocks[slot])
    new = (room * slot + blocks,) if table.length[slot] + 1 > blocks * BLOCK else ()
    return Run(slot, 1, ON_DEVICE if on_device else int(table.sampled[slot]), new)


@pytest.mark.parametrize("ranks", [2, 3])
def test_random_plans(ranks: int) -> None:
    """Rows of all kinds come and go."""
    outcomes = run_ranks(random_plans, ranks, tiny_checkpoint("llama"))
    assert outcomes == outcomes[:1] * ranks and 20 < outcomes[0][1] < 100


def narrowing(member: Member, mesh: Mesh, path: Path) -> list[StepResult]:
    both = both_of(member, mesh, path, ways=WAYS)
    both.begin()
    results = both.decode(STEPS)
    assert both.natively == STEPS
    return results


@pytest.mark.parametrize("mesh", [Mesh(tp=3), Mesh(pp=2), Mesh(pp=2, tp=2)], ids=["tp", "pp", "both"])
def test_rows_that_leave_tokens_out(mesh: Mesh) -> None:
    """For these the ranks need to know more of each other's."""
    outcomes = run_ranks(narrowing, mesh.world_size, mesh, tiny_checkpoint("llama"), mesh=mesh)
    assert outcomes[-1] == outcomes[-2] or mesh.tp == 1


def large_sums(member: Member, path: Path) -> tuple[list[StepResult], int]:
    """Which take more than a round."""
    from phalanx.distributed.transports import shared_memory

    shared_memory._WHOLE_SUM = 0
    return decoded(member, Mesh(tp=member.tp.size), path)


def test_sums_that_take_more_than_a_round_are_calls() -> None:
    path = tiny_checkpoint("llama")
    for results, natively in run_ranks(large_sums, 2, path):
        assert results == check(Mesh(tp=2), path) and natively == 0


# -- scores that are no numbers, or equal


def changed(
    member: Member, path: Path, change: Callable[[Decoder], None], ranks: tuple[int, ...]
) -> tuple[StepResult, tuple[int, int]]:
    """Of a step with the model changed on these ranks, and the tokens whose scores this one has."""
    both = both_of(member, Mesh(tp=member.tp.size), path)
    both.begin()
    for runner in both.runners:
        if member.rank in ranks:
            change(runner.decoder)
        runner.decoder.tapes, runner.decoder._recorded = None, False
    result = both.run(plan([Run(slot, 1, 7) for slot in FREE], step=7))
    assert both.natively == 1
    return result, both.runners[0].decoder.own_tokens


def norm_of(value: float) -> Callable[[Decoder], None]:
    def change(decoder: Decoder) -> None:
        decoder.final_norm.weight.fill_(value)  # type: ignore[union-attr]

    return change


def biased(values: tuple[float, ...]) -> Callable[[Decoder], None]:
    """All scores of each rank."""

    def change(decoder: Decoder) -> None:
        start, stop = decoder.own_tokens
        decoder.head.bias = torch.full((stop - start,), values[decoder.place.tp])  # type: ignore[union-attr]

    return change


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rows_whose_scores_are_no_numbers_fail_on_all_ranks(value: float, ranks: tuple[int, ...]) -> None:
    for result, _ in run_ranks(changed, 2, tiny_checkpoint("llama"), norm_of(value), ranks):
        assert answer(result).failures == dict.fromkeys(FREE, NO_SCORES) and not result.tokens


def test_of_equal_scores_the_first_is_the_largest() -> None:
    for result, _ in run_ranks(changed, 3, tiny_checkpoint("llama"), norm_of(0.0), (0, 1, 2)):
        tokens = answer(result).tokens
        assert tokens[2] == 0 and tokens[0] > 0 and tokens[3] > 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_may_have_no_token_to_choose(rank: int) -> None:
    change = biased((-torch.inf, -100.0) if rank == 0 else (-100.0, -torch.inf))
    outcomes = run_ranks(changed, 2, tiny_checkpoint("llama"), change, (0, 1))
    start, stop = outcomes[1 - rank][1]
    for result, _ in outcomes:
        assert len(answer(result).tokens) == len(FREE)
        assert all(start <= token < stop for token in answer(result).tokens.values())


def test_rows_without_any_token_to_choose_fail() -> None:
    for result, _ in run_ranks(changed, 2, tiny_checkpoint("llama"), biased((-torch.inf, -torch.inf)), (0, 1)):
        assert answer(result).failures == dict.fromkeys(FREE, NO_SCORES)


# -- a rank whose peer does something in the middle of a step

LAYERS = 2
PLACES = {"token table": 1, "block": 4, "tokens": 2 + 2 * LAYERS}
"""Exchanges of a step, from 1; what is done comes before it."""
SAID = 19
"""A token after which all rows go on with one of rank 1's tokens."""


def meets(
    member: Member, path: Path, at: int, do: Callable[[Member], bool | None], left_out: str, aborted: bool
) -> tuple[Any, int]:
    """Rank 1 does that, and computes part by part; rank 0 natively. The result of rank 0, and how often it waited.
    `left_out` is what does nothing at rank 0, `aborted` whether its wait is broken from outside."""
    waits, steps = 0, [plan([Run(slot, 1, SAID) for slot in FREE], step=step) for step in range(2)]
    groups = Groups(tp=member.tp)
    if member.rank == 1:
        groups = Groups(tp=Calls(member.tp, lambda: do(member), 0))
    decoder = decoder_of(path, mesh=Mesh(tp=2), rank=member.rank, groups=groups)
    runner = Both._runner(decoder, 4, 40, None)
    lengths = {slot: 5 + slot for slot in FREE}
    admitted = [admission(s, range(n), range(10 * s, 10 * s + 3), sampling=FREE[s]) for s, n in lengths.items()]
    runner.run(plan([Run(s, n) for s, n in lengths.items()], admit=admitted))
    runner.run(steps[0])
    if member.rank == 1:
        calls: Any = groups.tp
        calls.at, calls.count = at, 0
        return runner.run(steps[1]), 0
    if left_out:
        setattr(groups.tp, left_out, lambda: None)
    real = Kernel.play

    def play(kernel: Kernel, *args: Any) -> Place:
        nonlocal waits
        place = real(kernel, *args)
        waits += place.stop == WAIT
        return place

    Kernel.play = play  # type: ignore[method-assign]
    if aborted:
        threading.Thread(target=lambda: member.abort.set(member.ask()), daemon=True).start()
    try:
        result = runner.run(steps[1])
        return (result.slots, result.tokens), waits  # type: ignore[union-attr]
    except GroupBroken as error:
        return str(error), waits


def outcome(at: str, do: Callable[[Member], bool | None], *, left_out: str = "", aborted: bool = False) -> Any:
    """What rank 0 had from the step; it waited, natively at first."""
    arguments = (tiny_checkpoint("llama"), PLACES[at], do, left_out, aborted)
    with Ranks(meets, 2, arguments, exchange_timeout=None if aborted else 2.0, crowded=False) as ranks:
        if aborted:
            ranks.hear(1)
            ranks.tell(0, "rank 1 died")
        value, waits = ranks.hear_outcome(0).value
    assert waits
    return value


def nothing(member: Member) -> None:
    return None


@pytest.fixture(scope="module")
def undisturbed() -> Any:
    slots, tokens = run_ranks(meets, 2, tiny_checkpoint("llama"), 0, nothing, "", False)[0][0]
    assert min(unpack(tokens)) > VOCAB // 2
    return slots, tokens


@pytest.mark.parametrize("at", PLACES)
def test_a_rank_that_comes_late_is_waited_for(at: str, undisturbed: Any) -> None:
    assert outcome(at, asleep) == undisturbed


@pytest.mark.parametrize("at", PLACES)
def test_without_the_wait_for_it_the_tokens_would_be_wrong(at: str, undisturbed: Any) -> None:
    assert outcome(at, asleep, left_out="join_round") != undisturbed


@pytest.mark.parametrize("at", PLACES)
@pytest.mark.parametrize(("do", "said"), [(die, "for too long"), (fall_silent, "for too long"), (leave, "has left")])
def test_a_rank_that_is_gone_breaks_the_step(do: Callable[[Member], None], said: str, at: str) -> None:
    assert said in outcome(at, do)


@pytest.mark.parametrize("at", PLACES)
@pytest.mark.parametrize("do", [die, fall_silent])
def test_a_wait_for_it_is_broken_from_outside(do: Callable[[Member], None], at: str) -> None:
    assert "aborted: rank 1 died" in outcome(at, do, aborted=True)


@pytest.mark.parametrize("at", PLACES)
def test_a_rank_in_another_exchange_is_found_out(at: str) -> None:
    assert "Ranks disagree in exchange" in outcome(at, do_something_else)


def test_a_rank_that_leaves_out_an_exchange_is_found_out() -> None:
    assert "Ranks disagree in exchange" in outcome("block", leave_out)

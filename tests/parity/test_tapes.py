"""What a tape plays is what its block computes layer by layer, to the bit: every family, in any batch, alone and split
over ranks that share memory or do not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phalanx.distributed.collectives import Groups
from phalanx.distributed.mesh import Mesh
from phalanx.distributed.transports import segment, shared_memory
from phalanx.distributed.transports.abort import Abort, GroupBroken
from phalanx.kernels.library import native
from phalanx.kernels.tape import WAIT, Place, Reel
from phalanx.models import tapes
from phalanx.models.decoder import Decoder
from phalanx.quantization.base import choose_scheme
from tests.helpers.decoders import decoder_of, random_ids
from tests.helpers.meddling import Calls, asleep, die, do_something_else, fall_silent, leave, leave_out
from tests.helpers.rank_spawner import Member, Ranks, run_ranks
from tests.helpers.stepping import Driver
from tests.helpers.tiny_gguf import to_gguf
from tests.helpers.tiny_models import FAMILIES, tiny_checkpoint

if native() is None:
    pytest.skip("the native library was not built", allow_module_level=True)

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
STEPS = ([40, 3, 1], [1, 9, 1], [1, 1, 1], [1, 1, 1])
"""How many tokens of three requests each step computes."""


def layer_by_layer(decoder: Decoder) -> Decoder:
    decoder.tapes, decoder._recorded = None, True
    return decoder


def logits_of(decoder: Decoder) -> torch.Tensor:
    """Of every token of three requests, in a mixed batch."""
    driver = Driver(decoder, blocks=32)
    streams = [driver.stream(random_ids(sum(counts), seed=i)) for i, counts in enumerate(zip(*STEPS, strict=True))]
    return torch.cat([logits for counts in STEPS for logits in driver.step(streams, counts)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, dtype: torch.dtype) -> None:
    played, computed = (decoder_of(tiny_checkpoint(family), dtype=dtype) for _ in range(2))
    assert torch.equal(logits_of(played), logits_of(layer_by_layer(computed)))
    assert played.tapes is not None and computed.tapes is None


def _mixed(name: str) -> str:
    """Some matrices of one product are plain numbers."""
    parts = {"attn_q": "Q4_K", "attn_k": "F16", "attn_v": "Q6_K", "ffn_gate": "F16", "ffn_up": "Q4_0"}
    return next((kind for part, kind in parts.items() if part + "." in name), "Q8_0")


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 32, "intermediate_size": 512}
    return to_gguf(tiny_checkpoint("llama-biased", **sizes), "F32", tmp_path_factory.mktemp("gguf"), _mixed)[0]


@pytest.mark.parametrize("name", ["gguf", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantized(blocks: Path, name: str, dtype: torch.dtype) -> None:
    played, computed = (decoder_of(blocks, dtype=dtype, scheme=choose_scheme(name, dtype, CPU)) for _ in range(2))
    assert torch.equal(logits_of(played), logits_of(layer_by_layer(computed)))
    assert played.tapes is not None


def test_what_is_not_native_is_computed_layer_by_layer() -> None:
    decoder = decoder_of(tiny_checkpoint("llama"), attention="sdpa")
    logits_of(decoder)
    assert decoder.tapes is None


# -- over ranks


def both_ways(member: Member, path: Path, dtype: torch.dtype) -> tuple[list[float], ...]:
    """Logits with tapes and without."""
    played, computed = half(member, path, dtype), layer_by_layer(half(member, path, dtype))
    result = logits_of(played).flatten().tolist(), logits_of(computed).flatten().tolist()
    assert played.tapes is not None
    return result


def half(member: Member, path: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    mesh, groups = Mesh(tp=member.tp.size), Groups(tp=member.tp).handles()
    return decoder_of(path, mesh=mesh, rank=member.rank, groups=groups, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("family", "size", "transport"),
    [("llama", 2, "shm"), ("llama-biased", 3, "shm"), ("gemma2", 2, "tcp"), ("opt-post-norm", 3, "shm")],
)
def test_over_ranks(family: str, size: int, transport: str, dtype: torch.dtype) -> None:
    outcomes = run_ranks(both_ways, size, tiny_checkpoint(family), dtype, transport=transport)
    for played, computed in outcomes:
        assert played == computed == outcomes[0][0]


def in_pieces(member: Member, path: Path, dtype: torch.dtype, how: str) -> list[float]:
    """Of more rows than a sum takes at once. Ranks play, or compute layer by layer, or play and sum by calls."""
    shared_memory._WHOLE_SUM, shared_memory._PIECE_ROWS = 0, 16
    if how == "calls":
        member = Member(member.rank, Groups(tp=Calls(member.tp, lambda: None)), member.abort, member.pipe)
    decoder = half(member, path, dtype)
    return logits_of(layer_by_layer(decoder) if how == "layers" else decoder).flatten().tolist()


def differently(member: Member, path: Path, dtype: torch.dtype) -> list[float]:
    return in_pieces(member, path, dtype, ("tapes", "calls", "layers")[member.rank])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("family", "size"), [("llama", 2), ("llama-biased", 3), ("opt-post-norm", 2), ("gemma2", 2)])
def test_sums_in_pieces(family: str, size: int, dtype: torch.dtype) -> None:
    """The same bits as in one round, whoever plays."""
    whole = run_ranks(both_ways, size, tiny_checkpoint(family), dtype)[0][0]
    for how in ("tapes", "layers"):
        assert run_ranks(in_pieces, size, tiny_checkpoint(family), dtype, how) == [whole] * size
    if size == 3:
        assert run_ranks(differently, size, tiny_checkpoint(family), dtype) == [whole] * size


# -- a rank whose peer does something in the middle of a block

SUM = 4
"""Of a step: after the token table's and the first block's two, in the second block. What is done comes before it."""


def meets(
    member: Member, path: Path, do: Callable[[Member], bool | None], left_out: str, aborted: bool
) -> tuple[Any, list[tuple[int, int]]]:
    """Rank 1 does that; rank 0 plays. The logits and where rank 0 had to wait: in which block, at which sum of it.
    `left_out` is what does nothing at rank 0, `aborted` whether its wait is broken from outside."""
    if member.rank == 1:
        decoder = half(Member(1, Groups(tp=Calls(member.tp, lambda: do(member), SUM)), member.abort, member.pipe), path)
        return logits_of(decoder).flatten().tolist(), []
    decoder, waits = half(member, path), []
    if left_out:
        setattr(decoder.groups.tp, left_out, lambda: None)
    real = Reel.play

    def play(reel: Reel, *args: Any) -> Place:
        place = real(reel, *args)
        if place.stop == WAIT:
            waits.append((place.block, place.entry))
        return place

    Reel.play = play  # type: ignore[method-assign]
    if aborted:
        threading.Thread(target=lambda: member.abort.set(member.ask()), daemon=True).start()
    try:
        return logits_of(decoder).flatten().tolist(), waits
    except GroupBroken as error:
        return str(error), waits


def outcome(do: Callable[[Member], bool | None], *, left_out: str = "", aborted: bool = False) -> Any:
    """What rank 0 had from the step; it waited in the second block, natively at first."""
    arguments = (tiny_checkpoint("llama"), do, left_out, aborted)
    with Ranks(meets, 2, arguments, exchange_timeout=None if aborted else 2.0, crowded=False) as ranks:
        if aborted:
            ranks.hear(1)
            ranks.tell(0, "rank 1 died")
        value, waits = ranks.hear_outcome(0).value
    assert 1 in [block for block, _ in waits], waits
    return value


@pytest.fixture(scope="module")
def undisturbed() -> list[float]:
    return run_ranks(both_ways, 2, tiny_checkpoint("llama"), torch.float32)[0][0]


def test_a_rank_that_comes_late_is_waited_for(undisturbed: list[float]) -> None:
    assert outcome(asleep) == undisturbed


def late_for_a_piece(member: Member, path: Path, left_out: str) -> tuple[Any, list[tuple[int, int]]]:
    shared_memory._WHOLE_SUM, shared_memory._PIECE_ROWS = 0, 16
    return meets(member, path, asleep, left_out, aborted=False)


@pytest.mark.parametrize("left_out", ["", "join_round"])
def test_a_rank_that_comes_late_is_waited_for_in_a_piece(left_out: str, undisturbed: list[float]) -> None:
    arguments = (tiny_checkpoint("llama"), left_out)
    with Ranks(late_for_a_piece, 2, arguments, exchange_timeout=2.0, crowded=False) as ranks:
        logits, waits = ranks.hear_outcome(0).value
    assert waits and (logits == undisturbed) == (not left_out)


def test_without_the_wait_for_it_the_sum_would_be_wrong(undisturbed: list[float]) -> None:
    assert outcome(asleep, left_out="join_round") != undisturbed


@pytest.mark.parametrize(("do", "said"), [(die, "for too long"), (fall_silent, "for too long"), (leave, "has left")])
def test_a_rank_that_is_gone_breaks_the_sum(do: Callable[[Member], None], said: str) -> None:
    assert said in outcome(do)


@pytest.mark.parametrize("do", [die, fall_silent])
def test_a_wait_for_it_is_broken_from_outside(do: Callable[[Member], None]) -> None:
    assert "aborted: rank 1 died" in outcome(do, aborted=True)


def wakes(member: Member, path: Path) -> list[float]:
    """Each block of rank 1 is played when rank 0 has fallen asleep in the sum before."""
    segment._RECHECK_MS = 600_000  # it does not wake up by itself
    tapes._FEW_TOKENS = 0  # there is a pause after each block
    decoder = half(member, path)
    if member.rank == 1:
        decoder.pulse = SimpleNamespace(beat=lambda: asleep(member))  # type: ignore[assignment]
    return logits_of(decoder).flatten().tolist()


def test_who_sleeps_is_woken_by_who_plays(undisturbed: list[float]) -> None:
    played = run_ranks(wakes, 2, tiny_checkpoint("llama"), timeout=30, exchange_timeout=None, crowded=False)
    assert played == [undisturbed, undisturbed]


@pytest.mark.parametrize("do", [leave_out, do_something_else])
def test_a_rank_in_another_exchange_is_found_out(do: Callable[[Member], bool | None]) -> None:
    assert "Ranks disagree in exchange" in outcome(do)


def test_between_blocks_the_end_of_the_epoch_is_noticed() -> None:
    """At the first pause: eight blocks are played at once."""
    decoder, abort = decoder_of(tiny_checkpoint("llama", num_hidden_layers=17)), Abort()
    logits_of(decoder)
    decoder.pulse.abort, before = abort, decoder.pulse.count
    abort.set("rank 1 died")
    with pytest.raises(GroupBroken, match="aborted: rank 1 died"):
        logits_of(decoder)
    assert decoder.pulse.count == before + 1
    abort.close()

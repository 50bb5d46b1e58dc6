"""What a tape plays is what its block computes layer by layer, to the bit: every family, in any batch, alone and split
over ranks that share memory or do not."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from phalanx.distributed.collectives import Groups
from phalanx.distributed.mesh import Mesh
from phalanx.distributed.transports.abort import GroupBroken
from phalanx.kernels.library import native
from phalanx.models.decoder import Decoder
from phalanx.quantization.base import choose_scheme
from tests.helpers.decoders import decoder_of, random_ids
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


def both_ways(member: Member, path: Path, dtype: torch.dtype, delay: float = 0.0) -> tuple[list[float], ...]:
    """Logits with tapes and without; the ranks reach each sum at very different times where there is a delay."""
    mesh, groups = Mesh(tp=member.tp.size), Groups(tp=member.tp).handles()

    def decoder() -> Decoder:
        return decoder_of(path, mesh=mesh, rank=member.rank, groups=groups, dtype=dtype)

    played, computed = decoder(), layer_by_layer(decoder())
    if delay:
        slow_down(played, lambda: time.sleep(delay * member.rank))
    result = logits_of(played).flatten().tolist(), logits_of(computed).flatten().tolist()
    assert played.tapes is not None
    return result


def slow_down(decoder: Decoder, wait: Callable[[], object]) -> None:
    beat = decoder.pulse.beat

    class Slow:
        count = 0

        def beat(self) -> None:
            wait()
            beat()

    decoder.pulse = Slow()  # type: ignore[assignment]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("family", "size", "transport"),
    [("llama", 2, "shm"), ("llama-biased", 3, "shm"), ("gemma2", 2, "tcp"), ("opt-post-norm", 3, "shm")],
)
def test_over_ranks(family: str, size: int, transport: str, dtype: torch.dtype) -> None:
    outcomes = run_ranks(both_ways, size, tiny_checkpoint(family), dtype, transport=transport)
    for played, computed in outcomes:
        assert played == computed == outcomes[0][0]


def test_a_rank_that_comes_late_is_waited_for() -> None:
    """Longer than native code waits, and long enough that the others fall asleep."""
    for played, computed in run_ranks(both_ways, 2, tiny_checkpoint("llama"), torch.float32, 0.03):
        assert played == computed


def half(member: Member, path: Path) -> Decoder:
    return decoder_of(path, mesh=Mesh(tp=2), rank=member.rank, groups=Groups(tp=member.tp).handles())


def plays_until_broken(member: Member, path: Path) -> str:
    decoder = half(member, path)
    logits_of(decoder)
    if member.rank == 1:
        return member.tell("played") or str(member.ask())
    member.ask()
    try:
        logits_of(decoder)
    except GroupBroken as error:
        return str(error)
    return "nothing"


def test_a_rank_that_is_gone_breaks_the_sum() -> None:
    with Ranks(plays_until_broken, 2, (tiny_checkpoint("llama"),), exchange_timeout=0.5) as ranks:
        ranks.hear(1)
        ranks.kill(1)
        ranks.tell(0, "go on")
        assert "for too long" in ranks.hear_outcome(0).value


def disagrees(member: Member, path: Path) -> str:
    decoder = half(member, path)
    try:
        if member.rank == 0:
            logits_of(decoder)
        else:
            member.tp.all_reduce(torch.zeros(44, 45))  # the token table's, and then something else
            member.tp.barrier()
    except GroupBroken as error:
        return str(error)
    return "nothing"


def test_a_rank_in_another_exchange_is_found_out() -> None:
    assert all("disagree" in said or "left" in said for said in run_ranks(disagrees, 2, tiny_checkpoint("llama")))

"""Every family cut over ranks equals one rank in float32: logits within 1e-4 and 64 greedy tokens, and what is awkward
about each cut: unequal shares, more ranks than KV heads, odd widths, stages of unequal width, blocks cut by a head.

Ranks are threads in lock step (`tests.helpers.split_decoders`). That one rank equals the reference is
`test_families.py`'s business; real rank processes are `test_split_processes.py`'s.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.distributed.mesh import Mesh
from phalanx.models.decoder import Decoder
from phalanx.quantization.base import Unquantized
from tests.helpers.decoders import decoder_of, random_ids
from tests.helpers.split_decoders import RankOutcome, split_outcomes
from tests.helpers.stepping import Driver
from tests.helpers.tiny_gguf import to_gguf
from tests.helpers.tiny_models import FAMILIES, tiny_checkpoint

TOLERANCE = 1e-4
IDS = random_ids(29, seed=4)


@cache
def alone(path: Path) -> tuple[torch.Tensor, list[int]]:
    """One rank's logits of the prompt, and its 64 greedy tokens."""
    driver = Driver(decoder_of(path))
    stream = driver.stream(IDS, room=64)
    logits = driver.prefill(stream)
    return logits, driver.greedy_after(stream, logits[-1], 64)


def check(path: Path, mesh: Mesh, **options: Any) -> list[RankOutcome]:
    logits, tokens = alone(path)
    assert logits.std() > 0.2, "the model says too little to compare with"
    outcomes = split_outcomes(path, mesh, IDS, tokens[:-1], **options)
    last = [o for o in outcomes if o.logits is not None]
    assert len(last) == mesh.widths[-1]
    for outcome in last:
        assert outcome.logits is not None
        assert (outcome.logits - logits).abs().max() < TOLERANCE
        assert torch.equal(outcome.logits, last[0].logits), "ranks disagree"
        assert outcome.tokens == tokens
    return outcomes


MESHES = {"tp2": Mesh(tp=2), "tp3": Mesh(tp=3), "pp2": Mesh(pp=2)}


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_family(family: str, mesh: Mesh) -> None:
    check(tiny_checkpoint(family), mesh)


@pytest.mark.parametrize("weights", [(3.0, 1.0), (1.0, 3.0)])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "gemma2", "opt-post-norm"])
def test_unequal_shares(family: str, weights: tuple[float, ...]) -> None:
    outcomes = check(tiny_checkpoint(family), Mesh(tp=2), tensor_weights=[weights])
    sizes = [o.decoder.nbytes for o in outcomes]
    assert (sizes[0] > 1.3 * sizes[1]) == (weights[0] > weights[1])  # norms and positions are on both


@pytest.mark.parametrize("ranks", [4, 7])
@pytest.mark.parametrize(
    "path", [("llama", {}), ("llama", {"tie_word_embeddings": False, "num_key_value_heads": 9}), ("mistral", {})],
    ids=["9-on-3", "9-on-9", "7-on-7"],
)  # fmt: skip
def test_more_ranks_than_kv_heads_and_odd_counts(path: tuple[str, dict[str, Any]], ranks: int) -> None:
    check(tiny_checkpoint(path[0], **path[1]), Mesh(tp=ranks))


@pytest.mark.parametrize("ranks", [2, 5])
def test_one_kv_head_on_every_rank(ranks: int) -> None:
    for outcome in check(tiny_checkpoint("llama-biased"), Mesh(tp=ranks)):
        assert {block.attention.shape.num_kv_heads for block in outcome.decoder.blocks} == {1}


@pytest.mark.parametrize(
    ("family", "mesh", "options"),
    [
        ("gemma3", Mesh.of_widths((2, 1)), {"stage_layers": (1, 3)}),
        ("gemma3", Mesh.of_widths((1, 2)), {}),
        ("llama", Mesh.of_widths((2, 1)), {"tensor_weights": ((3.0, 1.0), (1.0,))}),
        ("opt-post-norm", Mesh.of_widths((1, 3)), {}),
        ("qwen2", Mesh.of_widths((3, 1, 2)), {}),
        ("qwen1", Mesh(pp=2, tp=2), {}),
        ("gpt2", Mesh(pp=2, tp=2), {"tensor_weights": ((1.0, 2.0), (3.0, 1.0))}),
    ],
    ids=lambda value: str(value) if not isinstance(value, Mesh) else "+".join(map(str, value.widths)),
)
def test_stages_and_tensor_ranks_together(family: str, mesh: Mesh, options: dict[str, Any]) -> None:
    check(tiny_checkpoint(family), mesh, **options)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_checkpoint(
        "llama", hidden_size=64, num_attention_heads=8, num_key_value_heads=2, head_dim=12, intermediate_size=96
    )
    return to_gguf(folder, "Q8_0", tmp_path_factory.mktemp("gguf"))[0]


class TestQuantised:
    """Blocks of 32 along rows: heads of 12 cut them in the output matrix, and so does a width of 3 blocks on 4 ranks.
    Every rank's numbers are those of the whole matrix, to the last bit, since whole blocks are read."""

    @pytest.mark.parametrize(
        ("mesh", "inner"),
        [(Mesh(tp=2), (64, 32)), (Mesh(tp=3), (32, 32, 32)), (Mesh(tp=4), None), (Mesh.of_widths((3, 2)), None)],
        ids=["2", "3", "4", "3+2"],
    )
    def test_output_and_weights(self, quantised: Path, mesh: Mesh, inner: tuple[int, ...] | None) -> None:
        outcomes = check(quantised, mesh, scheme=Unquantized())
        alone = decoder_of(quantised, scheme=Unquantized())
        whole = {slot.name: slot.target for module in alone.loadables() for slot in module.slots()}
        cut = 0
        for outcome in outcomes:
            for name, part, rows, columns in shards(outcome.decoder):
                expected = whole[name][slice(*rows)]
                expected = expected if columns is None else expected[:, slice(*columns)]
                assert torch.equal(part, expected), name
                cut += columns is not None and any(c % 32 for c in columns)
        assert cut > 0, "no block was cut"
        if inner is not None:
            widths = [o.decoder.split.inner(o.decoder.spec.layers[0]).lengths for o in outcomes]
            assert sorted(widths[0]) == sorted(inner) and len(set(widths)) == 1


def shards(decoder: Decoder):
    for module in decoder.loadables():
        for slot in module.slots():
            yield slot.name, slot.target, slot.rows, slot.columns


def test_bfloat16_ranks_stay_near_one_rank() -> None:
    """No equal tokens are promised in bf16; ranks agree among themselves, and numbers stay within its rounding."""
    path = tiny_checkpoint("llama")
    driver = Driver(decoder_of(path, dtype=torch.bfloat16))
    logits = driver.prefill(driver.stream(IDS))
    exact = alone(path)[0]
    noise = (logits - exact).abs().max()
    for mesh in (Mesh(tp=2), Mesh.of_widths((2, 1))):
        outcomes = [o for o in split_outcomes(path, mesh, IDS, [5, 6, 7], dtype=torch.bfloat16) if o.tokens]
        for outcome in outcomes:
            assert outcome.logits is not None and (outcome.logits - exact).abs().max() < 3 * noise
            assert outcome.tokens == outcomes[0].tokens and len(outcome.tokens) == 4

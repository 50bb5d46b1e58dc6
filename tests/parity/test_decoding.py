"""Steps of one token each, with those proposed behind it, are computed from the table of requests to the tokens in
native calls, and give what they give when each part is called: the same results, and the same table behind them."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from phalanx.kernels.library import native
from phalanx.models import decoding
from phalanx.quantization.base import choose_scheme
from phalanx.sampling.sampler import NO_SCORES
from phalanx.step import ON_DEVICE, RowFailure, SamplingState
from tests.helpers.both_runners import WAYS, Both
from tests.helpers.decoders import decoder_of
from tests.helpers.plans import Run, admission, answer, plan
from tests.helpers.tiny_gguf import to_gguf
from tests.helpers.tiny_models import FAMILIES, tiny_checkpoint

if native() is None:
    pytest.skip("the native library was not built", allow_module_level=True)

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
ALONE = {"llama", "llama-biased", "mistral", "phi3", "qwen2", "qwen3"}
"""Families with nothing between the tables and the blocks, and one class of prompts."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, dtype: torch.dtype) -> None:
    both = Both(*(decoder_of(tiny_checkpoint(family), dtype=dtype) for _ in range(2)))
    both.begin()
    steps = both.decode(12) + both.speculate()
    assert both.natively == (len(steps) if family in ALONE else 0)


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 256, "head_dim": 32}
    path = tiny_checkpoint("llama", **sizes, intermediate_size=512)
    return to_gguf(path, "F32", tmp_path_factory.mktemp("gguf"), lambda name: "Q6_K" if "embd" in name else "Q4_K")[0]


@pytest.mark.parametrize("name", ["gguf", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantized(blocks: Path, name: str, dtype: torch.dtype) -> None:
    both = Both(*(decoder_of(blocks, dtype=dtype, scheme=choose_scheme(name, dtype, CPU)) for _ in range(2)))
    both.begin()
    steps = both.decode(12) + both.speculate()
    assert both.natively == len(steps)


@pytest.fixture
def llamas() -> Both:
    both = Both(*(decoder_of(tiny_checkpoint("llama")) for _ in range(2)))
    both.begin()
    return both


def test_a_row_without_scores_fails_alone(llamas: Both) -> None:
    for runner in llamas.runners:
        for cache in runner.pool.caches:
            cache.key[0].fill_(torch.nan)  # of slot 2
    result = llamas.run(plan([Run(slot, 1, ON_DEVICE) for slot in (0, 2)], step=7))
    assert result.failures == [RowFailure(2, NO_SCORES)] and np.frombuffer(result.slots, "<u2").tolist() == [0]
    assert llamas.natively == 1
    assert llamas.runners[0].table.sampled[2] == llamas.runners[1].table.sampled[2] < 0


ASKING = [
    SamplingState(temperature=0.0, logprobs=0), SamplingState(temperature=0.0, logit_bias={3: 1.0}),
    SamplingState(temperature=0.0, presence_penalty=1.0),
    SamplingState(temperature=0.0, min_tokens=3, stop_token_ids=bytes(4)),
]  # fmt: skip


@pytest.mark.parametrize("sampling", ASKING, ids=range(4))
def test_a_row_that_asks_for_more_is_computed_part_by_part(llamas: Both, sampling: SamplingState) -> None:
    llamas.run(plan([Run(1, 3)], admit=[admission(1, [4, 5, 6], [30], sampling=sampling)]))
    llamas.run(plan([Run(slot, 1, ON_DEVICE) for slot in (0, 1)]))
    assert llamas.natively == 0
    llamas.run(plan([Run(0, 1, ON_DEVICE)], step=1))
    assert llamas.natively == 1


def test_other_steps_are_computed_part_by_part(llamas: Both) -> None:
    allowed = np.zeros(llamas.runners[0].table.vocab_size, np.bool_)
    allowed[5:9] = True
    llamas.run(plan([Run(0, 1, ON_DEVICE, allowed=allowed)]))
    llamas.run(plan([Run(3, 1, ON_DEVICE)], release=[0]))
    llamas.run(plan([Run(0, 2)], admit=[admission(0, [4, 5, 6], [31])]))
    llamas.run(plan([Run(3, 1, ON_DEVICE), Run(0, 1)], step=3))  # a prompt's last token
    assert llamas.natively == 1


def test_many_rows_are_computed_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "MOST_ROWS", 2)
    llamas = Both(*(decoder_of(tiny_checkpoint("llama")) for _ in range(2)))
    llamas.begin()
    llamas.run(plan([Run(slot, 1, ON_DEVICE) for slot in WAYS]))
    llamas.run(plan([Run(0, 1, 5, (13,), proposed=(7, 7))], step=1))
    assert llamas.natively == 0
    llamas.run(plan([Run(0, 1, 5, proposed=(7,))], step=2))
    assert llamas.natively == 1


VOCAB = 307
UNFIT = {
    "a block that does not exist": Run(0, 1, ON_DEVICE, (99,)),
    "an accepted token before the others are computed": Run(3, 1, 5, accepted=(4,)),
    "more accepted tokens than blocks": Run(0, 1, 5, (13,), accepted=(4,) * 4),
    "an accepted token that does not exist": Run(0, 1, 5, accepted=(VOCAB,)),
    "more proposed tokens than blocks": Run(0, 1, ON_DEVICE, proposed=(4,) * 3),
    "a proposed token that does not exist": Run(0, 1, ON_DEVICE, proposed=(4, VOCAB)),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_row_that_does_not_fit_fails_alone(llamas: Both, name: str) -> None:
    if UNFIT[name].slot == 3:
        llamas.run(plan(release=[3]))
        llamas.run(plan([Run(3, 3)], admit=[admission(3, [4, 5, 6, 7], [30, 31])]))
    result = llamas.run(plan([UNFIT[name], Run(2, 1, ON_DEVICE)]))
    assert [failure.slot for failure in result.failures] == [UNFIT[name].slot] and llamas.natively == 0


def test_a_place_without_scores_ends_what_stands(llamas: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    llamas.decode(3)
    tokens = llamas.runners[1].table.produced(0).tolist()
    llamas.run(plan(release=WAYS))
    llamas.begin()
    steps, twin = llamas.runners[0]._decoding, llamas.runners[1].decoder
    layers, logits, blocks = len(twin.blocks), twin.logits, itertools.count()

    def without_scores(hidden: torch.Tensor) -> torch.Tensor:
        hidden[1:] = torch.nan
        return logits(hidden)

    def beat() -> None:
        if next(blocks) == layers:  # what is left is norm and head
            steps._stream[1:] = torch.nan  # type: ignore[union-attr]

    monkeypatch.setattr(decoding, "together", lambda tokens: 1)
    monkeypatch.setattr(steps, "_pulse", SimpleNamespace(beat=beat))
    monkeypatch.setattr(twin, "logits", without_scores)
    result = llamas.run(plan([Run(0, 1, tokens[0], proposed=(tokens[1], tokens[2]))]))
    assert answer(result).chains == {0: [tokens[1]]} and not result.failures and llamas.natively == 4


def test_a_row_without_scores_fails_with_what_is_proposed(llamas: Both) -> None:
    for runner in llamas.runners:
        for cache in runner.pool.caches:
            cache.key[0].fill_(torch.nan)  # of slot 2
    result = llamas.run(plan([Run(2, 1, 7, (2,), proposed=(5,)), Run(0, 1, 7, proposed=(5,))], step=7))
    assert result.failures == [RowFailure(2, NO_SCORES)] and set(answer(result).chains) == {0}
    assert llamas.natively == 1

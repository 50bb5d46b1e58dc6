"""Sampling kernels against their twins, row by row and in batches."""

import numpy as np
import pytest
import torch

from phalanx.kernels import sampling as kernels
from phalanx.kernels.sampling import Draws, choose, first_candidates, logprobs, row_keys
from phalanx.sampling import random
from phalanx.sampling.logprobs import token_logprobs
from phalanx.sampling.order import _by_torch
from phalanx.sampling.parameters import SamplingTable
from phalanx.sampling.sampler import SamplingBatch, draw
from phalanx.step import unpack

pytestmark = pytest.mark.usefixtures("instruction_set", "threads")

VOCABULARIES = [1, 15, 16, 33, 701, 3000, 9001]
# Of equal logits no whole number is such a part, so that rounding does not decide where a nucleus ends.
LIMITS = [
    {}, {"top_k": 5}, {"top_p": 0.9137}, {"min_p": 0.1}, {"top_p": 0.99937}, {"top_k": 2500, "top_p": 0.79371},
    {"top_k": 40, "top_p": 0.51937, "min_p": 0.01},
]  # fmt: skip


def hard_logits(rows: int, vocab: int) -> torch.Tensor:
    """Flat, peaked, rounded so that many are equal, with forbidden tokens, huge and tiny numbers; one is finite."""
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 1, (rows, vocab)) * rng.choice([0, 0.1, 1, 5, 100, 1e6, 1e-40], (rows, 1))
    logits[rng.random((rows, vocab)) < rng.choice([0, 0.5, 0.99], (rows, 1))] = -np.inf
    logits[:, vocab // 2] = np.where(np.isfinite(logits[:, vocab // 2]), logits[:, vocab // 2], 0)
    logits[0, 0], logits[0, -1] = -3e38, 3e38
    tensor = torch.from_numpy(logits.astype(np.float32))
    tensor[1::2] = tensor[1::2].bfloat16().float()
    return tensor


def draws_of(rows: int, **columns) -> Draws:
    seeds = np.arange(rows, dtype=np.uint64)
    keys = random.row_keys(seeds, np.zeros(rows, np.int64), np.full(rows, 9))
    kinds = {"temperature": np.float64, "top_k": np.int64, "top_p": np.float64, "min_p": np.float64}
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | columns
    return Draws(*(np.full(rows, defaults[name], kind) for name, kind in kinds.items()), keys)


def twin(logits: torch.Tensor, draws: Draws, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    rows, vocab = logits.shape
    table = SamplingTable(rows, vocab)
    for name in ("temperature", "top_k", "top_p", "min_p"):
        getattr(table, name)[:] = getattr(draws, name)
    table.seed[:] = np.arange(rows)
    batch = SamplingBatch(np.arange(rows), np.full(rows, 9), np.zeros(rows, np.int64), lambda row: None)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "native", lambda: None)
        return draw(logits, table, batch, np.arange(rows)).tolist()


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_largest(vocab):
    logits = hard_logits(40, vocab)
    odd = torch.zeros(4, vocab)
    odd[0, -1], odd[1], odd[2, vocab // 3], odd[3] = float("nan"), float("-inf"), float("inf"), -0.0
    odd[0, vocab // 2] = float("nan")
    for rows in (logits, odd):
        best, first = rows.max(-1)
        tokens, largest = choose(rows, None, first=7)
        assert np.array_equal(largest, best.numpy(), equal_nan=True)
        assert tokens.tolist() == torch.where(best.isfinite(), first + 7, -1).tolist()
    assert choose(logits[:0], None)[0].tolist() == []


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("temperature", [1e-5, 0.7, 1e30, 1e300])
@pytest.mark.parametrize("limits", LIMITS, ids=lambda limits: "-".join(limits))
def test_draws(vocab, temperature, limits, monkeypatch):
    logits = hard_logits(40, vocab)
    draws = draws_of(40, temperature=temperature, **limits)
    tokens, largest = choose(logits, draws)
    assert tokens.tolist() == twin(logits, draws, monkeypatch)
    assert np.array_equal(largest, logits.amax(-1).numpy())
    for i in (0, 7, 39):
        own = Draws(*(getattr(draws, name)[i : i + 1] for name in Draws.__slots__))
        assert choose(logits[i : i + 1], own)[0][0] == tokens[i], "a row's token depends on no other row"


def test_rows_that_are_not_numbers_have_no_token():
    logits = torch.zeros(4, 300)
    logits[0, 7], logits[1, 7], logits[2] = float("nan"), float("inf"), float("-inf")
    for limits in ({}, {"top_p": 0.5}):
        assert (choose(logits, draws_of(4, **limits))[0] >= 0).tolist() == [False, False, False, True]


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_candidates(vocab):
    logits = hard_logits(12, vocab)
    for count in {0, 1, min(7, vocab), vocab // 2, vocab}:
        assert torch.equal(first_candidates(logits, count), _by_torch(logits, count))


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_logprobs(vocab, monkeypatch):
    logits = hard_logits(12, vocab)[1:].nan_to_num(neginf=-50.0)
    tokens = np.random.default_rng(0).integers(0, vocab, 11)
    count = min(5, vocab)
    found = logprobs(logits, tokens, count)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "native", lambda: None)
        entries = token_logprobs(logits, tokens, np.full(11, count))
    for i, entry in enumerate(entries):
        assert found.own[i] == pytest.approx(entry.logprob, abs=1e-5, rel=1e-6)
        assert found.ranks[i] == entry.rank and found.top_ids[i].tolist() == list(unpack(entry.top_ids))
        assert np.allclose(found.top[i], unpack(entry.top_logprobs, "f"), atol=1e-5)


def test_row_keys():
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**64, 50, dtype=np.uint64)
    choices, positions = rng.integers(0, 99, 50), rng.integers(0, 10**6, 50)
    keys = row_keys(seeds, choices, positions, 3)
    assert keys.tolist() == random.row_keys(seeds, choices, positions, 3).tolist()


def test_what_does_not_fit_is_refused():
    logits, draws = torch.zeros(4, 10), draws_of(4)
    for wrong in (logits.double(), torch.zeros(10, 4).T, torch.zeros(4, 0)):
        with pytest.raises(ValueError, match="contiguous"):
            choose(wrong, None)
    draws.top_k = draws.top_k[:3]
    with pytest.raises(ValueError, match="4 numbers of type int64"):
        choose(logits, draws)
    with pytest.raises(ValueError, match="11 candidates"):
        first_candidates(logits, 11)
    for tokens in (np.array([0, 0, 0, 10]), np.array([0, 0, 0, -1]), np.array([0])):
        with pytest.raises(ValueError, match="outside a vocabulary"):
            logprobs(logits, tokens, 2)

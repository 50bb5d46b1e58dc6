"""Sampling kernels against their twins, row by row and in batches."""

import numpy as np
import pytest
import torch

from phalanx.distributed.collectives import SingleGroup
from phalanx.distributed.partition import Partition
from phalanx.kernels import sampling as kernels
from phalanx.kernels.sampling import (
    Draws,
    choose,
    choose_told,
    first_candidates,
    logprobs,
    row_keys,
    tell_candidates,
)
from phalanx.sampling import random
from phalanx.sampling.logprobs import token_logprobs
from phalanx.sampling.order import _by_torch
from phalanx.sampling.parameters import SamplingTable
from phalanx.sampling.sampler import SamplingBatch, draw
from phalanx.sampling.split_vocabulary import SplitSampler
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


def split_of(vocab: int, cut: Partition | None = None) -> SplitSampler:
    return SplitSampler(SingleGroup(), cut or Partition.whole(vocab))


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("temperature", [1e-5, 0.7, 1e30, 1e300])
def test_what_a_part_tells(vocab, temperature, monkeypatch):
    """Also where it has nothing to choose, and less than it is to tell."""
    logits, first = hard_logits(20, vocab), 40
    logits[3] = float("-inf")
    best = logits.amax(-1)
    table, batch = SamplingTable(20, vocab), SamplingBatch(np.arange(20), np.zeros(20), np.zeros(20), lambda row: None)
    table.temperature[:] = temperature
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "native", lambda: None)
        twin_sums = split_of(vocab)._draw_message(logits, best, table, batch, np.arange(20), 1)[0]
    for count in (1, 7, 128, 5000):
        words = tell_candidates(logits, best.numpy(), np.full(20, temperature), count, first)
        sums, told, have = words[:20].view(np.float32), words[20:].reshape(2, 20, count), min(count, vocab)
        columns = _by_torch(logits, have)
        assert told[0, :, :have].tolist() == (columns + first).tolist() and (told[0, :, have:] == -1).all()
        values = told[1].view(np.float32)
        assert np.array_equal(values[:, :have], logits.gather(-1, columns)) and np.isnan(values[:, have:]).all()
        assert sums[3] == -np.inf and np.allclose(sums, twin_sums.view(torch.float32), rtol=1e-6, atol=1e-6)
        one = tell_candidates(logits[7:8], best[7:8].numpy(), np.full(1, temperature), count, first)
        assert np.array_equal(one[1:].reshape(2, count), told[:, 7]) and one[0] == words[7]


TOLD_LIMITS = [
    *LIMITS, {"top_k": 1}, {"top_k": 10**6, "top_p": 0.8713}, {"top_p": 0.0}, {"top_p": 1e-9}, {"min_p": 1.0},
    {"min_p": 1e-9, "top_p": 0.9713},
]  # fmt: skip


@pytest.mark.parametrize("lengths", [(701,), (350, 351), (1, 699, 1), (5, 90, 3, 30)], ids=str)
@pytest.mark.parametrize("temperature", [1e-5, 0.7, 1e300])
def test_what_is_drawn_of_what_parts_tell(lengths, temperature):
    stops = np.cumsum(lengths)
    vocab = int(stops[-1])
    ranges = tuple((int(stop) - n, int(stop)) for n, stop in zip(lengths, stops, strict=True))
    logits, one, decided = hard_logits(40, vocab), np.full(40, temperature), set()
    logits[5], logits[6], logits[7] = 0.0, float("-inf"), torch.where(torch.arange(vocab) % 2 > 0, 0.0, -0.0)
    logits[6, -1] = 1.0
    best = logits.amax(-1).numpy()
    log_sum = (logits.double() - logits.amax(-1, keepdim=True)).div(temperature).logsumexp(-1).numpy()
    for count in (3, min(128, max(lengths))):
        parts = [
            tell_candidates(logits[:, start:stop].contiguous(), best, one, count, start)[40:].reshape(2, 40, count)
            for start, stop in ranges
        ]
        told = np.stack(parts, 1)
        split, whole = split_of(vocab, Partition(vocab, ranges)), count == max(lengths)
        for limits in TOLD_LIMITS:
            draws = draws_of(40, temperature=temperature, **limits)
            tokens = choose_told(
                told[0], told[1].view(np.float32), log_sum, draws, vocab if whole else count, whole=whole
            )
            with np.errstate(over="ignore"):
                twins = split._choose_told(told[0], told[1].view(np.float32), log_sum, draws)
            assert tokens is not None and tokens.tolist() == twins.tolist(), limits
            known = tokens >= 0
            if "top_p" not in limits or limits["top_p"]:
                assert np.array_equal(tokens[known], choose(logits, draws)[0][known]) and (known.all() or not whole)
            decided |= set(known.tolist())
    assert decided == {False, True}


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
    with pytest.raises(ValueError, match="0 candidates"):
        tell_candidates(logits, np.zeros(4, np.float32), np.ones(4), 0, 0)
    told = np.zeros((2, 4, 3), np.int32)
    with pytest.raises(ValueError, match="24 numbers of type int32"):
        choose_told(
            told.transpose(1, 0, 2).copy().transpose(1, 0, 2),
            told.view(np.float32),
            np.zeros(4),
            draws_of(4),
            3,
            whole=False,
        )
    with pytest.raises(ValueError, match="no candidates"):
        choose_told(told, told.view(np.float32), np.zeros(4), draws_of(4), 0, whole=False)

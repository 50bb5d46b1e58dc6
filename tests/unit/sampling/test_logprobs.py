"""Log-probabilities: of the model's own logits, whatever the request does to them before the draw."""

import numpy as np
import pytest
import torch

from phalanx.sampling.logprobs import token_logprobs
from phalanx.step import SamplingState, pack, unpack
from tests.helpers.sampling import Row, sample_rows


def values(seed: int, vocab: int = 500) -> np.ndarray:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)).mul(3).bfloat16().float().numpy()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    return wide - np.log(np.exp(wide - wide.max()).sum()) - wide.max()


@pytest.mark.parametrize("num_top", [0, 1, 5, 20, 1000])
def test_values_ranks_and_alternatives(num_top):
    rows = np.stack([values(seed) for seed in range(5)])
    tokens = np.array([0, 499, int(rows[2].argmax()), 17, 250])
    entries = token_logprobs(torch.from_numpy(rows), tokens, np.full(5, num_top))
    for logits, token, entry in zip(rows, tokens.tolist(), entries, strict=True):
        want = log_softmax(logits)
        order = np.argsort(-logits, kind="stable")
        assert entry.logprob == pytest.approx(want[token], abs=1e-5)
        assert entry.rank == order.tolist().index(token) + 1
        assert list(unpack(entry.top_ids)) == order[:num_top].tolist()
        assert np.allclose(unpack(entry.top_logprobs, "f"), want[order[:num_top]], atol=1e-5)


def test_rows_may_ask_for_different_numbers():
    rows = torch.from_numpy(np.stack([values(1), values(1)]))
    few, many = token_logprobs(rows, np.array([3, 3]), np.array([1, 4]))
    assert (len(unpack(few.top_ids)), len(unpack(many.top_ids))) == (1, 4)
    assert few.logprob == many.logprob


def test_they_ignore_temperature_penalties_bias_and_masks():
    logits = values(2)
    plain = Row(logits, SamplingState(temperature=0.0, logprobs=3), output=(1, 2))
    allowed = np.zeros(500, bool)
    allowed[[7, 9]] = True
    changed = Row(
        logits,
        SamplingState(
            temperature=0.5,
            presence_penalty=1.5,
            logit_bias={7: 3.0},
            logprobs=3,
            min_tokens=5,
            stop_token_ids=pack([int(logits.argmax())]),
        ),
        output=(1, 2),
        allowed_by_grammar=allowed,
    )
    got = sample_rows([plain, changed])
    assert got.tokens[1] in (7, 9)
    want = log_softmax(logits)
    assert got.logprobs[0].top_ids == got.logprobs[1].top_ids
    assert got.logprobs[1].logprob == pytest.approx(want[got.tokens[1]], abs=1e-5)
    assert got.logprobs[0].rank == 1


def test_they_do_not_depend_on_the_batch():
    rows = [Row(values(seed), SamplingState(seed=seed, logprobs=4)) for seed in range(40)]
    together = sample_rows(rows)
    for i, row in enumerate(rows):
        assert sample_rows([row]).logprobs[0] == together.logprobs[i]


def test_only_rows_that_asked_get_any():
    rows = [Row(values(1), SamplingState(logprobs=n)) for n in (-1, 0, 2)]
    assert sorted(sample_rows(rows).logprobs) == [1, 2]

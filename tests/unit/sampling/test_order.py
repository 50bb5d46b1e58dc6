"""One order for all: falling logit, ties by token id."""

import numpy as np
import pytest
import torch

from phalanx.sampling.order import _by_torch, first_candidates


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 7, 128, 1000])
def test_equals_a_full_stable_sort(dtype, k):
    torch.manual_seed(k)
    logits = (torch.randn(6, 1000) * 3).to(dtype).float()  # bfloat16 leaves many equal values
    logits[1, ::3] = float("-inf")
    logits[2] = 0.0
    logits[3, ::2] = -0.0
    logits[3, 1::2] = 0.0
    logits[4] = torch.randn(1000).sign() * 1e-40
    want = np.argsort(-logits.numpy(), axis=-1, kind="stable")[:, :k]
    assert np.array_equal(first_candidates(logits, k).numpy(), want)
    assert np.array_equal(_by_torch(logits, k).numpy(), want)  # what other devices use


def test_infinities_and_extremes_sort_as_numbers():
    logits = torch.tensor([[0.0, float("inf"), -1e38, float("-inf"), 1e38, -0.0]])
    assert first_candidates(logits, 6).tolist() == [[1, 4, 0, 5, 2, 3]]

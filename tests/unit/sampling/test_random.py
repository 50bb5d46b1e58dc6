"""The counter-based generator: exact, spread evenly, and free of the seams that related inputs could show."""

import numpy as np
import pytest
import torch

from phalanx.sampling.random import exponentials, row_keys, token_words, token_words_on
from tests.helpers.sampling import reference_key, reference_word

KEYS = ["0x2130748aaac80268", "0x2e5473ebb76a69b4", "0x64d90d56171a3766"]
WORDS = ["0x81fb5e28", "0x7eb3d3f0", "0xd413db7f"]


def test_equals_plain_integer_arithmetic():
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**64, 200, dtype=np.uint64)
    choices, positions = rng.integers(0, 128, 200), rng.integers(0, 10**6, 200)
    keys = row_keys(seeds, choices, positions)
    want = [reference_key(int(s), int(c), int(p)) for s, c, p in zip(seeds, choices, positions, strict=True)]
    assert keys.tolist() == want
    tokens = rng.integers(0, 2**18, 50)
    words = [[reference_word(key, int(token)) for token in tokens] for key in want]
    assert token_words(keys[:, None], tokens).tolist() == words
    on_device = token_words_on(keys, torch.from_numpy(tokens.astype(np.int32)))
    assert (on_device.to(torch.int64) & 0xFFFFFFFF).tolist() == words


def test_known_values_do_not_change():
    """A stored conversation replayed by a later version must draw the same numbers."""
    got = row_keys(np.array([0, 1, 2**64 - 1], np.uint64), np.array([0, 0, 7]), np.array([0, 5, 131071]))
    assert [hex(int(x)) for x in got] == KEYS
    assert [hex(int(x)) for x in token_words(got, np.array([0, 1, 262143]))] == WORDS


def is_uniform(words: np.ndarray) -> None:
    counts = np.bincount((words * (100 / 2**32)).astype(int), minlength=100)
    chi_square = ((counts - len(words) / 100) ** 2 / (len(words) / 100)).sum()
    assert chi_square < 160  # 99 degrees of freedom: 1 in 10,000 is above 160
    assert abs(np.corrcoef(words[:-1], words[1:])[0, 1]) < 0.02


@pytest.mark.parametrize("varied", ["seed", "choice", "position", "token"])
def test_uniform_and_uncorrelated_along_each_input(varied):
    n = 40_000
    fixed = {
        name: np.full(n, value) for name, value in (("seed", 12345), ("choice", 0), ("position", 17), ("token", 5))
    }
    fixed[varied] = np.arange(n)
    keys = row_keys(fixed["seed"], fixed["choice"], fixed["position"])
    assert len(np.unique(keys)) == (1 if varied == "token" else n)
    is_uniform(token_words(keys, fixed["token"]))


def test_keys_that_share_a_half_give_unrelated_numbers():
    tokens = np.arange(40_000)
    for keys in ((5, 5 + 2**32), (5, 6), (2**63, 2**31)):
        first, second = (token_words(np.full(1, key, np.uint64), tokens).astype(float) for key in keys)
        is_uniform(first)
        assert abs(np.corrcoef(first, second)[0, 1]) < 0.02
        assert (first == second).sum() <= 2


def test_purposes_are_independent():
    positions = np.arange(1000)
    zeros = np.zeros(1000, np.int64)
    first, second = (token_words(row_keys(zeros, zeros, positions, purpose), zeros) for purpose in (0, 1))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.1
    assert not np.any(first == second)


def test_exponentials_have_their_distribution():
    numbers = np.sort(exponentials(row_keys(np.arange(50_000), np.zeros(1), np.zeros(1)), np.zeros(1, np.int64)))
    assert numbers[0] > 2.0**-34 and numbers[-1] < 23
    distance = np.abs(1 - np.exp(-numbers) - (np.arange(50_000) + 0.5) / 50_000).max()
    assert distance < 2.2 / 50_000**0.5  # Kolmogorov-Smirnov: 1 in 10,000 is above 2.2

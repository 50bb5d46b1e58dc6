"""The sampler against a plain second implementation, and what it promises of rows in a batch."""

import dataclasses

import msgspec
import numpy as np
import pytest
import torch

from phalanx.sampling.sampler import NO_CANDIDATE, NO_SCORES
from phalanx.step import NO_TOKEN, SamplingState, pack
from tests.helpers.sampling import Row, reference_token, sample_rows

VOCAB = 600


def logits(seed: int, *, vocab: int = VOCAB, spread: float = 3.0, coarse: bool = False) -> np.ndarray:
    values = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread
    return (values.bfloat16().float() if coarse else values).numpy()


def state(**changes) -> SamplingState:
    return SamplingState(**changes)


def random_row(rng: np.random.Generator, vocab: int = VOCAB) -> Row:
    """Any mix of features."""

    def maybe(value, default, chance=0.4):
        return value if rng.random() < chance else default

    def ids(n):
        return [int(t) for t in rng.integers(0, vocab, n)]

    prompt, output = tuple(ids(rng.integers(1, 30))), tuple(ids(rng.integers(0, 20)))
    grammar = rng.random(vocab) < 0.3
    grammar[int(rng.integers(vocab))] = True
    bad_words = (tuple(output[-2:]) + tuple(ids(1)), tuple(ids(1)), tuple(ids(3)))
    return Row(
        logits=logits(
            int(rng.integers(2**31)), vocab=vocab, spread=float(rng.uniform(0.1, 6)), coarse=rng.random() < 0.5
        ),
        state=SamplingState(
            temperature=float(rng.choice([0.0, 0.3, 0.7, 1.0, 2.0])),
            top_k=maybe(int(rng.choice([1, 5, 50, 300, 10_000])), 0),
            top_p=maybe(float(rng.uniform(0.05, 1.0)), 1.0),
            min_p=maybe(float(rng.choice([0.001, 0.05, 0.5, 1.0])), 0.0, 0.3),
            presence_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
            frequency_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
            repetition_penalty=maybe(float(rng.uniform(0.5, 2)), 1.0),
            seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
            choice=int(rng.integers(0, 4)),
            logit_bias=maybe({t: float(rng.uniform(-5, 5)) for t in ids(5)}, {}),
            allowed_token_ids=maybe(pack(np.flatnonzero(grammar).tolist() + ids(40)), b"", 0.2),
            bad_words=maybe(bad_words, ()),
            min_tokens=maybe(int(rng.integers(0, 30)), 0),
            stop_token_ids=maybe(pack(ids(5)), b""),
        ),
        prompt=prompt,
        output=output,
        allowed_by_grammar=maybe(grammar, None, 0.3),
    )


@pytest.mark.parametrize("seed", range(6))
def test_equals_the_plain_implementation_in_mixed_batches(seed):
    rng = np.random.default_rng(seed)
    rows = [random_row(rng) for _ in range(60)]
    got = sample_rows(rows)
    assert not got.failures
    assert got.tokens.tolist() == [reference_token(row) for row in rows]


@pytest.mark.parametrize("vocab", [5000, 33, 32, 1])
def test_equals_the_plain_implementation_for_other_vocabularies(vocab):
    """5,000 tokens need all three widths of the search for a nucleus; the others are at the edges of a mask word."""
    rng = np.random.default_rng(vocab)
    rows = [random_row(rng, vocab) for _ in range(40)]
    for row in rows[::2]:
        row.state = msgspec.structs.replace(row.state, temperature=2.0, top_p=0.999, min_p=0.0)
    assert sample_rows(rows).tokens.tolist() == [reference_token(row) for row in rows]


@pytest.mark.parametrize("narrowed", [{}, {"min_p": 0.5}])
def test_a_wide_distribution_is_searched_to_its_end(narrowed):
    flat = np.zeros(5000, np.float32)
    rows = [Row(flat, state(seed=seed, **narrowed)) for seed in range(80)]
    got = sample_rows(rows).tokens
    assert got.tolist() == [reference_token(row) for row in rows]
    assert (got >= 2048).sum() > 20 and (got < 128).sum() > 0


def test_same_token_alone_and_in_any_batch():
    rng = np.random.default_rng(11)
    rows = [random_row(rng, 4000) for _ in range(50)]
    alone = [sample_rows([row], [slot]).tokens[0] for slot, row in enumerate(rows)]
    together = sample_rows(rows).tokens
    assert together.tolist() == alone
    order = rng.permutation(50)
    shuffled = sample_rows([rows[i] for i in order], [int(s) for s in rng.permutation(50)])
    assert shuffled.tokens.tolist() == [alone[i] for i in order]


def test_the_draw_depends_on_seed_choice_and_position_only():
    base = Row(np.zeros(VOCAB, np.float32), state(seed=5, choice=1), prompt=(1, 2, 3), output=(4,))
    token = sample_rows([base]).tokens[0]
    same = dataclasses.replace(base, prompt=(9, 9), output=(8, 7))  # other tokens, same position
    assert sample_rows([same]).tokens[0] == token
    others = [
        dataclasses.replace(base, state=state(seed=6, choice=1)),
        dataclasses.replace(base, state=state(seed=5, choice=2)),
        dataclasses.replace(base, output=(4, 4)),
    ]
    assert all(sample_rows([row]).tokens[0] != token for row in others)


def test_leaving_tokens_out_changes_only_draws_of_those():
    """Every token has its own random number, whatever else is kept."""
    rows = [Row(logits(seed), state(seed=seed)) for seed in range(300)]
    free = sample_rows(rows).tokens
    for changes in ({"top_k": 20}, {"top_p": 0.7}, {"min_p": 0.1}):
        narrow = sample_rows([Row(row.logits, state(seed=seed, **changes)) for seed, row in enumerate(rows)]).tokens
        kept = [
            reference_token(Row(np.where(np.arange(VOCAB) == token, row.logits, -np.inf), row.state)) == token
            for token, row in zip(free, rows, strict=True)
        ]
        assert all(kept) and 100 < (narrow == free).sum() < 300


def test_greedy_ties_go_to_the_lowest_id():
    values = np.full(VOCAB, -1.0, np.float32)
    values[[40, 7, 599]] = 3.0
    for many in (1, 3, 130):
        assert set(sample_rows([Row(values, state(temperature=0.0))] * many).tokens.tolist()) == {7}
    assert sample_rows([Row(values, state(temperature=1.0, top_k=1))]).tokens[0] == 7
    assert sample_rows([Row(values, state(temperature=1e-6, seed=1))]).tokens[0] == 7


def test_a_tiny_temperature_is_not_a_division_by_zero():
    rows = [Row(logits(1, spread=50), state(temperature=t, seed=3)) for t in (1e-5, 1e-4, 1e-45, 1e30)]
    rows.append(Row(logits(1), state(temperature=1e300, allowed_token_ids=pack([4, 5]))))
    rows.append(Row(logits(1), state(temperature=1e300, allowed_token_ids=pack([4, 5]), top_p=0.9)))
    got = sample_rows(rows)
    assert not got.failures and set(got.tokens[4:].tolist()) <= {4, 5}
    assert got.tokens[:3].tolist() == [int(rows[0].logits.argmax())] * 3


def test_min_tokens_masks_stop_ids_until_they_are_reached():
    values = logits(2)
    stop = int(values.argmax())
    limits = state(temperature=0.0, min_tokens=3, stop_token_ids=pack([stop]))
    rows = [Row(values, limits, output=(1,) * n) for n in range(5)]
    assert [t == stop for t in sample_rows(rows).tokens.tolist()] == [False, False, False, True, True]


def test_bad_words_need_their_beginning():
    values = logits(3)
    best = int(values.argmax())
    words = state(temperature=0.0, bad_words=((5, 6, best), (), (best, best)))
    forbidden = [(5, 6), (1, 5, 6), (best,)]
    free = [(), (6,), (5,), (5, 6, 1), (6, 5)]
    rows = [Row(values, words, prompt=(5, 6), output=output) for output in forbidden + free]
    assert [t != best for t in sample_rows(rows).tokens.tolist()] == [True] * 3 + [False] * 5


def test_presence_and_frequency_count_output_only_and_repetition_everything():
    values = np.zeros(VOCAB, np.float32)
    values[[10, 11]] = 1.0, 0.9
    greedy = {"temperature": 0.0}
    cases = [
        (Row(values, state(**greedy, presence_penalty=0.5), prompt=(10,)), 10),
        (Row(values, state(**greedy, presence_penalty=0.5), output=(10,)), 11),
        (Row(values, state(**greedy, frequency_penalty=0.06), output=(10,)), 10),
        (Row(values, state(**greedy, frequency_penalty=0.06), output=(10, 10)), 11),
        (Row(values, state(**greedy, repetition_penalty=1.5), prompt=(10,)), 11),
        (Row(values, state(**greedy, repetition_penalty=1.5), output=(10,)), 11),
    ]
    assert sample_rows([row for row, _ in cases]).tokens.tolist() == [want for _, want in cases]


class TestFailures:
    """A row that cannot be drawn fails alone."""

    def healthy(self, seed: int) -> Row:
        return Row(logits(seed), state(seed=seed, logprobs=2, top_p=0.9))

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
    def test_scores_that_are_not_numbers(self, poison, temperature):
        bad = Row(np.full(VOCAB, poison, np.float32), state(temperature=temperature, logprobs=1))
        alone = [sample_rows([self.healthy(i)]) for i in range(2)]
        got = sample_rows([self.healthy(0), bad, self.healthy(1)])
        assert got.failures == {1: NO_SCORES}
        assert got.tokens.tolist() == [alone[0].tokens[0], NO_TOKEN, alone[1].tokens[0]]
        assert got.logprobs == {0: alone[0].logprobs[0], 2: alone[1].logprobs[0]}

    def test_one_nan_among_numbers(self):
        values = logits(4)
        values[300] = np.nan
        assert sample_rows([Row(values, state()), self.healthy(1)]).failures == {0: NO_SCORES}

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_mask_that_allows_nothing(self, temperature):
        nothing = Row(logits(5), state(temperature=temperature), allowed_by_grammar=np.zeros(VOCAB, bool))
        got = sample_rows([self.healthy(0), nothing])
        assert got.failures == {1: NO_CANDIDATE}
        assert got.tokens[1] == NO_TOKEN and got.tokens[0] == sample_rows([self.healthy(0)]).tokens[0]

    def test_constraints_that_exclude_each_other(self):
        both = Row(
            logits(6),
            state(allowed_token_ids=pack([3]), bad_words=((3,),)),
        )
        assert sample_rows([both]).failures == {0: NO_CANDIDATE}


def test_bits_beyond_the_vocabulary_do_not_matter():
    allowed = np.zeros(VOCAB, bool)
    allowed[[0, 599]] = True
    row = Row(logits(7), state(temperature=0.0), allowed_by_grammar=allowed)
    assert sample_rows([row]).tokens[0] in (0, 599)

"""What is proposed, how often, and what a proposer costs: pure, without an engine."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.engine.speculation import FIRST_CREDIT, INDEXED_AT_ONCE, LOSS, NgramIndex, Proposer, _cost
from phalanx.speculative_config import SpeculativeConfig


def proposer(most: int = 4, longest: int = 4, shortest: int = 2) -> Proposer:
    return Proposer(SpeculativeConfig("ngram", most, longest, shortest))


def answered(text: list[int], prompt: int, most: int = 4, running: int = 1) -> tuple[int, int, int]:
    """Go through `text` from its `prompt` on as an engine would: steps, tokens proposed, tokens accepted."""
    at, size, steps, proposed, accepted = proposer(most), prompt, 0, 0, 0
    while size < len(text):
        tokens = at.propose(text[:size], most, running)
        right = 0
        while right < len(tokens) and size + right < len(text) - 1 and tokens[right] == text[size + right]:
            right += 1
        if tokens:
            at.settle(len(tokens), right, running)
        steps, proposed, accepted = steps + 1, proposed + len(tokens), accepted + right
        size += right + 1
    return steps, proposed, accepted


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 3), st.integers(0, 3), st.integers(1, 7))
def test_an_index_made_step_by_step_finds_the_longest_latest_place(tokens, shortest, longer, pace):
    longest = shortest + longer
    index = NgramIndex(shortest, longest)
    for size in range(1, len(tokens) + 1):
        while not index.extend(tokens[:size], pace):
            pass
        known = tokens[:size]
        found = index.find(known)
        places = [end for end in range(shortest, size) if known[end - shortest : end] == known[size - shortest :]]
        if size < shortest or not places:
            assert found is None
            continue
        assert found in places

        def length(end, known=known):
            return max(n for n in range(1, min(longest, end) + 1) if known[end - n : end] == known[len(known) - n :])

        if len(places) <= 8:
            assert length(found) == max(map(length, places))
            assert found == max(end for end in places if length(end) == length(found))


def test_what_followed_before_is_proposed():
    text = [1, 2, 3, 4, 5, 6, 7, 9, 2, 3]
    at = proposer()
    assert at.propose(text, 10, 1) == [4, 5, 6]  # as many as the first credit pays for
    at.settle(3, 3, 1)
    assert at.propose([*text, 4, 5, 6, 7], 10, 1) == [9, 2, 3, 4]
    assert proposer().propose([1, 2, 3, 4], 10, 1) == []
    assert proposer(shortest=3).propose(text, 10, 1) == []
    assert proposer().propose(text, 2, 1) == [4, 5]
    assert proposer().propose(text, 0, 1) == []


def test_a_repetition_is_continued_beyond_its_end():
    at = proposer()
    assert at.propose([7, 8, 8, 8], 3, 1) == [8, 8, 8]
    at.settle(3, 3, 1)
    assert at.propose([7, 8, 8, 8, 9, 1, 2, 1, 2], 3, 1) == [1, 2, 1]


def test_a_source_is_followed_as_long_as_it_comes_true():
    """The end alone occurs in two places, and the later one goes on otherwise."""
    text = [1, 2, 3, 4, 5, 6, 70, 3, 4, 80, 1, 2]
    at = proposer(longest=2)
    assert at.propose(text, 2, 1) == [3, 4]
    at.settle(2, 2, 1)
    assert at.propose([*text, 3, 4, 5], 2, 1) == [6, 70]
    assert proposer(longest=2).propose([*text, 3, 4], 2, 1) == [80, 1]


def test_a_long_prompt_is_indexed_in_pieces_and_nothing_is_proposed_before():
    text = [1, 2, *range(10, 2 * INDEXED_AT_ONCE), 1, 2]
    at = proposer()
    assert at.propose(text, 4, 1) == []
    while not (proposed := at.propose(text, 4, 1)):
        assert at._index.end < len(text)
    assert proposed[:2] == [10, 11]


def test_a_copy_takes_far_fewer_steps():
    rng = random.Random(1)
    original = [rng.randrange(1000) for _ in range(400)]
    edited = [token if rng.random() > 0.02 else 5000 for token in original]
    steps, _, accepted = answered([*original, *original[:4], *edited], 404)
    assert steps < 0.45 * len(edited)
    assert accepted > 0.5 * len(edited)


@pytest.mark.parametrize("running", [1, 4, 16, 64])
@pytest.mark.parametrize("answer", [32, 128, 1000])
def test_where_nothing_comes_true_little_is_lost(running, answer):
    """Two-token ends that all occurred before, and always went on otherwise."""
    rng = random.Random(answer)
    pairs = [(a, b) for a in range(8) for b in range(8)]
    prompt = [token for a, b in pairs for token in (a, b, 1000 + rng.randrange(1000))]
    at, text, lost = proposer(), list(prompt), 0.0
    for step in range(answer):
        text.append(pairs[rng.randrange(64)][step % 2])
        tokens = at.propose(text, 4, running)
        if tokens:
            lost += _cost(len(tokens), running)
            at.settle(len(tokens), 0, running)
    assert lost > 0 or running > 1
    assert lost <= FIRST_CREDIT + LOSS * answer
    assert lost / answer < 0.03


def test_without_credit_nothing_is_done():
    text, at = [1, 2, 3, 1, 2], proposer()
    waiting, end = 0, at._index.end
    while not at.propose(text, 4, 8):
        assert at._index.end == end
        waiting += 1
    assert waiting > 3


def test_it_begins_again_when_a_text_becomes_repetitive():
    rng = random.Random(3)
    noise = [token for _ in range(40) for token in (1, 2, rng.randrange(10, 10**6))]
    steps, _, accepted = answered([*noise, *[4, 5, 6, 7, 8] * 60], 10)
    assert accepted > 150
    assert steps < len(noise) + 170


def test_many_requests_at_once_need_a_better_record():
    """Where a step is mostly rows, a token that comes true three times in four is not worth its row."""

    def proposals(running: int) -> int:
        at, text, total = proposer(), [1, 2, 3, 4] * 8, 0
        for step in range(200):
            tokens = at.propose(text, 1, running)
            total += len(tokens)
            if tokens:
                at.settle(1, step % 4 != 0, running)
        return total

    assert proposals(1) > 150
    assert proposals(64) < 10

"""Incremental text: whole characters, stop strings, and no trace of how the tokens came."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers

from phalanx.checkpoint.locate import locate
from phalanx.text import sentencepiece_model as spm
from phalanx.text.detokenizer import Detokenizer
from phalanx.text.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.text_corpus import PLAIN, random_texts, sentencepiece_model

BYTE_LEVEL = load_tokenizer(locate(None))


def _sentencepiece(style: str) -> Tokenizer:
    found = spm.read_vocabulary(sentencepiece_model(style), "tokenizer.model")
    return Tokenizer(found.backend, special_tokens=found.special_tokens, eos_token_ids=found.eos_token_ids)


LLAMA, GEMMA = _sentencepiece("llama"), _sentencepiece("gemma")
ALL = {"byte level": BYTE_LEVEL, "llama": LLAMA, "gemma": GEMMA}


def run(tokenizer: Tokenizer, ids: list[int], cuts: list[int] | None = None, **options) -> tuple[str, Detokenizer]:
    """The whole text and the detokenizer, with pushes that end at `cuts` (default: one token each)."""
    state = Detokenizer(tokenizer, **options)
    edges = range(len(ids) + 1) if cuts is None else [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    edges = list(edges)
    text = "".join(state.push(ids[a:b]) for a, b in itertools.pairwise(edges))
    return text + state.finish(), state


some_tokenizer = st.sampled_from(sorted(ALL))
some_ids = st.lists(st.integers(0, 49151), max_size=60)
some_cuts = st.lists(st.integers(0, 60), max_size=8)


@given(some_tokenizer, some_ids, some_cuts, st.booleans())
@settings(max_examples=200)
def test_any_tokens_in_any_grouping_give_the_text_of_all(name, ids, cuts, skip):
    tokenizer = ALL[name]
    ids = [i % tokenizer.size for i in ids]
    expected = tokenizer.decode(ids, skip)
    for grouping in (None, [], cuts):
        text, state = run(tokenizer, ids, grouping, skip_special_tokens=skip, prompt_token_ids=[])
        assert text == expected
        assert state.tokens_used == len(ids)


@pytest.mark.parametrize("name", sorted(ALL))
def test_text_of_real_texts_is_that_of_the_library(name):
    tokenizer = ALL[name]
    for text in PLAIN + random_texts(100, 1):
        ids = tokenizer.encode(text, add_special_tokens=False)
        if tokenizer.backend.token_to_id("<unk>") in ids:
            continue
        expected = tokenizer.backend.decode(ids, skip_special_tokens=False)
        assert run(tokenizer, ids, skip_special_tokens=False, prompt_token_ids=[])[0] == expected
        assert tokenizer.decode(ids, False) == expected


@pytest.mark.parametrize("name", sorted(ALL))
def test_no_part_of_a_character_is_ever_emitted(name):
    tokenizer = ALL[name]
    text = "a 👍🏽 世界 e\u0301 ☃️ 🇩🇪🇫🇷 नमस्ते"
    state = Detokenizer(tokenizer, skip_special_tokens=False)
    pieces = [state.push([i]) for i in tokenizer.encode(text, add_special_tokens=False)]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces).lstrip(" ") == text
    assert state.finish() == ""


def test_an_unfinished_character_comes_out_at_the_end():
    ids = BYTE_LEVEL.encode("x👍")
    state = Detokenizer(BYTE_LEVEL)
    assert state.push(ids[:-1]) == "x"
    assert state.finish() == "\ufffd"
    assert state.finish() == ""


def test_the_answer_goes_on_after_the_prompt():
    """A space at its beginning stays, unless the prompt has no text; and it may finish a character of the prompt."""
    prompt, answer = LLAMA.encode("Hello"), LLAMA.encode(" world", add_special_tokens=False)
    assert run(LLAMA, answer)[0].startswith(" ")
    assert run(LLAMA, answer, prompt_token_ids=prompt)[0].startswith(" ")
    assert run(LLAMA, answer, prompt_token_ids=[LLAMA.bos_token_id])[0] == LLAMA.decode(answer)
    for tokenizer in (BYTE_LEVEL, GEMMA):
        whole = tokenizer.encode("ab 👍 世界", add_special_tokens=False)
        for cut in range(1, len(whole)):
            before = Detokenizer(tokenizer, prompt_token_ids=[])
            first = before.push(whole[:cut])
            assert first + run(tokenizer, whole[cut:], prompt_token_ids=whole[:cut])[0] == "ab 👍 世界"


def test_special_tokens():
    ids = BYTE_LEVEL.encode("a<|im_end|>b<|im_start|>c")
    assert run(BYTE_LEVEL, ids)[0] == "abc"
    assert run(BYTE_LEVEL, ids, skip_special_tokens=False)[0] == "a<|im_end|>b<|im_start|>c"
    assert run(BYTE_LEVEL, ids, stop=("|im_e",))[0] == "abc"
    assert run(BYTE_LEVEL, ids, skip_special_tokens=False, stop=("|im_e",))[0] == "a<"


# -- stop strings ----------------------------------------------------------------------------------------------------


def expected_stop(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """Straight from the definition: the first character at which a stop string ends; of several the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(
    st.text("abc👍 \n", max_size=40),
    st.lists(st.text("abc👍 \n", min_size=1, max_size=5), min_size=1, max_size=4),
    some_cuts,
    st.booleans(),
)
@settings(max_examples=400)
def test_stop_strings_are_found_wherever_tokens_cut_them(text, stops, cuts, include):
    stops = tuple(stops)
    draw = random.Random(repr((text, stops)))
    ids: list[int] = []  # not the usual tokens for this text, but smaller ones too
    for part in (text[i : i + 3] for i in range(0, len(text), 3)):
        for piece in [part] if draw.random() < 0.5 else part:
            ids += BYTE_LEVEL.encode(piece)
    expected, stopped = expected_stop(text, stops, include)
    for grouping in (None, [], cuts):
        got, state = run(BYTE_LEVEL, ids, grouping, stop=stops, include_stop=include)
        assert (got, state.stopped_by) == (expected, stopped)
        if stopped is not None:
            length = next(n for n in range(len(ids) + 1) if expected_stop(BYTE_LEVEL.decode(ids[:n]), stops, True)[1])
            assert state.tokens_used == length
        else:
            assert state.tokens_used == len(ids)


def test_only_what_may_begin_a_stop_string_is_held_back():
    state = Detokenizer(BYTE_LEVEL, stop=("aab",))
    shown = [state.push(BYTE_LEVEL.encode(char)) for char in "xaaacaab!"]
    assert shown == ["x", "", "", "a", "aac", "", "", "", ""]
    assert state.stopped_by == "aab"
    assert state.tokens_used == 8
    assert state.finish() == ""


def test_what_was_held_back_comes_out_at_the_end():
    state = Detokenizer(BYTE_LEVEL, stop=("STOP",))
    assert state.push(BYTE_LEVEL.encode("go ST")) == "go "
    assert state.finish() == "ST"


def test_an_unfinished_character_can_complete_a_stop_string():
    ids = BYTE_LEVEL.encode("x👍")[:-1]
    text, state = run(BYTE_LEVEL, ids, stop=("x\ufffd",))
    assert (text, state.stopped_by) == ("", "x\ufffd")


def test_stop_strings_do_not_count_before_the_least_number_of_tokens():
    ids = BYTE_LEVEL.encode("1 2 1 2 1")
    assert run(BYTE_LEVEL, ids, stop=("2",), min_tokens=3)[0] == "1 2 1 "
    assert run(BYTE_LEVEL, ids, stop=("2",), min_tokens=2)[0] == "1 "
    assert run(BYTE_LEVEL, ids, stop=("2",), min_tokens=99)[0] == "1 2 1 2 1"


def test_tokens_after_the_stop_are_ignored():
    state = Detokenizer(BYTE_LEVEL, stop=("b",))
    assert state.push(BYTE_LEVEL.encode("a b c d")) == "a "
    used = state.tokens_used
    assert state.push(BYTE_LEVEL.encode(" e")) == ""
    assert (state.tokens_used, state.finish()) == (used, "")


# -- other decoders, and time ----------------------------------------------------------------------------------------


def _wordpiece() -> Tokenizer:
    words = {"[UNK]": 0, "hel": 1, "##lo": 2, "world": 3, ",": 4, "##ing": 5, "go": 6}
    made = HFTokenizer(models.WordPiece(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece()
    return Tokenizer(made)


@given(st.lists(st.integers(0, 6), max_size=50), some_cuts)
@settings(max_examples=100)
def test_text_of_another_decoder(ids, cuts):
    tokenizer = _wordpiece()
    whole = run(tokenizer, ids, [], prompt_token_ids=[])[0]
    assert run(tokenizer, ids, cuts, prompt_token_ids=[])[0] == whole
    assert whole.replace(" ", "") == tokenizer.decode(ids).replace(" ", "")


def test_time_is_linear():
    def seconds(ids: list[int], **options) -> float:
        best = float("inf")
        for _ in range(3):
            started = time.thread_time()
            run(BYTE_LEVEL, ids, **options)
            best = min(best, time.thread_time() - started)
        return best

    half = BYTE_LEVEL.encode("👍")[:1]
    for ids, options in [
        (half, {}),
        (BYTE_LEVEL.encode("a"), {"stop": ("a" * 255 + "b", "aab")}),
        ([BYTE_LEVEL.eos_token_ids[0]], {}),
    ]:
        assert seconds(ids * 8000, **options) < 4 * seconds(ids * 4000, **options) + 0.01


def test_a_token_takes_microseconds():
    ids = BYTE_LEVEL.encode(" ".join(PLAIN[3:12])) * 20
    run(BYTE_LEVEL, ids)
    started = time.thread_time()
    run(BYTE_LEVEL, ids, stop=("\n\nQuestion:", "<|done|>"))
    assert (time.thread_time() - started) / len(ids) < 50e-6

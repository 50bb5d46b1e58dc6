"""Grammars: whatever the mask allows ends in a valid answer, and the state can be undone and replayed."""

from __future__ import annotations

import functools
import json
import random
import re
import threading

import jsonschema
import numpy as np
import psutil
import pytest

from phalanx.checkpoint.locate import locate
from phalanx.config import LimitsConfig
from phalanx.errors import InvalidRequest, Unavailable
from phalanx.sampling_params import StructuredOutputs
from phalanx.structured.grammar import Grammar, GrammarCompiler
from phalanx.text import sentencepiece_model as spm
from phalanx.text.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.text_corpus import sentencepiece_model

VOCAB = 49152
SCHEMAS: dict[str, dict] = {
    "flat object": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "optional keys": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}, "c": {"type": "number"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "nested": {
        "type": "object",
        "properties": {
            "user": {
                "type": "object",
                "properties": {
                    "id": {"type": "integer"},
                    "tags": {"type": "array", "items": {"enum": ["x", "y", "zé"]}},
                },
                "required": ["id", "tags"],
                "additionalProperties": False,
            }
        },
        "required": ["user"],
        "additionalProperties": False,
    },
    "array bounds": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "integer"}, {"type": "string", "maxLength": 5}, {"const": None}],
        "items": False,
        "minItems": 3,
    },
    "enum of everything": {"enum": [1, 2.5, "a \"quoted\" ü\n", None, True, ["x"], {"k": [1]}]},
    "const": {"const": {"a": [1, "b"]}},
    "integer bounds": {"type": "integer", "minimum": -17, "maximum": 123},
    "number bounds": {"type": "number", "exclusiveMinimum": 0, "maximum": 1.5},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 500},
    "any of": {
        "anyOf": [{"type": "string", "maxLength": 6}, {"type": "integer"}, {"type": "array", "items": {"type": "null"}}]
    },
    "one of": {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": "a"}, "x": {"type": "integer"}}, "required": ["k", "x"]},
            {"type": "object", "properties": {"k": {"const": "b"}, "y": {"type": "boolean"}}, "required": ["k", "y"]},
        ]
    },
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ]
    },
    "references": {
        "$defs": {"point": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}},
        "type": "object",
        "properties": {"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}},
        "required": ["from", "to"],
        "additionalProperties": False,
    },
    "recursive": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "v": {"type": "integer"},
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                },
                "required": ["v", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}(é|ü)?$"},
    "string lengths": {"type": "string", "minLength": 3, "maxLength": 5},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "map": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 3},
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^s_": {"type": "string"}},
        "additionalProperties": False,
    },
    "type list": {"type": ["boolean", "null"]},
    "anything": {},
}  # fmt: skip
OTHERS = {
    "regex": (
        StructuredOutputs(regex=r"(\d{3}-){2}[a-z]{1,9}\.(com|org)|äö?ü{2,3}"),
        r"(\d{3}-){2}[a-z]{1,9}\.(com|org)|äö?ü{2,3}",
    ),
    "choice": (StructuredOutputs(choice=("yes", "no", "no way", "vielleicht ü 👍", 'a"b\\c\n')), None),
    "lark": (StructuredOutputs(grammar='start: "(" start ")" | NUM\nNUM: /[0-9]{1,4}/'), r"(\(*)\d{1,4}(\)*)"),
    "gbnf": (StructuredOutputs(grammar='root ::= "x" ("," item)+\nitem ::= [a-c]+'), r"x(,[a-c]+)+"),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(locate(None))


@pytest.fixture(scope="module")
def compiler(tokenizer):
    made = GrammarCompiler(tokenizer, VOCAB)
    yield made
    made.close()


def allowed(grammar: Grammar, vocab: int = VOCAB) -> np.ndarray:
    mask = np.full(-(-vocab // 32), -1, dtype=np.int32)
    grammar.fill_mask(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


@functools.cache
def _closers_and_lengths(tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that can only bring JSON to an end, and the bytes of each token."""
    tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.size)]
    closers = [i for i, token in enumerate(tokens) if token and not token.strip(b'"}])')]
    return np.array(closers), np.array([len(token) + 9 * token.isspace() for token in tokens] + [99] * 200)


def walk(grammar: Grammar, tokenizer: Tokenizer, seed: int, vocab: int = VOCAB, most: int = 600) -> list[int]:
    """Tokens chosen at random from what is allowed, the ends more often the longer it takes."""
    draw = random.Random(seed)
    closers, lengths = _closers_and_lengths(tokenizer)
    ids: list[int] = []
    while len(ids) < most:
        choices = allowed(grammar, vocab)
        assert len(choices), tokenizer.decode(ids)
        ends = [i for i in tokenizer.eos_token_ids if i in choices]
        if ends and (len(choices) == len(ends) or draw.random() < 0.3):
            assert grammar.accept(draw.choice(ends))
            assert grammar.terminated
            return ids
        choices = np.setdiff1d(choices, ends)
        pick = int(draw.choice(choices))
        if draw.random() < min(0.9, len(ids) / 60):
            closing = np.intersect1d(choices, closers)
            pick = int(draw.choice(closing) if len(closing) else choices[np.argmin(lengths[choices])])
        assert grammar.accept(pick), tokenizer.decode([*ids, pick])
        ids.append(pick)
    raise AssertionError(f"no end after {most} tokens: {tokenizer.decode(ids)[:300]}")


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_every_walk_ends_in_valid_json(name, compiler, tokenizer):
    schema = SCHEMAS[name]
    structured = StructuredOutputs(json=schema)
    compiler.validate(structured)
    check = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    texts = set()
    for seed in range(8):
        text = tokenizer.decode(walk(compiler.compile(structured), tokenizer, seed), skip_special_tokens=False)
        check.validate(json.loads(text))
        texts.add(text)
    assert len(texts) > 1 or name == "const"


def test_every_walk_of_json_object_is_an_object(compiler, tokenizer):
    for seed in range(8):
        ids = walk(compiler.compile(StructuredOutputs(json_object=True)), tokenizer, seed)
        assert isinstance(json.loads(tokenizer.decode(ids)), dict)


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_every_walk_of_a_regex_choice_or_grammar_matches(name, compiler, tokenizer):
    structured, pattern = OTHERS[name]
    compiler.validate(structured)
    texts = {tokenizer.decode(walk(compiler.compile(structured), tokenizer, seed), False) for seed in range(12)}
    for text in texts:
        if structured.choice:
            assert text in structured.choice
        else:
            found = re.fullmatch(pattern, text)
            assert found, text
            if name == "lark":
                assert len(found[1]) == len(found[2])
    assert len(texts) > 2


def test_a_schema_as_text_is_the_same(compiler, tokenizer):
    schema = SCHEMAS["nested"]
    texts = [
        tokenizer.decode(walk(compiler.compile(StructuredOutputs(json=form)), tokenizer, 1))
        for form in (schema, json.dumps(schema, indent=2))
    ]
    assert texts[0] == texts[1]


def accept_text(grammar: Grammar, tokenizer: Tokenizer, text: str) -> None:
    for token in tokenizer.encode(text, add_special_tokens=False):
        assert grammar.accept(token), text


def test_only_an_end_may_follow_the_end(compiler, tokenizer):
    grammar = compiler.compile(StructuredOutputs(choice=("yes", "no")))
    assert not grammar.terminated
    accept_text(grammar, tokenizer, "yes")
    assert grammar.terminated
    assert sorted(allowed(grammar)) == sorted(tokenizer.eos_token_ids)
    assert not grammar.accept(tokenizer.encode("x")[0])
    for _ in range(3):  # with ignore_eos an answer goes on, and can only repeat its end
        assert grammar.accept(tokenizer.eos_token_ids[0])
        assert sorted(allowed(grammar)) == sorted(tokenizer.eos_token_ids)


def test_an_end_is_allowed_where_the_grammar_may_end(compiler, tokenizer):
    grammar = compiler.compile(StructuredOutputs(regex="a{2,4}"))
    accept_text(grammar, tokenizer, "a")
    assert not set(tokenizer.eos_token_ids) & set(allowed(grammar))
    assert not grammar.accept(tokenizer.eos_token_ids[0])
    accept_text(grammar, tokenizer, "a")
    assert set(tokenizer.eos_token_ids) < set(allowed(grammar))
    assert not grammar.terminated
    assert grammar.accept(tokenizer.eos_token_ids[0])
    assert grammar.terminated


def test_other_special_tokens_are_never_allowed(compiler, tokenizer):
    grammar = compiler.compile(StructuredOutputs(json={"type": "string"}))
    accept_text(grammar, tokenizer, '"')
    assert not (tokenizer.special_ids - set(tokenizer.eos_token_ids)) & set(allowed(grammar))


@pytest.mark.parametrize("token", [-1, VOCAB, 2**31, 5])
def test_a_token_that_is_not_allowed_changes_nothing(compiler, tokenizer, token):
    grammar = compiler.compile(StructuredOutputs(choice=("yes",)))
    before = allowed(grammar)
    assert not grammar.accept(token)
    assert (allowed(grammar) == before).all()
    accept_text(grammar, tokenizer, "yes")


@pytest.mark.parametrize("name", ["nested", "recursive", "any of", "string lengths"])
def test_undoing_and_replaying_give_the_same_state(name, compiler, tokenizer):
    structured = StructuredOutputs(json=SCHEMAS[name])
    draw = random.Random(name)
    for seed in range(3):
        ids = walk(compiler.compile(structured), tokenizer, seed)
        masks = []
        grammar = compiler.compile(structured)
        for token in ids:
            masks.append(allowed(grammar))
            assert grammar.accept(token)
        assert grammar.accept(tokenizer.eos_token_ids[0])
        grammar.accept(tokenizer.eos_token_ids[0])
        grammar.rollback(2)
        for _ in range(4):  # back and forth
            cut = draw.randrange(len(ids))
            grammar.rollback(len(ids) - cut)
            assert (allowed(grammar) == masks[cut]).all()
            replayed = compiler.compile(structured)
            for token in ids[:cut]:
                assert replayed.accept(token)
            assert (allowed(replayed) == masks[cut]).all()
            for token in ids[cut:]:
                assert grammar.accept(token)


def test_undoing_more_than_there_is(compiler, tokenizer):
    grammar = compiler.compile(StructuredOutputs(choice=("yes",)))
    with pytest.raises(ValueError, match="undo"):
        grammar.rollback(1)


def test_answers_of_one_request_do_not_share_their_state(compiler, tokenizer):
    structured = StructuredOutputs(choice=("yes", "no"))
    first, second = compiler.compile(structured), compiler.compile(structured)
    accept_text(first, tokenizer, "yes")
    assert first.terminated
    assert not second.terminated
    accept_text(second, tokenizer, "no")


def test_masks_of_another_shape_are_refused(compiler):
    grammar = compiler.compile(StructuredOutputs(choice=("yes",)))
    for bad in (
        np.zeros(VOCAB // 32 + 1, np.int32),
        np.zeros(VOCAB // 32, np.int64),
        np.zeros(VOCAB // 16, np.int32)[::2],
        np.zeros((1, VOCAB // 32), np.int32),
    ):
        with pytest.raises(ValueError, match="mask"):
            grammar.fill_mask(bad)


@pytest.mark.parametrize("vocab", [49152 + 100, 49152 + 7, 49152 - 40, 49152 - 64])
def test_logits_wider_or_narrower_than_the_vocabulary(tokenizer, vocab):
    made = GrammarCompiler(tokenizer, vocab)
    structured = StructuredOutputs(json=SCHEMAS["flat object"])
    made.validate(structured)
    ids = walk(made.compile(structured), tokenizer, 3, vocab)
    jsonschema.validate(json.loads(tokenizer.decode(ids)), SCHEMAS["flat object"])
    free = made.compile(StructuredOutputs(regex="(?s:.*)"))
    most = allowed(free, vocab)
    assert most.max() < min(vocab, tokenizer.size)
    assert len(most) > 48900
    assert not free.accept(vocab)
    made.close()


@pytest.mark.parametrize("style", ["llama", "gemma"])
def test_sentencepiece_vocabularies(style):
    found = spm.read_vocabulary(sentencepiece_model(style), "tokenizer.model")
    tokenizer = Tokenizer(found.backend, special_tokens=found.special_tokens, eos_token_ids=found.eos_token_ids)
    made = GrammarCompiler(tokenizer, tokenizer.size)
    for name in ("flat object", "enum of everything", "any of", "pattern"):
        for seed in range(3):
            ids = walk(made.compile(StructuredOutputs(json=SCHEMAS[name])), tokenizer, seed, tokenizer.size)
            jsonschema.validate(json.loads(tokenizer.decode(ids, False)), SCHEMAS[name])
    grammar = made.compile(StructuredOutputs(choice=("ü👍 yes",)))
    assert tokenizer.decode(walk(grammar, tokenizer, 1, tokenizer.size)) == "ü👍 yes"
    made.close()


def test_a_tokenizer_without_an_end(tokenizer):
    class Endless:
        size = tokenizer.size
        eos_token_ids = ()
        to_json = staticmethod(tokenizer.to_json)

    made = GrammarCompiler(Endless(), VOCAB)
    for call in (made.validate, made.compile):
        with pytest.raises(InvalidRequest, match="end-of-text"):
            call(StructuredOutputs(choice=("a",)))


def test_many_threads_compile_at_the_same_time(tokenizer):
    made = GrammarCompiler(tokenizer, VOCAB)
    failures: list[BaseException] = []

    def job(number: int) -> None:
        try:
            for i in range(5):
                structured = StructuredOutputs(choice=(f"answer {number} {i % 2}",))
                made.validate(structured)
                grammar = made.compile(structured)
                accept_text(grammar, tokenizer, f"answer {number} {i % 2}")
                assert grammar.terminated
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=job, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made.close()
    assert failures == []


def test_a_grammar_is_tried_again_where_its_trial_did_not_end(tokenizer, monkeypatch):
    made, wanted = GrammarCompiler(tokenizer, VOCAB), StructuredOutputs(regex="[ab]{3}")
    before = set(psutil.Process().children())
    made.validate(StructuredOutputs(regex="c"))
    (worker,) = set(psutil.Process().children()) - before
    worker.suspend()
    with monkeypatch.context() as patch:
        patch.setattr("phalanx.killable._WAIT_S", 0.2)
        with pytest.raises(Unavailable, match="too busy"):
            made.validate(wanted)
    made.validate(wanted)
    made.close()


def test_limits_are_the_operators(tokenizer):
    made = GrammarCompiler(tokenizer, VOCAB, LimitsConfig(max_grammar_bytes=100, max_grammar_depth=3))
    made.validate(StructuredOutputs(json={"type": "integer"}))
    for structured in (
        StructuredOutputs(json={"enum": ["x" * 100]}),
        StructuredOutputs(json={"items": {"items": {"items": {"items": {}}}}}),
        StructuredOutputs(regex="a" * 101),
        StructuredOutputs(regex="((((a))))"),
        StructuredOutputs(choice=("a" * 99,)),
        StructuredOutputs(grammar='start: "' + "a" * 100 + '"'),
    ):
        with pytest.raises(InvalidRequest):
            made.validate(structured)
        with pytest.raises(InvalidRequest):
            made.compile(structured)
    made.close()

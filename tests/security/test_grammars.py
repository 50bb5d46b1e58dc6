"""Grammars that mean harm: each is refused, or costs a bounded amount, and nothing is fetched or crashes."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time

import numpy as np
import psutil
import pytest

from phalanx.checkpoint.locate import locate
from phalanx.errors import InvalidRequest
from phalanx.sampling_params import StructuredOutputs
from phalanx.structured.grammar import GrammarCompiler
from phalanx.text.tokenizer import load_tokenizer

VOCAB = 49152


def chain(arrow: str, template: str, count: int, last: str) -> str:
    return "\n".join(f"{template.format(i)} {arrow} {template.format(i + 1)}" for i in range(count)) + (
        f"\n{template.format(count)} {arrow} {last}\n"
    )


def doubling(arrow: str, name: str, count: int) -> str:
    return "".join(f"{name}{i} {arrow} {name}{i + 1} {name}{i + 1}\n" for i in range(count))


REFUSED = {
    "30,000 levels as text": {"json": '{"items":' * 30_000 + "{}" + "}" * 30_000},
    "3,000 levels as text": {"json": '{"items":' * 3_000 + "{}" + "}" * 3_000},
    "brackets without end": {"json": "[" * 60_000},
    "brackets in a string are none": {"json": '{"const": "' + "[" * 70_000 + '"}'},
    "too large": {"json": {"enum": [str(i) for i in range(100_000)]}},
    "a reference to itself": {"json": {"$ref": "#"}},
    "references in a circle": {
        "json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    },
    "a circle of allOf": {"json": {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}] * 2}}, "$ref": "#/$defs/a"}},
    "a reference to nothing": {"json": {"$ref": "#/$defs/missing"}},
    "a remote reference": {"json": {"$ref": "http://127.0.0.1:9/schema"}},
    "a reference to a file": {"json": {"items": {"$ref": "file:///etc/passwd"}}},
    "a relative reference": {"json": {"$id": "http://127.0.0.1:9/", "$ref": "other.json"}},
    "a remote reference in a grammar": {"grammar": 'start: %json {"$ref": "http://127.0.0.1:9/schema"}'},
    "allOf of anyOf": {
        "json": {"allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": j}}} for j in range(4)]} for i in range(20)]}
    },
    "numbers beyond floats": {"json": '{"type": "number", "minimum": -1e400}'},
    "not a number": {"json": '{"minimum": NaN}'},
    "an integer of 10,000 digits": {"json": '{"minimum": ' + "9" * 10_000 + "}"},
    "an unknown type": {"json": {"type": "magic"}},
    "contradictions": {"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
    "keywords nobody knows": {"json": {"not": {"type": "string"}}},
    "not JSON": {"json": '{"type"'},
    "not an object": {"json": "[1]"},
    "half a character": {"json": {"const": "\ud800"}},
    "a bad pattern": {"json": {"type": "string", "pattern": "("}},
    "regex: unclosed": {"regex": "(a"},
    "regex: backwards": {"regex": "[z-a]"},
    "regex: look-ahead": {"regex": "(?=a)b"},
    "regex: back reference": {"regex": r"(a)\1"},
    "regex: 30,000 levels": {"regex": "(" * 30_000 + "a" + ")" * 30_000},
    "regex: nothing matches": {"regex": r"[^\s\S]"},
    "regex: 30,000 optional parts": {"regex": "a?" * 30_000},
    "regex: half a character": {"regex": "\ud800"},
    "choice: empty text": {"choice": ("a", "")},
    "choice: too many": {"choice": tuple(f"choice {i}" for i in range(20_000))},
    "lark: itself": {"grammar": "start: start"},
    "lark: circle": {"grammar": "start: a\na: b\nb: a"},
    "lark: 4,000 rules deep": {"grammar": chain(":", "r{}", 4_000, '"a"').replace("r0 ", "start ", 1)},
    "lark: 30,000 levels": {"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000},
    "lark: doubling 40 times": {"grammar": "start: T0\n" + doubling(":", "T", 40) + 'T40: "a"'},
    "lark: intersections": {"grammar": "start: A\nA: /(a|b)*a(a|b){200}/ & /(a|b)*b(a|b){200}/ & ~/(a|b)*a(a|b){199}/"},
    "lark: garbage": {"grammar": "start: :::"},
    "lark: no start": {"grammar": 'other: "a"'},
    "lark: 5,000 negations": {"grammar": "start: A\nA: " + "~" * 5_000 + "/a/"},
    "gbnf: itself": {"grammar": "root ::= root"},
    "gbnf: 3,000 rules deep": {"grammar": chain("::=", "r{}", 3_000, '"a"').replace("r0 ", "root ", 1)},
    "gbnf: doubling 40 times": {"grammar": "root ::= r0\n" + doubling("::=", "r", 40) + "r40 ::= r41\n"},
    "gbnf: unclosed": {"grammar": 'root ::= "'},
    "nothing but blanks": {"grammar": "   \n"},
}  # fmt: skip

BOUNDED = {
    "an enum of 7,000": {"json": {"enum": [f"v{i}" for i in range(7_000)]}},
    "2,000 keys": {"json": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(2_000)}}},
    "a billion items": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9}},
    "a billion characters": {"json": {"type": "string", "minLength": 10**6, "maxLength": 10**9}},
    "a pattern of a billion": {"json": {"type": "string", "pattern": "^a{1,1000000000}$"}},
    "nested repeats": {"json": {"type": "string", "pattern": "^(a{1,1000}){1,1000}$"}},
    "regex: a billion": {"regex": "a{1,1000000000}"},
    "regex: exponential": {"regex": "(a|b)*a(a|b){300}"},
    "regex: more exponential": {"regex": "(.*a.{50}){20}"},
    "regex: nested repeats": {"regex": "(" * 20 + "a" + "{1,50})" * 20},
    "regex: 9,000 words": {"regex": "|".join(f"w{i}" for i in range(9_000))},
    "choice of 3,000": {"choice": tuple(f"choice number {i}" for i in range(3_000))},
    "a choice of 60,000 characters": {"choice": ("x" * 60_000,)},
    "lark: ambiguous": {"grammar": 'start: e\ne: e e | e e e | "a" |'},
    "lark: a trillion": {"grammar": "start: r0\n" + doubling(":", "r", 40) + 'r40: "a"'},
    "lark: a million": {"grammar": 'start: "a"{1000000}'},
    "lark: nothing at all": {"grammar": "start: a*\na: b*\nb: c*\nc: "},
    "gbnf: a billion": {"grammar": "root ::= [a-z]{1000000000}"},
    "recursion with a way out": {
        "json": {
            "$defs": {"a": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/a"}}]}},
            "$ref": "#/$defs/a",
        }
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(locate(None))


@pytest.fixture(scope="module")
def compiler(tokenizer):
    made = GrammarCompiler(tokenizer, VOCAB)
    made.validate(StructuredOutputs(json_object=True))  # so that no measurement below holds the start
    made.compile(StructuredOutputs(json_object=True))
    yield made
    made.close()


def memory() -> int:
    return psutil.Process().memory_info().rss


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, compiler):
    """With 400, in bounded time, without growing."""
    before, started = memory(), time.monotonic()
    with pytest.raises(InvalidRequest) as caught:
        compiler.validate(StructuredOutputs(**REFUSED[name]))
    assert time.monotonic() - started < 30  # five seconds of trial, and a new process on a busy machine
    assert memory() - before < 50 << 20
    message = str(caught.value)
    assert caught.value.status == 400
    assert caught.value.param.startswith("structured_outputs")
    assert len(message) < 400
    assert "\n" not in message


@pytest.mark.parametrize("name", BOUNDED)
def test_bounded(name, compiler):
    """Accepted, compiled and followed for a while; each step takes a bounded time, or ends this answer alone."""
    structured = StructuredOutputs(**BOUNDED[name])
    before, started = memory(), time.monotonic()
    compiler.validate(structured)
    grammar = compiler.compile(structured)
    assert time.monotonic() - started < 30
    mask, draw, slowest = np.zeros(VOCAB // 32, np.int32), np.random.default_rng(0), 0.0
    with contextlib.suppress(InvalidRequest):  # one that became too complex: it ends, the others go on
        for _ in range(100):
            started = time.thread_time()
            grammar.fill_mask(mask)
            choices = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            assert len(choices)
            assert grammar.accept(int(draw.choice(choices)))
            slowest = max(slowest, time.thread_time() - started)
            if grammar.terminated:
                break
    assert slowest < 1.0
    assert memory() - before < 150 << 20


def test_nothing_is_fetched(compiler):
    asked: list[str] = []

    class Listener(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *arguments) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Listener)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}/schema.json"
    try:
        for wanted in (
            {"json": {"$ref": url}},
            {"json": {"$schema": url, "type": "integer"}},
            {"json": {"$id": url, "type": "integer"}},
            {"json": {"properties": {"a": {"$dynamicRef": url}}}},
            {"json": {"$id": url, "$defs": {"a": {"$id": url + "/a"}}, "items": {"$ref": "#/$defs/a"}}},
            {"grammar": 'start: %json {"$ref": "' + url + '"}'},
        ):
            try:
                compiler.validate(StructuredOutputs(**wanted))
            except InvalidRequest:
                continue
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert asked == []


def test_thousands_of_schemas_do_not_pile_up(compiler):
    def use(number: int) -> None:
        structured = StructuredOutputs(json={"properties": {f"key{number}": {"enum": [number, "x" * 200]}}})
        if number % 10 == 0:
            compiler.validate(structured)
        compiler.compile(structured)

    for number in range(200):
        use(number)
    before = memory()
    for number in range(200, 2_200):
        use(number)
    assert memory() - before < 40 << 20
    children = [child.memory_info().rss for child in psutil.Process().children()]
    assert all(size < 600 << 20 for size in children)


def test_others_are_answered_while_a_hostile_grammar_is_tried(compiler):
    refusals: list[InvalidRequest] = []

    def be_hostile() -> None:
        try:
            compiler.validate(StructuredOutputs(regex="b?" * 30_000))
        except InvalidRequest as error:
            refusals.append(error)

    hostile = threading.Thread(target=be_hostile)
    hostile.start()
    answered = 0
    while hostile.is_alive():
        compiler.validate(StructuredOutputs(choice=(f"answer {answered}",)))
        compiler.compile(StructuredOutputs(choice=(f"answer {answered}",)))
        answered += 1
        time.sleep(0.02)
    hostile.join()
    assert answered > 10
    assert "longer than" in str(refusals[0])


def test_compiling_at_the_same_time_never_crashes(compiler):
    wishes = [StructuredOutputs(**wanted) for wanted in BOUNDED.values()]
    failures: list[BaseException] = []

    def job(start: int) -> None:
        mask = np.zeros(VOCAB // 32, np.int32)
        try:
            for i in range(6):
                grammar = compiler.compile(wishes[(start + i) % len(wishes)])
                grammar.fill_mask(mask)
        except InvalidRequest:
            pass
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=job, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_refusal_does_not_quote_at_length(compiler):
    secret = "SECRETSECRET" * 50
    for wanted in (
        {"json": {"type": "object", secret: 1, "not": {}}},
        {"choice": (secret, "")},
        {"json": json.dumps({"type": secret})},
        {"regex": secret + "("},
    ):
        with pytest.raises(InvalidRequest) as caught:
            compiler.validate(StructuredOutputs(**wanted))
        assert secret not in str(caught.value)

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
from tests.helpers.grammar_bombs import BOUNDED, REFUSED

VOCAB = 49152


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

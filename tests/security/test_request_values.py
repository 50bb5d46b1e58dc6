"""SEC-05, SEC-07, SEC-32: every number and list at and beyond its limit, beside a request that must not notice."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.helpers.server import EchoServer, echo_server

OK, BAD = 200, 400

HUGE = {2**31, 2**63, -(2**63), 10**30}
NOT_NUMBERS: tuple[str, ...] = ("true", '"1"', "[]", "[1]", "{}", "NaN", "Infinity", "-Infinity", "1e400", "9" * 5000)


def integer(low: int, high: int, *, zero: bool | None = None) -> dict[str, int]:
    """JSON text of a value to the status it must get."""
    cases = {str(low): OK, str(low - 1): BAD, str(high): OK, str(high + 1): BAD, "1.5": BAD, "null": OK}
    cases.update({str(value): BAD for value in HUGE if not low <= value <= high})
    cases.update(dict.fromkeys(NOT_NUMBERS, BAD))
    return cases


def number(low: float, high: float, *, low_open: bool = False) -> dict[str, int]:
    cases = {str(low): BAD if low_open else OK, str(low - 0.01): BAD, str(high): OK, str(high + 0.01): BAD, "null": OK}
    cases.update({str(value): BAD for value in HUGE})
    cases.update(dict.fromkeys(NOT_NUMBERS, BAD))
    return cases


def listing(item: str, limit: int, bad_items: tuple[str, ...]) -> dict[str, int]:
    def of(count: int) -> str:
        return "[" + ",".join([item] * count) + "]"

    cases = {of(1): OK, of(limit): OK, of(limit + 1): BAD, "null": OK, "5": BAD, "true": BAD, "{}": BAD}
    return {**cases, **{f"[{bad}]": BAD for bad in bad_items}}


BAD_TOKENS = ("-1", "49152", "2147483648", "9223372036854775808", "1e400", "NaN", "true", '"1"', "null", "1.5", "[1]")
BAD_TEXTS = ('""', "1", "null", "true", "[]", '"' + "x" * 257 + '"')

TABLE: dict[str, dict[str, int]] = {
    "n": {**integer(1, 128), "129": BAD},
    "temperature": number(0, 2),
    "top_p": number(0, 1, low_open=True),
    "top_k": {**integer(-1, 2**31 - 1), "0": OK},
    "min_p": number(0, 1),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": number(0, 100, low_open=True),
    "seed": {
        "0": OK,
        str(2**63): OK,
        str(2**64): BAD,
        str(-(2**63)): OK,
        str(-(2**63) - 1): BAD,
        "true": BAD,
        '"1"': BAD,
        "1.5": BAD,
        "NaN": BAD,
        "1e400": BAD,
        "null": OK,
        "9" * 5000: BAD,
    },
    "min_tokens": {
        "0": OK,
        "4": OK,
        "5": BAD,
        "-1": BAD,
        str(2**31): BAD,
        str(2**63): BAD,
        "true": BAD,
        '"1"': BAD,
        "null": OK,
    },
    "prompt_logprobs": integer(0, 20),
    "priority": {"0": OK, "-5": OK, str(2**31): BAD, str(2**63): BAD, "true": BAD, '"1"': BAD, "1.5": BAD, "null": OK},
    "truncate_prompt_tokens": {
        "1": OK,
        "-1": OK,
        "0": BAD,
        "-2": BAD,
        "true": BAD,
        '"1"': BAD,
        "null": OK,
        "1e400": BAD,
    },
    "stop": {
        **listing('"x"', 16, BAD_TEXTS),
        '"x"': OK,
        '""': BAD,
        '"' + "x" * 256 + '"': OK,
        '"' + "x" * 257 + '"': BAD,
    },
    "bad_words": listing('"x"', 128, BAD_TEXTS),
    "stop_token_ids": listing("5", 1024, BAD_TOKENS),
    "allowed_token_ids": listing("5", 1024, BAD_TOKENS),
    "logit_bias": {
        '{"5": 100}': OK,
        '{"5": -100}': OK,
        '{"5": 100.1}': BAD,
        '{"5": -101}': BAD,
        '{"-1": 1}': BAD,
        '{"49152": 1}': BAD,
        '{"2147483648": 1}': BAD,
        '{"9223372036854775808": 1}': BAD,
        '{"5": 1e400}': BAD,
        '{"5": NaN}': BAD,
        '{"5": true}': BAD,
        '{"5": "1"}': BAD,
        '{"5": null}': BAD,
        '{"1.5": 1}': BAD,
        '{"": 1}': BAD,
        '{"+5": 1}': BAD,
        '{" 5": 1}': BAD,
        "[]": BAD,
        "5": BAD,
        "null": OK,
        "{}": OK,
        json.dumps({str(i): 1 for i in range(1024)}): OK,
        json.dumps({str(i): 1 for i in range(1025)}): BAD,
    },
    "ignore_eos": {"true": OK, "false": OK, "null": OK, "1": BAD, '"true"': BAD, "[]": BAD},
    "skip_special_tokens": {"true": OK, "null": OK, "0": BAD, '"no"': BAD},
    "include_stop_str_in_output": {"true": OK, "null": OK, "0": BAD},
    "stream": {"false": OK, "null": OK, "1": BAD, '"true"': BAD, "2147483648": BAD},
    "stream_options": {"{}": OK, "null": OK, "1": BAD, "true": BAD, '{"include_usage": 1}': BAD},
    "cache_salt": {
        '"a"': OK,
        '"' + "a" * 256 + '"': OK,
        '"' + "a" * 257 + '"': BAD,
        '""': BAD,
        "1": BAD,
        "true": BAD,
        "null": OK,
    },
    "request_id": {
        '"a"': OK,
        '"' + "a" * 128 + '"': OK,
        '"' + "a" * 129 + '"': BAD,
        '""': BAD,
        "1": BAD,
        '"\\n"': BAD,
        "null": OK,
    },
    "user": {'"a"': OK, "1": BAD, "null": OK},
    "model": {'"echo"': OK, "null": OK, "1": BAD, "true": BAD, "[]": BAD, '""': 404, '"nobody"': 404},
    "metadata": {
        "{}": OK,
        '{"a": "b"}': OK,
        '{"a": 1}': BAD,
        "[]": BAD,
        "1": BAD,
        "null": OK,
        json.dumps({str(i): "x" for i in range(17)}): BAD,
    },
    "structured_outputs": {
        '{"regex": "a+"}': OK,
        '{"choice": ["a"]}': OK,
        '{"choice": []}': BAD,
        '{"choice": [1]}': BAD,
        '{"regex": ""}': BAD,
        '{"regex": 1}': BAD,
        '{"json": 1}': BAD,
        "[]": BAD,
        "1": BAD,
        "null": OK,
        json.dumps({"regex": "a" * 70_000}): BAD,
        '{"json": "not json"}': BAD,
    },
    "response_format": {
        '{"type": "text"}': OK,
        '{"type": "json_object"}': OK,
        '{"type": "other"}': BAD,
        '{"type": 1}': BAD,
        "{}": BAD,
        "1": BAD,
        '"text"': BAD,
        "null": OK,
        '{"type": "json_schema", "json_schema": {}}': BAD,
        '{"type": "json_schema", "json_schema": {"schema": 1}}': BAD,
        '{"type": "json_schema", "json_schema": {"schema": {"type": 5}}}': BAD,
    },
}

COMPLETION = {
    "max_tokens": {
        "1": OK,
        "0": BAD,
        "-1": BAD,
        "4094": BAD,
        str(2**31): BAD,
        str(2**63): BAD,
        "1.5": BAD,
        "true": BAD,
        '"1"': BAD,
        "1e400": BAD,
        "NaN": BAD,
        "null": OK,
    },
    "logprobs": integer(0, 20),
    "echo": {"true": OK, "null": OK, "1": BAD},
    "add_special_tokens": {"true": OK, "null": OK, "1": BAD},
}

CHAT = {
    "max_tokens": {
        "1": OK,
        "0": BAD,
        "-1": BAD,
        str(2**31): BAD,
        str(2**63): BAD,
        "1.5": BAD,
        "true": BAD,
        '"1"': BAD,
        "null": OK,
    },
    "max_completion_tokens": {"4": OK, "0": BAD, "-1": BAD, str(2**31): BAD, "true": BAD, '"4"': BAD, "null": OK},
    "logprobs": {"true": OK, "false": OK, "null": OK, "1": BAD, '"true"': BAD},
    "top_logprobs": {"0": BAD, "null": OK, "-1": BAD, "21": BAD, str(2**63): BAD, "true": BAD, '"1"': BAD},
    "add_generation_prompt": {"true": OK, "null": OK, "1": BAD},
    "continue_final_message": {"false": OK, "null": OK, "1": BAD},
    "chat_template_kwargs": {
        "{}": OK,
        '{"a": 1}': OK,
        "null": OK,
        "[]": BAD,
        "1": BAD,
        json.dumps({f"k{i}": 1 for i in range(65)}): BAD,
    },
    "messages": {
        "[]": BAD,
        "null": BAD,
        "1": BAD,
        "{}": BAD,
        "[1]": BAD,
        '["a"]': BAD,
        "[[]]": BAD,
        "[{}]": BAD,
        json.dumps([{"role": "user", "content": "a"}] * 2049): BAD,
    },
}

PATHS = {
    "/v1/completions": ({"prompt": "one two three", "max_tokens": 4}, {**TABLE, **COMPLETION}),
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}, {**TABLE, **CHAT}),
}
CASES = [(path, field) for path, (_, table) in PATHS.items() for field in table]


@pytest.fixture
async def server() -> AsyncIterator[EchoServer]:
    async with echo_server() as running:
        yield running


@pytest.mark.parametrize(("path", "field"), CASES)
async def test_values_at_and_beyond_the_limit(server: EchoServer, path: str, field: str) -> None:
    base, table = PATHS[path]
    rest = {name: value for name, value in base.items() if name != field}
    server.echo.delay = 0.002
    healthy = asyncio.create_task(server.complete(max_tokens=200, ignore_eos=True))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slow = []
    for text, expected in table[field].items():
        body = json.dumps(rest)[:-1] + f', "{field}": {text}}}'
        began = time.perf_counter()
        answer = await server.client.post(path, content=body, headers={"Content-Type": "application/json"})
        took = time.perf_counter() - began
        assert answer.status_code == expected, (field, text[:80], answer.text[:300])
        if expected != OK:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            if took > 0.1:
                slow.append((text[:80], took))
    assert len(slow) <= 1, slow  # one may meet the first use of a grammar library, or a busy machine
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 64 * 1024  # KB; the healthy request is in it
    body = (await healthy).json()
    assert body["choices"][0]["text"] == ("one two three" * 67)[: len(body["choices"][0]["text"])]
    assert body["usage"]["completion_tokens"] == 200
    assert (await server.client.get("/health")).status_code == 200


async def test_the_context_can_be_filled_to_the_last_token(server: EchoServer) -> None:
    assert (await server.complete(max_tokens=4093, ignore_eos=True)).json()["usage"]["total_tokens"] == 4096
    assert (await server.complete(max_tokens=4094)).status_code == BAD


@pytest.mark.parametrize("fields", [{"min_tokens": 5, "max_tokens": 4}, {"min_tokens": 5000, "max_tokens": None}])
async def test_min_tokens_beyond_max_tokens(server: EchoServer, fields: dict[str, Any]) -> None:
    assert (await server.complete(**fields)).status_code == BAD
    assert (await server.chat(**fields)).status_code == BAD


@pytest.mark.parametrize(
    "text", ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "\u0000", "\u202e", "<image>", "a" * 20_000, "\ufffd\uffff"]
)
async def test_special_text_is_text(server: EchoServer, text: str) -> None:
    for answer in (
        await server.complete(prompt=text, ignore_eos=True, truncate_prompt_tokens=50),
        await server.chat(messages=[{"role": "user", "content": text}], truncate_prompt_tokens=50),
        await server.client.post("/tokenize", json={"prompt": text}),
    ):
        assert answer.status_code == OK, answer.text


async def test_operators_can_raise_and_lower_limits() -> None:
    async with echo_server(max_n=2, max_stop_strings=1, max_logprobs=1, max_prompts=1, max_messages=1) as server:
        for fields in ({"n": 3}, {"stop": ["a", "b"]}, {"logprobs": 2}, {"prompt": ["a", "b"]}):
            answer = await server.complete(**fields)
            assert answer.status_code == BAD
            assert "--max-" in answer.json()["error"]["message"]
        assert (await server.complete(n=2, stop=["a"], logprobs=1)).status_code == OK
        answer = await server.chat(messages=[{"role": "user", "content": "a"}] * 2)
        assert "--max-messages" in answer.json()["error"]["message"]
        limits = (await server.client.get("/server_info")).json()["limits"]
        assert (limits["max_n"], limits["max_messages"]) == (2, 1)

"""SEC-05, SEC-07, SEC-32: every number and list at and beyond its limit, beside a request that must not notice."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.helpers.request_values import BAD, OK, PATHS
from tests.helpers.server import EchoServer, echo_server

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

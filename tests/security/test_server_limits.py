"""SEC-08, SEC-09, SEC-12, SEC-29: sizes, times and shapes of requests. The server refuses and goes on."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from phalanx.logging import configure
from phalanx.server import bodies
from phalanx.server.connection import HeaderLimits
from tests.helpers.processes import until
from tests.helpers.server import EchoServer, echo_server, on_socket

JSON = {"Content-Type": "application/json"}
QUICK = HeaderLimits(seconds=0.3)


@pytest.fixture
async def server() -> AsyncIterator[EchoServer]:
    async with echo_server(max_body_bytes=100_000) as running:
        yield running


async def post(server: EchoServer, content: Any, path: str = "/v1/completions", **headers: str) -> httpx.Response:
    answer = await server.client.post(path, content=content, headers={**JSON, **headers})
    assert len(answer.content) <= 16 * 1024
    return answer


async def healthy(server: EchoServer) -> None:
    body = (await server.complete(max_tokens=3)).json()
    assert body["choices"][0]["text"] == "one two three"


# Bodies


async def test_large_bodies(server: EchoServer) -> None:
    big = json.dumps({"prompt": "x" * 100_000}).encode()
    answer = await post(server, big)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    assert "--max-body-bytes" in answer.text

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(big), 1000):
            yield big[start : start + 1000]

    answer = await post(server, chunks())
    assert answer.status_code == 413
    await healthy(server)


async def test_an_endless_chunked_body_is_cut_off(server: EchoServer) -> None:
    async with on_socket(server.app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
        sent = 0
        answer = asyncio.create_task(reader.read())
        try:
            while not answer.done() and sent < 50_000_000:
                writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
                await asyncio.wait_for(writer.drain(), 2)
                sent += 65536
                await asyncio.sleep(0)
        except (ConnectionError, TimeoutError):
            pass
        assert b" 413 " in (await asyncio.wait_for(answer, 60))[:20]
        assert sent < 10_000_000
        writer.close()


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "GZIP", "gzip, identity"])
async def test_compressed_bodies_are_refused(server: EchoServer, encoding: str) -> None:
    bomb = gzip.compress(b" " * 10_000_000)
    answer = await post(server, bomb, **{"Content-Encoding": encoding})
    assert answer.status_code == 415


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "application/json5",
        "application/json; charset=utf-16",
    ],
)
async def test_other_content_types(server: EchoServer, kind: str) -> None:
    answer = await server.client.post("/v1/completions", content=b'{"prompt":"a"}', headers={"Content-Type": kind})
    assert answer.status_code == 415
    for good in ("application/json", "application/json; charset=utf-8", "Application/JSON;charset=UTF-8"):
        headers = {"Content-Type": good}
        assert (
            await server.client.post("/v1/completions", content=b'{"prompt":"a"}', headers=headers)
        ).status_code == 200


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b"1",
        b'"a"',
        b"null",
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "a", "metadata": {"k": "1", "k": "2"}}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": -Infinity}',
        b'{"prompt": "a", "temperature": 1e400}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a\x00"}',
        b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"a": ' * 10_000 + b"1" + b"}" * 10_000,
        b"[" * 90_000,
        b'{"prompt": "a", "metadata": ' + b'{"a":' * 200 + b"1" + b"}" * 200 + b"}",
        b'{"prompt": "a"} {}',
        b"{'prompt': 'a'}",
        b'{"prompt": "a",}',
    ],
)
async def test_broken_json(server: EchoServer, text: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        began = time.process_time()
        answer = await post(server, text, path)
        assert answer.status_code == 400, answer.text
        assert time.process_time() - began < 1
        assert answer.json()["error"]["type"] == "invalid_request_error"
    await healthy(server)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [{"x": 1}] * 5_000},
        {"prompt": "a", "stop": [1] * 10_000},
        {"prompt": "a", "bad_words": [None] * 10_000},
        {"prompt": "a", "logit_bias": {f"k{i}": 1 for i in range(4000)}},
        {"prompt": "a", "stop_token_ids": ["x"] * 10_000},
        {"messages": [{"role": "x"}] * 5000},
        {"messages": [{"role": "user", "content": [1] * 10_000}]},
        {"prompt": "a", **{f"n{i}": i for i in range(4000)}, "n": "x"},
        {"tokens": ["x"] * 10_000},
        {"prompt": "a", "model": "m" * 90_000},
        {"prompt": "a", "\u0000" * 1000: 1, "n": []},
        {"prompt": "a", "metadata": {str(i): i for i in range(5000)}},
        {
            "prompt": "a",
            "n": 0,
            "chat_template_kwargs": {str(i): i for i in range(5000)},
            "messages": [{"role": "user", "content": "a"}],
        },
    ],
)
async def test_many_faults_make_a_short_answer(server: EchoServer, fields: dict[str, Any]) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        began = time.process_time()
        answer = await post(server, json.dumps(fields), path)
        assert answer.status_code in (400, 404) or (path == "/tokenize" and answer.status_code == 200)
        assert answer.text.count("`") <= 40
        assert time.process_time() - began < 1


async def test_an_error_never_echoes_the_prompt(server: EchoServer) -> None:
    secret = "my secret prompt"
    for fields in (
        {"prompt": secret, "n": secret},
        {"prompt": {"a": secret}},
        {"prompt": secret, "max_tokens": 10**6},
        {"prompt": secret, "stop": {secret: 1}},
        {"messages": [{"role": secret, "content": secret}]},
        {"messages": [{"role": "user", "content": {"a": secret}}]},
        {"messages": secret},
        {"prompt": secret, "structured_outputs": {secret: 1}},
    ):
        for path in ("/v1/completions", "/v1/chat/completions"):
            answer = await post(server, json.dumps(fields), path)
            assert answer.status_code == 400
            assert secret not in answer.text


async def test_a_body_that_trickles(server: EchoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "GRACE_S", 0.3)
    async with on_socket(server.app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        writer.write(b"Content-Length: 5000\r\n\r\n")
        answer = asyncio.create_task(reader.read())
        while not answer.done():
            writer.write(b" ")
            await asyncio.sleep(0.05)
            assert not writer.is_closing()
        assert b" 408 " in answer.result()[:20]
        assert b"timeout_error" in answer.result()
        writer.close()
    assert bodies.MIN_BYTES_PER_S <= 8192  # a slow line may still send 8 MB in its time


async def test_all_bodies_together_are_bounded(server: EchoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.state.bodies, "_max_held", 100_000)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    async with on_socket(server.app) as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for _, writer in held:
            writer.write(head + b"Content-Length: 50000\r\n\r\n" + b" " * 45_000)
        answers = [asyncio.create_task(reader.read(200)) for reader, _ in held]
        await asyncio.wait(answers, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        (refused,), waiting = await asyncio.wait(answers, timeout=0.2)
        assert b" 503 " in refused.result()[:20]
        for _, writer in held:
            writer.close()
        await asyncio.gather(*waiting)
        await until(lambda: server.state.bodies._held == 0)
    await healthy(server)


async def test_a_client_that_leaves_while_sending(server: EchoServer) -> None:
    async with on_socket(server.app) as port:
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
            writer.write(b"Content-Length: 500\r\n\r\nxx")
            await writer.drain()
            writer.transport.abort()
        async with asyncio.timeout(60):
            while 'status="499"' not in (await server.client.get("/metrics")).text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await healthy(server)


# Headers


async def raw(port: int, data: bytes, pause: float = 0.0) -> bytes:
    """What comes back until the server closes; with a pause, one byte is sent at a time."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = asyncio.create_task(reader.read())
    for start in range(0, len(data), 1 if pause else max(1, len(data))):
        if answer.done():
            break
        writer.write(data[start : start + 1] if pause else data)
        await asyncio.sleep(pause)
    try:
        return await asyncio.wait_for(answer, 60)
    finally:
        writer.close()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 400_000,
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 300 + b"\r\n",
        b"GET /health HTTP/1.1\r\n" + b"".join(b"A%d: %s\r\n" % (i, b"b" * 500) for i in range(200)) + b"\r\n",
    ],
)
async def test_large_headers(server: EchoServer, head: bytes) -> None:
    async with on_socket(server.app) as port:
        answer = await raw(port, head)
        assert b" 431 " in answer[:20], answer[:100]
        assert b"headers_too_large" in answer
        good = await raw(
            port, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + b"A: b\r\n" * 200 + b"\r\n"
        )
        assert b" 200 " in good[:20]


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET  \r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /\x01 HTTP/1.1\r\n\r\n",
        b"GET http://[::1 HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
)
async def test_what_is_not_http(server: EchoServer, data: bytes) -> None:
    async with on_socket(server.app) as port:
        answer = await raw(port, data)
        assert b" 400 " in answer[:20], answer[:200]
        assert b'{"error":' in answer
        assert (
            b" 200 " in (await raw(port, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"))[:20]
        )


async def test_slow_headers(server: EchoServer) -> None:
    async with on_socket(server.app, QUICK) as port:
        began = time.monotonic()
        answer = await raw(
            port, b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", 0.02
        )
        assert b" 408 " in answer[:20]
        silent, endless = await asyncio.gather(raw(port, b""), raw(port, b"\r\n" * 3))
        assert (silent, endless) == (b"", b"")
        assert time.monotonic() - began < 3


async def test_many_slow_clients_do_not_keep_others_out(server: EchoServer) -> None:
    async with on_socket(server.app, HeaderLimits(seconds=1.0)) as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
        for _, writer in held:
            writer.write(b"POST /v1/completions HTTP/1.1\r\n")
        async with httpx.AsyncClient() as api:
            answer = await api.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "a", "max_tokens": 1})
            assert answer.status_code == 200
        for reader, writer in held:
            assert b" 408 " in (await asyncio.wait_for(reader.read(100), 60))[:20]
            writer.close()


async def test_pipelined_requests_are_answered_in_order(server: EchoServer) -> None:
    async with on_socket(server.app, QUICK) as port:
        one = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
        last = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        assert (await raw(port, one * 3 + last)).count(b" 200 ") == 4


async def test_an_upgrade_is_not_taken(server: EchoServer) -> None:
    async with on_socket(server.app, QUICK) as port:
        head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: x\r\n\r\n")
        assert b" 200 " in (await asyncio.wait_for(reader.read(100), 60))[:20]
        writer.close()


# Concurrency


async def test_requests_at_once_are_limited() -> None:
    async with echo_server(max_concurrent_requests=2, echo={"delay": 0.05}) as server:
        running = [asyncio.create_task(server.complete(max_tokens=10)) for _ in range(2)]
        await asyncio.sleep(0.1)
        refused = await server.complete()
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert (await server.client.get("/health")).status_code == 200
        assert {(await task).status_code for task in running} == {200}
        assert (await server.complete()).status_code == 200


# Templates


@pytest.mark.parametrize(
    "name",
    [
        "chat_template",
        "tokenize",
        "tools",
        "documents",
        "messages",
        "conversation",
        "add_generation_prompt",
        "CHAT_TEMPLATE",
        "tokenizer",
        "return_dict",
        "__class__",
        "_x",
        "a b",
        "",
        "continue_final_message",
        "template",
    ],
)
async def test_reserved_template_variables(server: EchoServer, name: str) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {name: "{{ 1 }}"}}
        answer = await post(server, json.dumps(body), path)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "chat_template_kwargs"


async def test_an_endless_template_is_stopped_and_others_are_served() -> None:
    source = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x"
    async with echo_server(chat_template=source) as server:
        server.engine.chat_template._timeout_s = 5.0
        slow = asyncio.create_task(server.chat())
        await asyncio.sleep(0.2)
        await healthy(server)
        assert not slow.done()
        assert (await slow).status_code == 400


# Logs


@pytest.fixture
def log_lines() -> Any:
    stream = io.StringIO()
    configure("debug", stream=stream)
    return stream.getvalue


async def test_logs_hold_no_keys_no_prompts_and_no_forged_lines(log_lines: Any) -> None:
    async with echo_server(access_log=True, api_key=("topsecretkey",)) as server:
        headers = {"Authorization": "Bearer topsecretkey"}
        body = {"prompt": "my private prompt", "max_tokens": 2, "od\r\nFORGED d": 1}
        assert (await server.client.post("/v1/completions", json=body, headers=headers)).status_code == 200
        await server.client.get("/a%0d%0aFORGED%1b[31m", headers=headers)
        await server.client.get("/v1/models/x?key=topsecretkey", headers={"Authorization": "Bearer wrongkey"})
        text = log_lines()
    assert "POST /v1/completions 200" in text
    for forbidden in ("topsecretkey", "wrongkey", "private prompt", "\x1b", "\r"):
        assert forbidden not in text
    assert not any(line.startswith("FORGED") for line in text.splitlines())
    assert "FORGED" in text


async def test_no_access_log_by_default(server: EchoServer, log_lines: Any) -> None:
    await healthy(server)
    assert "/v1/completions" not in log_lines()

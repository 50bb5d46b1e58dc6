"""Streams that idle, fail, time out or lose their reader, and what is left of them in the engine: nothing."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import httpx
import pytest

from phalanx.errors import Draining
from phalanx.server.connection import LimitedHttpProtocol
from phalanx.server.streaming import KEEP_ALIVE
from tests.helpers.processes import until
from tests.helpers.server import EchoServer, echo_server, events, on_socket


async def test_an_idle_stream_is_kept_open_by_comments() -> None:
    async with echo_server(echo={"delay": 0.3}, sse_keep_alive_interval=0.1) as server:
        answer = await server.chat(stream=True, max_tokens=3)
        assert answer.content.count(KEEP_ALIVE) >= 3
        for block in answer.text.split("\n\n"):  # a comment never cuts an event
            assert block.startswith(("data: ", ": keep-alive")) or not block


async def test_no_comments_in_a_busy_stream() -> None:
    async with echo_server(echo={"delay": 0.1}, sse_keep_alive_interval=2.0) as server:
        assert KEEP_ALIVE not in (await server.chat(stream=True, max_tokens=25)).content


async def test_a_failure_in_mid_stream_is_an_error_frame_and_done() -> None:
    async with echo_server(echo={"die_after": 3}) as server:
        answer = await server.chat(stream=True, max_tokens=9)
        assert answer.status_code == 200
        *_, error, done = events(answer.text)
        assert done == "[DONE]"
        assert json.loads(error)["error"]["code"] == "service_unavailable"
        assert '"finish_reason":"' not in answer.text  # it must not look complete


async def test_refusals_keep_their_status_when_streaming() -> None:
    async with echo_server(echo={"max_requests": 0}) as server:
        answer = await server.chat(stream=True)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "overloaded"
        assert answer.headers["retry-after"] == "1"
    async with echo_server() as server:
        assert (await server.chat(stream=True, max_tokens=99999)).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_ends_at_its_deadline(stream: bool) -> None:
    async with echo_server(echo={"delay": 0.05}, request_timeout=0.3) as server:
        answer = await server.chat(stream=stream, max_tokens=4000)
        error = json.loads(events(answer.text)[-2]) if stream else answer.json()
        assert error["error"]["type"] == "timeout_error"
        assert answer.status_code == (200 if stream else 504)
        await until(lambda: server.echo.status().running == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_shutdown_ends_what_runs_with_an_error(stream: bool) -> None:
    async with echo_server(echo={"delay": 0.02}) as server:
        answer = asyncio.create_task(server.chat(stream=stream, max_tokens=4000))
        await until(lambda: server.echo.status().running == 1)
        await asyncio.sleep(0.1)
        assert server.state.in_flight.fail_all(Draining("Bye.", retry_after=3.0)) == 1
        got = await answer
        error = json.loads(events(got.text)[-2]) if stream else got.json()
        assert error["error"]["message"] == "Bye."
        assert got.status_code == (200 if stream else 503)
        await until(lambda: server.echo.status().running == 0)
        assert len(server.state.in_flight) == 0


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 3}, {"prompt": ["a", "b", "c"]}])
async def test_a_client_that_goes_away_frees_everything(fields: dict[str, Any]) -> None:
    async with echo_server(echo={"delay": 0.01}) as server, on_socket(server.app) as port:
        url = f"http://127.0.0.1:{port}/v1/completions"
        body = {"prompt": "one two", "max_tokens": 4000, "ignore_eos": True, **fields}
        async with httpx.AsyncClient(timeout=30) as api:
            request = asyncio.create_task(api.post(url, json=body))
            await until(lambda: server.echo.status().running > 0)
            await asyncio.sleep(0.1)
            request.cancel()  # closes the connection
            await asyncio.gather(request, return_exceptions=True)
        await until(lambda: server.echo.status().running == 0)
        await until(lambda: len(server.state.in_flight) == 0)
        metrics = (await server.client.get("/metrics")).text
        assert 'phalanx:request_failures_total{model_name="echo",status="499"}' in metrics


async def test_many_clients_that_drop_leave_nothing() -> None:
    async with echo_server(echo={"delay": 0.02}, sse_keep_alive_interval=0) as server, on_socket(server.app) as port:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"

        async def drop(number: int) -> None:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            body = json.dumps({"prompt": "a b c", "max_tokens": 4000, "stream": bool(number % 2)}).encode()
            writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
            await asyncio.sleep(0.001 * (number % 50))
            writer.transport.abort()

        async with httpx.AsyncClient() as api:
            healthy = asyncio.create_task(
                api.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "one two three", "max_tokens": 30})
            )
            for start in range(0, 300, 50):
                await asyncio.gather(*(drop(number) for number in range(start, start + 50)))
            assert (await healthy).json()["choices"][0]["text"] == "one two three" * 10
        await until(lambda: server.echo.status().running == 0)
        await until(lambda: len(server.state.in_flight) == 0)


async def test_an_engine_bug_says_nothing_about_itself(
    server: EchoServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def explode(prompt: Any, *arguments: Any, **more: Any) -> Any:
        raise ZeroDivisionError(prompt)

    monkeypatch.setattr(server.engine, "submit", explode)
    answer = await server.chat(messages=[{"role": "user", "content": "a secret"}])
    assert answer.status_code == 500
    assert answer.headers["x-should-retry"] == "false"
    assert answer.headers["x-request-id"] in answer.text
    assert "secret" not in answer.text + caplog.text
    assert "ZeroDivisionError" in caplog.text
    assert (await server.client.get("/health")).status_code == 200


async def test_metrics_of_a_request(server: EchoServer) -> None:
    await server.chat(max_tokens=5)
    await server.chat(max_tokens=5, n=2, stream=True)
    await server.chat(max_tokens=99999)
    text = (await server.client.get("/metrics")).text
    expected = {
        'generation_tokens_total{model_name="echo"}': 15.0,
        'request_success_total{finished_reason="length",model_name="echo"}': 3.0,
        'time_to_first_token_seconds_count{model_name="echo"}': 2.0,
        'e2e_request_latency_seconds_count{model_name="echo"}': 2.0,
        'request_queue_time_seconds_count{model_name="echo"}': 2.0,
        'http_requests_total{method="POST",route="/v1/chat/completions",status="200"}': 2.0,
        'http_requests_total{method="POST",route="/v1/chat/completions",status="400"}': 1.0,
        'num_requests_running{model_name="echo"}': 0.0,
        'kv_cache_usage_perc{model_name="echo"}': 0.0,
    }
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    for name, value in expected.items():
        assert float(found["phalanx:" + name]) == value, name
    await server.client.get("/v1/models/nothing")
    await server.client.request("BREW", "/x/../y")
    text = (await server.client.get("/metrics")).text
    assert 'method="other",route="unknown",status="404"' in text
    assert "nothing" not in text


async def test_connections_of_clients_that_hung_up_are_gone_without_the_collector() -> None:
    def connections() -> int:
        return sum(type(each) is LimitedHttpProtocol for each in gc.get_objects())

    body = json.dumps({"prompt": "one", "max_tokens": 1000, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    async with echo_server(echo={"delay": 0.01}) as server, on_socket(server.app) as port:
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                await reader.readuntil(b"data: ")
                writer.transport.abort()
            await until(lambda: not server.echo._running and connections() == 0, 10)
        finally:
            gc.enable()

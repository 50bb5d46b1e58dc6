"""The real `openai` client, blocking and asynchronous, against the real HTTP server."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.helpers.processes import until
from tests.helpers.server import EchoServer, demo_tokenizer, echo_server, on_socket

MESSAGES = [{"role": "user", "content": "Hello there"}]


def client(port: int, **options: object) -> openai.AsyncOpenAI:
    options = {"api_key": "none", "max_retries": 0, **options}
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", **options)  # type: ignore[arg-type]


async def test_async_client(server: EchoServer) -> None:
    async with on_socket(server.app) as port, client(port) as api:
        assert [model.id async for model in api.models.list()] == ["echo"]
        assert (await api.models.retrieve("echo")).id == "echo"
        answer = await api.chat.completions.create(
            model="echo",
            messages=MESSAGES,
            max_tokens=5,
            logprobs=True,
            top_logprobs=1,  # type: ignore[arg-type]
        )
        text = demo_tokenizer().decode(server.echo.requests[-1].prompt_token_ids[:5])
        assert answer.choices[0].message.content == text
        assert answer.choices[0].logprobs is not None
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 5
        stream = await api.chat.completions.create(
            model="echo",
            messages=MESSAGES,
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},  # type: ignore[arg-type]
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
        assert chunks[-1].usage is not None
        completion = await api.completions.create(model="echo", prompt=["a b", "c d"], max_tokens=2, echo=True)
        assert [choice.text for choice in completion.choices] == ["a ba b", "c dc d"]


async def test_blocking_client(server: EchoServer) -> None:
    def work(port: int) -> tuple[str, str]:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as api:
            whole = api.completions.create(model="echo", prompt="one two three", max_tokens=3)
            stream = api.completions.create(model="echo", prompt="one two three", max_tokens=3, stream=True)
            return whole.choices[0].text, "".join(chunk.choices[0].text for chunk in stream)

    async with on_socket(server.app) as port:
        assert await asyncio.to_thread(work, port) == ("one two three", "one two three")


async def test_errors_arrive_as_the_client_s_own(server: EchoServer) -> None:
    async with on_socket(server.app) as port, client(port) as api:
        with pytest.raises(openai.BadRequestError) as bad:
            await api.completions.create(model="echo", prompt="x", max_tokens=99999)
        assert (bad.value.code, bad.value.param, bad.value.type) == (
            "context_length_exceeded",
            "prompt",
            "invalid_request_error",
        )
        assert bad.value.request_id
        with pytest.raises(openai.NotFoundError) as missing:
            await api.completions.create(model="gpt-4", prompt="x")
        assert missing.value.code == "model_not_found"


async def test_the_key(server: EchoServer) -> None:
    async with echo_server(api_key=("secret",)) as locked, on_socket(locked.app) as port:
        async with client(port, api_key="secret") as api:
            assert (await api.completions.create(model="echo", prompt="a", max_tokens=1)).choices[0].text == "a"
        async with client(port, api_key="wrong") as api:
            with pytest.raises(openai.AuthenticationError):
                await api.models.list()


async def test_a_failure_in_mid_stream_raises() -> None:
    async with echo_server(echo={"die_after": 3}) as server, on_socket(server.app) as port, client(port) as api:
        stream = await api.completions.create(model="echo", prompt="one two three", max_tokens=9, stream=True)
        text = ""
        with pytest.raises(openai.APIError) as failure:  # noqa: PT012
            async for chunk in stream:
                text += chunk.choices[0].text
        assert text == "one two three"[: len(text)]
        assert failure.value.code == "service_unavailable"


async def test_the_client_retries_when_the_queue_is_full() -> None:
    async with echo_server(echo={"max_requests": 1, "delay": 0.05}) as server, on_socket(server.app) as port:
        async with client(port, max_retries=3) as api:
            first = asyncio.create_task(api.completions.create(model="echo", prompt="a", max_tokens=10))
            await asyncio.sleep(0.2)
            second = await api.completions.create(model="echo", prompt="b", max_tokens=1)
            assert second.choices[0].text == "b"
            await first
        async with client(port) as api:
            running = asyncio.create_task(api.completions.create(model="echo", prompt="a", max_tokens=20))
            await asyncio.sleep(0.2)
            with pytest.raises(openai.InternalServerError) as full:
                await api.completions.create(model="echo", prompt="b", max_tokens=1)
            assert (full.value.status_code, full.value.code) == (503, "overloaded")
            assert 1 <= int(full.value.response.headers["retry-after"]) <= 60
            await running


async def test_closing_the_stream_stops_the_work() -> None:
    async with echo_server(echo={"delay": 0.01}) as server, on_socket(server.app) as port, client(port) as api:
        stream = await api.completions.create(model="echo", prompt="one two", max_tokens=4000, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await until(lambda: server.echo.status().running == 0)

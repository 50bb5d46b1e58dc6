"""A server to talk to: the real application and tokenizer over an `EchoEngine`, in memory or on a real socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any

import httpx
import uvicorn

from phalanx.checkpoint.locate import Checkpoint, locate
from phalanx.config import EngineConfig
from phalanx.engine.async_engine import AsyncEngine
from phalanx.engine.echo import EchoEngine
from phalanx.server.app import create_app
from phalanx.server.connection import HeaderLimits, LimitedHttpProtocol
from phalanx.server.state import ServerState
from phalanx.text.tokenizer import Tokenizer, load_tokenizer

VOCABULARY = 49152


@cache
def demo_checkpoint() -> Checkpoint:
    return locate(None)


@cache
def demo_tokenizer() -> Tokenizer:
    return load_tokenizer(demo_checkpoint())


class EchoServer:
    """`client` speaks to the application without a socket."""

    def __init__(self, engine: AsyncEngine, echo: EchoEngine, app: Any, client: httpx.AsyncClient):
        self.engine = engine
        self.echo = echo
        self.app = app
        self.client = client
        self.state: ServerState = app.state.server

    async def chat(self, **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 4, **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"prompt": "one two three", "max_tokens": 4, **fields})


@asynccontextmanager
async def echo_server(
    *, start: bool = True, echo: dict[str, Any] | None = None, headers: dict[str, str] | None = None, **options: Any
) -> AsyncIterator[EchoServer]:
    """`options` are configuration; `echo` goes to the EchoEngine."""
    config = EngineConfig.from_options(**options)
    echoing = EchoEngine(**{"vocab_size": VOCABULARY, **(echo or {})})
    engine = AsyncEngine(config, client=echoing, checkpoint=demo_checkpoint(), tokenizer=demo_tokenizer())
    app = create_app(engine, config)
    if start:
        await engine.start()
    transport = httpx.ASGITransport(app)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", headers=headers) as client:
            yield EchoServer(engine, echoing, app, client)
    finally:
        await engine.close()


@asynccontextmanager
async def on_socket(app: Any, limits: HeaderLimits | None = None) -> AsyncIterator[int]:
    """The application behind the real HTTP server, on a free port of 127.0.0.1."""
    listener = socket.create_server(("127.0.0.1", 0))
    protocol: Any = partial(LimitedHttpProtocol, limits or HeaderLimits())
    settings = uvicorn.Config(
        app, http=protocol, ws="none", lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(settings)
    task = asyncio.create_task(server._serve([listener]))
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task


def events(text: str) -> list[str]:
    """The `data` of a server-sent event stream."""
    return [block.removeprefix("data: ") for block in text.split("\n\n") if block.startswith("data: ")]

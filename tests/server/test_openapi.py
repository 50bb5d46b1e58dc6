"""Requests made from our own OpenAPI document, valid and invalid ones, against the real HTTP server: no 5xx ever, and
every answer as the document says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from phalanx.server.openapi import OPERATIONS
from tests.helpers.server import echo_server, on_socket

EXAMPLES = 80
"""For each operation with a body, valid and invalid ones each."""


class Background:
    """The server on an event loop of its own, since schemathesis is not asynchronous."""

    def __init__(self) -> None:
        self.port = 0
        self._ready = threading.Event()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(30)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with echo_server(echo={"max_model_len": 256}) as server, on_socket(server.app) as self.port:
            self._ready.set()
            await self._stop.wait()
            assert server.echo.status().running == 0

    def close(self) -> None:
        if self._loop is not None and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    server = Background()
    yield f"http://127.0.0.1:{server.port}"
    server.close()


@pytest.fixture(scope="session")
def described(address: str) -> Any:
    return schemathesis.openapi.from_url(f"{address}/openapi.json")


load_all_checks()
CONFORMS = [
    CHECKS.get_one(name)
    for name in (
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
        "unsupported_method",
    )
]


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(("method", "path"), list(OPERATIONS), ids=str)
def test_the_server_keeps_to_its_document(described: Any, method: str, path: str, mode: GenerationMode) -> None:
    operation = described[path][method]
    takes_body = OPERATIONS[method, path].takes is not None
    if mode is GenerationMode.NEGATIVE and not takes_body:
        pytest.skip("nothing to get wrong")

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES if takes_body else 5,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def conforms(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=CONFORMS, timeout=20)

    conforms()


def test_afterwards_it_still_answers(address: str) -> None:
    answer = httpx.post(f"{address}/v1/completions", json={"prompt": "one two three", "max_tokens": 3})
    assert answer.json()["choices"][0]["text"] == "one two three"
    metrics = httpx.get(f"{address}/metrics").text
    assert 'status="5' not in metrics
    assert 'phalanx:num_requests_running{model_name="echo"} 0.0' in metrics

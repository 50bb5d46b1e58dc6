"""What clients and probes see over HTTP while an engine is lost and another one starts; the engines are echoes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from phalanx.config import EngineConfig
from phalanx.engine import recovery as recovery_module
from phalanx.engine.async_engine import AsyncEngine
from phalanx.engine.echo import EchoEngine
from phalanx.engine.router import Router
from phalanx.errors import NotEnoughMemory, PhalanxError
from phalanx.server.app import create_app
from tests.helpers.processes import until
from tests.helpers.server import VOCABULARY, demo_checkpoint, demo_tokenizer, events, on_socket


class SlowStart(EchoEngine):
    """The next life waits for `release`."""

    def __init__(self, release: asyncio.Event, **options: Any):
        super().__init__(vocab_size=VOCABULARY, **options)
        self._release = release

    async def start(self) -> Any:
        await self._release.wait()
        return await super().start()


class Server:
    def __init__(self, router: Router, app: Any, base: str, client: httpx.AsyncClient):
        self.router, self.app, self.base, self.client = router, app, base, client

    @property
    def echo(self) -> EchoEngine:
        (engine,) = self.router.clients
        assert isinstance(engine, EchoEngine)
        return engine

    async def stream(self, **fields: Any) -> str:
        """The whole answer as it came."""
        body = {"prompt": "one two three four", "max_tokens": 40, "stream": True, **fields}
        return (await self.client.post("/v1/completions", json=body)).text


@asynccontextmanager
async def serving(first: EchoEngine, make: Callable[[], EchoEngine] | None, **options: Any) -> AsyncIterator[Server]:
    """The application on a real socket, over a router."""
    config = EngineConfig.from_options(**options)
    router = Router([first], make=make, recovery=config.recovery)
    engine = AsyncEngine(config, client=router, checkpoint=demo_checkpoint(), tokenizer=demo_tokenizer())
    app = create_app(engine, config)
    await engine.start()
    try:
        async with on_socket(app) as port:
            base = f"http://127.0.0.1:{port}"
            async with httpx.AsyncClient(base_url=base, timeout=30) as client:
                yield Server(router, app, base, client)
    finally:
        await engine.close()


def echo(**options: Any) -> EchoEngine:
    return EchoEngine(vocab_size=VOCABULARY, **options)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery_module, "BACK_OFF_S", (0.0, 0.005))
    monkeypatch.setattr(recovery_module, "CAPACITY_S", 0.02)


def texts(stream: str) -> dict[int, str]:
    """The text of each choice; the stream must end in exactly one terminal event."""
    data = events(stream)
    assert data[-1] == "[DONE]"
    assert data.count("[DONE]") == 1
    found: dict[int, str] = {}
    ended: dict[int, str] = {}
    for chunk in map(json.loads, data[:-1]):
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            assert choice["index"] not in ended
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
            if choice["finish_reason"]:
                ended[choice["index"]] = choice["finish_reason"]
    assert found.keys() == ended.keys()
    return found


async def test_a_stream_stays_open_and_its_text_is_the_same(quick: None) -> None:
    release = asyncio.Event()
    fields = {"n": 2, "logprobs": 1, "stream_options": {"include_usage": True}}
    async with serving(echo(delay=0.002), lambda: SlowStart(release), sse_keep_alive_interval=0.1) as server:
        undisturbed = await server.stream(**fields)
        disturbed = asyncio.create_task(server.stream(**fields))
        await until(lambda: server.echo.status().computed_tokens >= 80 + 30)
        server.echo.die()
        for _ in range(12):  # a busy machine may lengthen each, and lose a comment for it
            await asyncio.sleep(0.05)
        release.set()
        stream = await disturbed
    assert texts(stream) == texts(undisturbed)
    assert len(texts(stream)) == 2
    assert stream.count(": keep-alive") >= 2
    assert _usage(stream) == _usage(undisturbed)
    assert _logprobs(stream) == _logprobs(undisturbed)


def _usage(stream: str) -> Any:
    return [json.loads(data)["usage"] for data in events(stream)[:-1]][-1]


def _logprobs(stream: str) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for chunk in map(json.loads, events(stream)[:-1]):
        for choice in chunk["choices"]:
            found.setdefault(choice["index"], []).extend((choice["logprobs"] or {}).get("tokens", []))
    return found


async def test_health_says_what_is_lost_and_since_when(quick: None) -> None:
    release = asyncio.Event()
    async with serving(echo(), lambda: SlowStart(release)) as server:
        before = time.time()
        server.echo.die("a test ended it")
        await until(lambda: server.router.status().state == "recovering")
        for path in ("/health", "/health/ready", "/ping"):
            answer = await server.client.get(path)
            told = answer.json()
            assert answer.status_code == 503
            assert told["status"] == "recovering"
            assert "a test ended it" in told["error"]["message"]
            said = {"rank", "kind", "cause", "since", "plan", "missing", "last_try", "estimate"}
            assert set(told["recovery"]) == said
            assert (told["recovery"]["rank"], told["recovery"]["kind"]) == (-1, "killed")
            assert before <= told["recovery"]["since"] <= time.time()
            assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert (await server.client.get("/health/live")).status_code == 200
        status = (await server.client.get("/status")).json()
        assert (status["state"], status["epoch"], status["failures"]) == ("recovering", 1, {"killed": 1})
        assert status["recovery"]["plan"] == "restart"
        release.set()
        await until(lambda: server.router.status().state == "ready")
        assert (await server.client.get("/health")).status_code == 200
        status = (await server.client.get("/status")).json()
        assert (status["state"], status["recovery"], len(status["recoveries"])) == ("ready", None, 1)


async def test_health_says_why_the_latest_try_failed_beside_what_was_lost_first(quick: None) -> None:
    release = asyncio.Event()
    lives = iter((echo(refuse_to_start=PhalanxError("The disk is full.")), SlowStart(release)))
    async with serving(echo(), lambda: next(lives)) as server:
        server.echo.die("a test ended it")
        await until(lambda: getattr(server.router.status().recovery, "last_try", "") != "")
        told = (await server.client.get("/health")).json()
        assert "a test ended it" in told["cause"] and told["recovery"]["cause"] in told["cause"]
        assert told["recovery"]["last_try"] == "the engine process: The disk is full"
        assert "a test ended it" in told["error"]["message"] and "The disk is full" in told["error"]["message"]
        release.set()
        await until(lambda: server.router.status().state == "ready")


async def test_metrics_of_a_recovery(quick: None) -> None:
    async with serving(echo(die_after=10), echo) as server:
        texts(await server.stream())
        await until(lambda: server.router.status().recovery is None)
        for _ in range(2):  # looked at twice, counted once
            text = (await server.client.get("/metrics")).text
        for line in (
            'phalanx:worker_failures_total{kind="killed",model_name="echo"} 1.0',
            'phalanx:worker_failures_total{kind="hung",model_name="echo"} 0.0',
            'phalanx:recoveries_total{model_name="echo",plan="restart"} 1.0',
            'phalanx:failure_detection_seconds_count{model_name="echo"} 1.0',
            'phalanx:failure_detection_seconds_sum{model_name="echo"} 0.0',
            'phalanx:recovery_reload_seconds_count{model_name="echo"} 1.0',
            'phalanx:recovery_first_token_seconds_count{model_name="echo"} 1.0',
            'phalanx:requests_resumed_total{model_name="echo"} 1.0',
            'phalanx:engine_epoch{model_name="echo"} 1.0',
        ):
            assert line in text.splitlines(), line
        assert 'phalanx:tokens_recomputed_total{model_name="echo"}' in text


async def test_poison_is_refused_alone(quick: None) -> None:
    tokenizer = demo_tokenizer()
    (poison,) = tokenizer.encode(" volcano")
    async with serving(echo(poison=poison), lambda: echo(poison=poison)) as server:
        healthy = [asyncio.create_task(server.stream(prompt=f"{i} two three")) for i in range(3)]
        streamed = asyncio.create_task(server.stream(prompt="one two volcano", max_tokens=9))
        answer = await server.client.post("/v1/completions", json={"prompt": "a volcano", "max_tokens": 9})
        assert answer.status_code == 500
        assert answer.headers["x-should-retry"] == "false"
        assert answer.json()["error"]["code"] == "poison_request"
        data = events(await streamed)
        assert json.loads(data[-2])["error"]["code"] == "poison_request"
        assert data[-1] == "[DONE]"
        assert [bool(texts(await stream)[0]) for stream in healthy] == [True] * 3


async def test_while_memory_is_missing_health_says_what_and_new_requests_are_told_to_wait(quick: None) -> None:
    missing: PhalanxError | None = NotEnoughMemory("It needs 3 GB, 1 GB is free.")

    def make() -> EchoEngine:
        return echo(refuse_to_start=missing)

    async with serving(echo(delay=0.002), make) as server:
        accepted = asyncio.create_task(server.stream())
        await until(lambda: server.echo.status().computed_tokens >= 5)
        server.echo.die()
        await until(lambda: getattr(server.router.status().recovery, "plan", "") == "wait")
        told = (await server.client.get("/health")).json()
        assert (told["recovery"]["plan"], "3 GB" in told["recovery"]["missing"]) == ("wait", True)
        assert "3 GB" in told["error"]["message"]
        refused = await server.client.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
        assert (await server.client.get("/health/live")).status_code == 200
        missing = None
        assert texts(await accepted)[0]


async def test_when_nothing_helps_a_stream_ends_with_one_error(quick: None) -> None:
    broken = PhalanxError("The disk is gone.")
    async with serving(echo(die_after=10), lambda: echo(refuse_to_start=broken)) as server:
        data = events(await server.stream())
        assert data[-1] == "[DONE]"
        assert "The disk is gone." in json.loads(data[-2])["error"]["message"]
        assert sum('"error"' in each for each in data) == 1
        live = await server.client.get("/health/live")
        assert (live.status_code, live.json()["status"]) == (503, "failed")
        assert (await server.client.get("/status")).json()["state"] == "failed"


async def test_draining_goes_on_over_a_recovery(quick: None) -> None:
    release = asyncio.Event()
    async with serving(echo(delay=0.002), lambda: SlowStart(release)) as server:
        running = asyncio.create_task(server.stream())
        await until(lambda: server.echo.status().computed_tokens >= 5)
        draining = asyncio.create_task(server.app.state.server.engine.drain(10))
        server.echo.die()
        await asyncio.sleep(0.02)
        release.set()
        assert texts(await running)[0]
        assert await draining

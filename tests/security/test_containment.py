"""SEC-05, SEC-30 on the real engine: what is refused, and who hangs up, beside answers that must not notice.

A server process and a real model in fp32. While offenders are at work, the same greedy request runs again and again;
each answer must have the tokens of the one that was alone. Afterwards the engine is the same process and holds nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.helpers.grammar_bombs import BOUNDED, REFUSED
from tests.helpers.request_values import BAD, PATHS
from tests.helpers.serve_process import Serve
from tests.helpers.server import demo_checkpoint
from tests.helpers.tiny_model import write_tiny_model

JSON = {"Content-Type": "application/json"}


class Target:
    """A running server, with what its healthy request answered when it was alone."""

    def __init__(self, serve: Serve, healthy_tokens: int):
        self.serve = serve
        self.base = serve.base()
        self.api: httpx.AsyncClient  # one for each `undisturbed` block, as each test has its own event loop
        self.healthy_tokens = healthy_tokens
        self.alone: list[tuple[str, float]] = []
        self.spent = 0
        """Tokens that the engine computed for others than the healthy ones in the last `undisturbed` block."""

    async def healthy(self) -> list[tuple[str, float]]:
        """The tokens of a greedy answer, each with its log probability to two digits."""
        body = {
            "prompt": "The quick brown fox", "max_tokens": self.healthy_tokens, "temperature": 0, "ignore_eos": True,
            "logprobs": 1, "stream": True,
        }  # fmt: skip
        tokens: list[tuple[str, float]] = []
        async with self.api.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    part = choice["logprobs"]
                    numbers = [round(number, 2) for number in part["token_logprobs"]]
                    tokens += zip(part["tokens"], numbers, strict=True)
        return tokens

    @contextlib.asynccontextmanager
    async def undisturbed(self) -> AsyncIterator[None]:
        """Healthy answers without a pause while the block runs, at least two, all like the one that was alone; then
        the engine is still the same process, and at rest."""
        async with httpx.AsyncClient(base_url=self.base, timeout=120) as self.api:
            self.alone = self.alone or await self.healthy()
            assert len(self.alone) == self.healthy_tokens
            before = (await self.api.get("/status")).json()
            computed = await self.computed()
            stop = asyncio.Event()

            async def keep_asking() -> int:
                asked = 0
                while not stop.is_set() or asked < 2:
                    assert await self.healthy() == self.alone
                    asked += 1
                return asked

            asking = asyncio.create_task(keep_asking())
            await asyncio.sleep(0.05)
            try:
                yield
            finally:
                stop.set()
                asked = await asking
            assert (await self.at_rest())["engine"]["pid"] == before["engine"]["pid"]
            self.spent = await self.computed() - computed - asked * self.healthy_tokens

    async def computed(self) -> int:
        (tokens,) = re.findall(r"(?m)^phalanx:computed_tokens_total\S* (\S+)$", (await self.api.get("/metrics")).text)
        return int(float(tokens))

    async def at_rest(self, seconds: float = 60.0) -> dict[str, Any]:
        """Once nothing runs, nothing waits, every block is free and no request is counted."""
        async with asyncio.timeout(seconds):
            while True:
                status: dict[str, Any] = (await self.api.get("/status")).json()
                metrics = (await self.api.get("/metrics")).text
                (counted,) = re.findall(r"(?m)^phalanx:http_requests_in_flight\S* (\S+)$", metrics)
                idle = status["requests"] == {"running": 0, "waiting": 0}
                if idle and status["kv"]["free"] == status["kv"]["blocks"] and float(counted) == 1:
                    return status  # the one is the request for /metrics
                await asyncio.sleep(0.05)

    def processes(self) -> list[psutil.Process]:
        server = psutil.Process(self.serve.process.pid)
        return [server, *server.children(recursive=True)]

    async def refused(self, path: str, content: bytes | str, *statuses: int) -> None:
        answer = await self.api.post(path, content=content, headers=JSON)
        assert answer.status_code in (statuses or (400,)), (path, content[:200], answer.status_code, answer.text[:300])
        assert len(answer.content) <= 16 * 1024
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    def cut(self, body: bytes, claimed: int) -> None:
        """A request whose body ends before it should."""
        host, _, port = self.base.removeprefix("http://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % claimed
            )
            connection.sendall(body)
            connection.shutdown(socket.SHUT_WR)
            assert b" 200 " not in connection.recv(4096)[:20]

    async def drop(self, number: int) -> None:
        """A client that asks for a long answer and hangs up: at once, amid its prompt, or amid the answer."""
        prompt = f"{number} " + "w " * (number % 7 * 8)
        body = {"prompt": prompt, "max_tokens": 100, "ignore_eos": True, "stream": number % 3 > 0, "n": 1 + number % 2}
        content = json.dumps(body).encode()
        host, _, port = self.base.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(content), content)
        )
        await writer.drain()
        if number % 4 == 0:  # amid the answer
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(600), 5)
        else:
            await asyncio.sleep(0.003 * (number % 25))
        if number % 5:
            writer.transport.abort()
        else:
            writer.close()

    async def drop_many(self, count: int, at_once: int = 25) -> None:
        for start in range(0, count, at_once):
            await asyncio.gather(*(self.drop(number) for number in range(start, start + at_once)))


@contextlib.contextmanager
def target(*arguments: str, healthy_tokens: int) -> Iterator[Target]:
    """Each step takes 5 ms at least, so that an answer is not over before its client has hung up."""
    slow = {"PHALANX_FAULT": "at=before_commit,do=sleep=0.005"}
    serve = Serve(*arguments, "--port", "0", "--dtype", "float32", environment=slow)
    try:
        yield Target(serve, healthy_tokens)
    finally:
        serve.kill()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    with target(str(folder), "--kv-cache-memory-bytes", "2M", healthy_tokens=200) as running:
        yield running


@pytest.fixture(scope="module")
def demo() -> Iterator[Target]:
    demo_checkpoint()
    options = ("--kv-cache-memory-bytes", "100M", "--max-model-len", "2048")
    with target(*options, healthy_tokens=48) as running:
        yield running


DEEP = '{"items":' * 3_000 + "{}" + "}" * 3_000
POISON: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"n": 10**9}),
    ("completions", {"prompt": ""}),
    ("completions", {"prompt": []}),
    ("completions", {"prompt": [2**31]}),
    ("completions", {"prompt": [-1]}),
    ("completions", {"prompt": [[]]}),
    ("completions", {"prompt": "word " * 5_000}),
    ("completions", {"max_tokens": 2**63}),
    ("completions", {"min_tokens": 10, "max_tokens": 4}),
    ("completions", {"logit_bias": {str(token): 1 for token in range(5_000)}}),
    ("completions", {"logit_bias": {"99999999": 1}}),
    ("completions", {"stop_token_ids": [2**40]}),
    ("completions", {"allowed_token_ids": []}),
    ("completions", {"logprobs": 10**6}),
    ("completions", {"temperature": -1}),
    ("completions", {"top_p": 0}),
    ("completions", {"seed": 2**64}),
    ("completions", {"cache_salt": ["a"]}),
    ("completions", {"structured_outputs": {"json": DEEP}}),
    ("completions", {"structured_outputs": {"regex": "(a"}}),
    ("completions", {"structured_outputs": {"grammar": "start: start"}}),
    ("completions", {"structured_outputs": {"choice": []}}),
    ("chat/completions", {"messages": []}),
    ("chat/completions", {"messages": [{"role": "user", "content": {"a": 1}}]}),
    ("chat/completions", {"chat_template": "{{ 1 }}"}),
    ("chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}}),
    ("chat/completions", {"tools": [{"type": "function", "function": {}}]}),
]


async def test_refused_requests_disturb_nobody(tiny: Target) -> None:
    async with tiny.undisturbed():
        for path, fields in POISON:
            healthy = PATHS["/v1/" + path][0]
            await tiny.refused("/v1/" + path, json.dumps({**healthy, **fields}), 400, 413)
        for content in (b"", b"{", b"\xff", b'{"prompt": "a", "prompt": "b"}', b"[" * 50_000, b'{"temperature": NaN}'):
            await tiny.refused("/v1/completions", content)
        for body, claimed in ((b'{"prompt": "a', 500), (b"", 10), (b"{" * 100, 10**6)):
            await asyncio.to_thread(tiny.cut, body, claimed)


async def test_clients_that_hang_up_disturb_nobody(tiny: Target) -> None:
    async with tiny.undisturbed():
        await tiny.drop_many(100)
    assert tiny.spent < 12_000  # 20,000 if their answers were computed to the end


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_a_thousand_clients_that_hang_up_leave_nothing(demo: Target) -> None:
    """Nothing counted, nothing held, no descriptor, and no memory beyond what the first hundred took."""
    async with demo.undisturbed():
        for token in (5, 6):  # has every block written once, which is when the system gives it memory
            body = {"prompt": [token] * 2000, "max_tokens": 2}
            assert (await demo.api.post("/v1/completions", json=body)).status_code == 200
        await demo.drop_many(100)
    await asyncio.sleep(1)  # for connections to be closed
    descriptors = [process.num_fds() for process in demo.processes()]
    memory = [process.memory_info().rss for process in demo.processes()]
    async with demo.undisturbed():
        await demo.drop_many(1000)
    assert demo.spent < 100_000  # 200,000 if their answers were computed to the end
    await asyncio.sleep(1)
    assert [process.num_fds() for process in demo.processes()] == descriptors
    grown = [process.memory_info().rss - before for process, before in zip(demo.processes(), memory, strict=True)]
    assert max(grown) < 32 << 20, grown


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_every_value_and_every_grammar_disturbs_nobody(demo: Target) -> None:
    async with demo.undisturbed():
        for path, (base, table) in PATHS.items():
            for field, cases in table.items():
                rest = {name: value for name, value in base.items() if name != field}
                for text, expected in cases.items():
                    if expected != 200:
                        body = json.dumps(rest)[:-1] + f', "{field}": {text}}}'
                        await demo.refused(path, body, expected)
    async with demo.undisturbed():
        for wanted in REFUSED.values():
            body = json.dumps({"prompt": "a", "max_tokens": 4, "structured_outputs": wanted})
            await demo.refused("/v1/completions", body, BAD, 413)
    async with demo.undisturbed():
        for wanted in BOUNDED.values():
            body = json.dumps({"prompt": "a", "max_tokens": 8, "structured_outputs": wanted})
            answer = await demo.api.post("/v1/completions", content=body, headers=JSON)
            assert answer.status_code in (200, 400), answer.text[:300]

"""What router, front end and HTTP add to an engine, and how many requests they dispatch; the same work, run in turn.

    python benchmarks/front_end.py --rounds 5 --json result.json

A round runs every side, in an order that turns; ratios and differences are taken within a round. Each side is started
for it, alone on the machine, and has the same cores. Processor time is of the front end with its router, whatever else
the machine does.

streams     `batch32` of executors.py (32 at once, 128 tokens in, 64 out: output tokens / wall time), and the first
            token of a request (128 in, 1 out) that comes at any time while 31 others are answered: one `Engine`,
            stepped in one process without text and sockets; `AsyncEngine`; the server, with clients that stream in a
            process of their own. Clients have the cores of what is measured, so they do little: they ask on connections
            that are open already, the beginning of an answer is read at once, the rest when 16 KB of it are there or
            the server has closed the connection. Answers are looked at when the clock has stopped: each must be whole,
            event by event
dispatch    requests of a short prompt and one token, 64 at a time, to an engine that answers at once (`EchoEngine`):
            through the router alone, through `AsyncEngine`, and through one and two server processes, not streamed,
            with clients in a process of their own that keep their connections
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import setting, shown, summary, write
from benchmarks.peer_engines import prompts

ALONE, WHOLE, SERVER = "engine alone", "AsyncEngine", "server"
STREAMS = (ALONE, WHOLE, SERVER)
DISPATCH = ("router", "AsyncEngine, echo", "server, echo", "two servers, echo")
COUNT, INPUT_LEN, OUTPUT_LEN = 32, 128, 64
PROBES, APART_S = 40, 0.03
"""Requests whose first token is timed, each up to so long after the one before."""
READ_BYTES = 1 << 14
"""Clients are woken for so many bytes of an answer that they have begun to read."""
AT_ONCE = 64
LEAST_RATIO, MOST_MS, LEAST_REQUESTS_S = 0.97, 2.0, 2000
"""What is hoped for of `AsyncEngine`."""

Figures = dict[str, float]


def options(dtype: str) -> dict[str, Any]:
    return {"max_model_len": 2048, "kv_cache_memory_bytes": "512M", "dtype": dtype}


# Sides, each in a process of its own


class Subject(Protocol):
    async def streams(self, seed: int) -> Figures: ...


class Alone:
    """One thread does everything, and what comes while it computes waits for the end of the step."""

    def __init__(self, dtype: str):
        from phalanx import EngineConfig
        from phalanx.checkpoint.locate import locate
        from phalanx.engine.core import open_engine
        from phalanx.engine.resolution import for_engine, resolved

        config = EngineConfig.from_options(distributed_executor_backend="inprocess", **options(dtype))
        checkpoint = locate(None)
        self._engine, _ = open_engine(*for_engine(resolved(config, checkpoint), checkpoint))
        self._number = 0

    def _add(self, prompt: list[int], output_len: int) -> str:
        from phalanx import SamplingParams
        from phalanx.engine.client import EngineRequest

        self._number += 1
        params = SamplingParams(max_tokens=output_len, temperature=0, ignore_eos=True, seed=0)
        self._engine.add(EngineRequest(str(self._number), prompt, params))
        return str(self._number)

    async def streams(self, seed: int) -> Figures:
        engine, tokens = self._engine, 0
        begin = time.perf_counter()
        for prompt in prompts(COUNT, INPUT_LEN, seed):
            self._add(prompt, OUTPUT_LEN)
        while engine.has_work:
            tokens += sum(len(output.token_ids) for output in engine.step())
        seconds = time.perf_counter() - begin
        return {"tok_s": tokens / seconds, "first_token_ms": statistics.median(self._probe(seed)) * 1000}

    def _probe(self, seed: int) -> list[float]:
        engine, times = self._engine, []
        others = [self._add(prompt, 1500) for prompt in prompts(COUNT - 1, INPUT_LEN, seed + 1)]
        while engine.status().waiting or not engine.status().running:
            engine.step()
        for prompt, pause in _probes(seed):
            arrival = time.perf_counter() + pause
            while time.perf_counter() < arrival:
                engine.step()
            probe = self._add(prompt, 1)
            while not any(output.request_id == probe and output.token_ids for output in engine.step()):
                pass
            times.append(time.perf_counter() - arrival)
        engine.abort(others)
        while engine.has_work:
            engine.step()
        return times

    def close(self) -> None:
        self._engine.close()


def _probes(seed: int) -> Iterator[tuple[list[int], float]]:
    """Prompts, and the pauses before them."""
    draw = random.Random(seed)
    for prompt in prompts(PROBES, INPUT_LEN, seed + 2):
        yield prompt, draw.uniform(0, APART_S)


Piece = Sequence[int]
"""Of an answer: its tokens, or bytes."""
Ask = Callable[[list[int], int], AsyncIterator[Piece]]
"""Of a prompt and the length of its answer, the pieces of it. To be called once."""
Ready = Callable[[], Awaitable[Ask]]
"""What can be done before there is a prompt."""


async def _streams(ready: Ready, count: Callable[[list[Any]], int], cpu: Callable[[], float], seed: int) -> Figures:
    """As `Alone.streams`, with `ready`; `count` makes the number of tokens of an answer's pieces, `cpu` is what the
    front end has used."""

    async def whole(ask: Ask, prompt: list[int]) -> list[Piece]:
        return [piece async for piece in ask(prompt, OUTPUT_LEN)]

    asks = [await ready() for _ in range(COUNT)]
    used, begin = cpu(), time.perf_counter()
    answers = await asyncio.gather(*map(whole, asks, prompts(COUNT, INPUT_LEN, seed)))
    seconds, used = time.perf_counter() - begin, cpu() - used
    counts = [count(answer) for answer in answers]
    if counts != [OUTPUT_LEN] * COUNT:
        raise SystemExit(f"answers of {OUTPUT_LEN} tokens have {counts}")
    tokens = sum(counts)
    first = statistics.median(await _probe(ready, seed))
    return {"tok_s": tokens / seconds, "cpu_us_per_token": used / tokens * 1e6, "first_token_ms": first * 1000}


async def _probe(ready: Ready, seed: int) -> list[float]:
    times = []
    begun = asyncio.Semaphore(0)

    async def run(prompt: list[int]) -> None:
        ask = await ready()
        async with contextlib.aclosing(ask(prompt, 1500)) as pieces:  # type: ignore[type-var]
            async for _ in pieces:
                begun.release()

    others = [asyncio.create_task(run(prompt)) for prompt in prompts(COUNT - 1, INPUT_LEN, seed + 1)]
    for _ in others:
        await begun.acquire()
    for prompt, pause in _probes(seed):
        ask = await ready()
        await asyncio.sleep(pause)
        arrival = time.perf_counter()
        pieces = [time.perf_counter() async for _ in ask(prompt, 1)]
        times.append(min(pieces) - arrival)
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    return times


class Whole:
    def __init__(self, dtype: str):
        from phalanx import AsyncEngine, EngineConfig

        self._engine = AsyncEngine(EngineConfig.from_options(**options(dtype)))

    async def start(self) -> None:
        await self._engine.start()

    async def streams(self, seed: int) -> Figures:
        from phalanx import SamplingParams

        async def ask(prompt: list[int], output_len: int) -> AsyncIterator[Piece]:
            params = SamplingParams(max_tokens=output_len, temperature=0, ignore_eos=True)
            async for delta in self._engine.generate(prompt, params):
                yield delta.outputs[0].token_ids

        async def ready() -> Ask:
            return ask

        return await _streams(ready, lambda pieces: sum(map(len, pieces)), time.process_time, seed)

    async def close(self) -> None:
        await self._engine.close()


class Connection:
    """HTTP to one address, kept open."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def send(self, body: dict[str, Any], *, last: bool = False) -> None:
        """The `last` request: the server closes the connection behind its answer."""
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n"
        head += "Connection: close\r\n" if last else ""
        self._writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)

    async def head(self) -> bytes:
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            raise SystemExit(f"the server answered {head.decode()}")
        return head

    async def whole(self) -> bytes:
        length = re.search(rb"content-length: (\d+)", await self.head(), re.IGNORECASE)
        return await self._reader.readexactly(int(length[1]) if length else 0)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body of the last answer, as it comes."""
        await self.head()
        sock = self._writer.get_extra_info("socket")
        while piece := await self._reader.read(1 << 20):
            yield piece
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, READ_BYTES)  # the end is told at once

    def close(self) -> None:
        self._writer.close()


class Server:
    """`command` starts it; it is ready when it says so."""

    def __init__(self, command: list[str]):
        self.process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
        for line in self.process.stdout or ():
            if ready := re.search(r"Ready: http://\S+:(\d+)", line):
                self.port = int(ready[1])
                return
        raise SystemExit(f"the server ended with exit code {self.process.wait()}")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def streamed_tokens(body: bytes) -> int:
    """How many tokens an answer has, sent in chunks of events. Ends the benchmark when it is not whole."""
    data = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        data, body = data + body[: int(size, 16)], body[int(size, 16) + 2 :]
        if not int(size, 16):
            break
    *events, done, rest = data.split(b"\n\n")
    said = [json.loads(event.removeprefix(b"data: ")) for event in events]
    reasons = [choice["finish_reason"] for event in said for choice in event["choices"]]
    if body or rest or done != b"data: [DONE]" or reasons[-1] != "length" or any(reasons[:-1]):
        raise SystemExit(f"the server sent an answer that is not whole: {data!r}")
    tokens: int = said[-1]["usage"]["completion_tokens"]
    return tokens


class Served:
    def __init__(self, dtype: str):
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options(dtype).items()]
        self._server = Server(["-m", "phalanx.cli.main", "serve", "--port", "0", *flags])
        self._process = psutil.Process(self._server.process.pid)

    async def streams(self, seed: int) -> Figures:
        async def ready() -> Ask:
            return partial(ask, await Connection.open(self._server.port))

        async def ask(connection: Connection, prompt: list[int], output_len: int) -> AsyncIterator[Piece]:
            try:
                connection.send({"prompt": prompt, "max_tokens": output_len, "temperature": 0, "ignore_eos": True,
                                 "stream": True, "stream_options": {"include_usage": True}}, last=True)  # fmt: skip
                async with contextlib.aclosing(connection.pieces()) as pieces:  # type: ignore[type-var]
                    async for piece in pieces:
                        yield piece
            finally:
                connection.close()

        def count(pieces: list[bytes]) -> int:
            return streamed_tokens(b"".join(pieces))

        return await _streams(ready, count, lambda: sum(self._process.cpu_times()[:2]), seed)

    def close(self) -> None:
        self._server.close()


# Dispatch


def use_echo() -> None:
    """Engines are echoes from now on, in this process."""
    from phalanx.engine import engines
    from phalanx.engine.echo import EchoEngine
    from phalanx.engine.router import Router

    class Echoes(engines.Engines):
        async def spawn(self) -> Router:
            self._router = Router([EchoEngine(vocab_size=49_152)])
            return self._router

    engines.Engines = Echoes  # type: ignore[misc]


async def _many(count: int, one: Callable[[int], Awaitable[None]], cpu: Callable[[], float]) -> Figures:
    """`count` requests, `AT_ONCE` at a time; `one` makes one, told which of those at a time it is."""
    numbers = iter(range(count))

    async def some(which: int) -> None:
        for _ in numbers:
            await one(which)

    used, begin = cpu(), time.perf_counter()
    await asyncio.gather(*(some(which) for which in range(AT_ONCE)))
    seconds, used = time.perf_counter() - begin, cpu() - used
    return {"requests_s": count / seconds, "cpu_us_per_request": used / count * 1e6}


async def dispatch_router(requests: int) -> Figures:
    from phalanx import SamplingParams
    from phalanx.engine.client import EngineRequest
    from phalanx.engine.echo import EchoEngine
    from phalanx.engine.router import Router

    router = Router([EchoEngine()])
    await router.start()
    params = SamplingParams(max_tokens=1, temperature=0, seed=0)
    names = iter(range(2 * requests))

    async def one(_: int) -> None:
        request = EngineRequest(str(next(names)), [1, 2, 3, 4], params)
        outputs = [output async for output in router.generate(request)]
        if outputs[-1].finish_reason != "length":
            raise SystemExit(f"the router ended a request with {outputs[-1]}")

    await _many(requests // 4, one, time.process_time)
    figures = await _many(requests, one, time.process_time)
    await router.close()
    return figures


async def dispatch_whole(requests: int) -> Figures:
    from phalanx import AsyncEngine, EngineConfig, SamplingParams

    use_echo()
    params = SamplingParams(max_tokens=1, temperature=0)
    async with AsyncEngine(EngineConfig.from_options(max_model_len=2048)) as engine:

        async def one(_: int) -> None:
            outputs = [output async for output in engine.generate("Once upon a time", params)]
            if not outputs[-1].finished:
                raise SystemExit(f"the engine ended a request with {outputs[-1]}")

        await _many(requests // 4, one, time.process_time)
        return await _many(requests, one, time.process_time)


async def dispatch_http(requests: int, servers: int) -> Figures:
    with contextlib.closing(Server([__file__, "--echo-server", str(servers)])) as server:
        connections = [await Connection.open(server.port) for _ in range(AT_ONCE)]
        parent = psutil.Process(server.process.pid)
        processes = [parent, *parent.children(recursive=True)]
        body = {"prompt": "Once upon a time", "max_tokens": 1, "temperature": 0}

        async def one(which: int) -> None:
            connections[which].send(body)
            await connections[which].whole()

        def cpu() -> float:
            return sum(sum(process.cpu_times()[:2]) for process in processes)

        await _many(requests // 4, one, cpu)
        figures = await _many(requests, one, cpu)
        for connection in connections:
            connection.close()
        return figures


def echo_server(servers: int) -> None:
    """As `phalanx serve`, with echoes."""
    use_echo()
    from phalanx import EngineConfig
    from phalanx.server.run import serve

    sys.exit(serve(EngineConfig.from_options(max_model_len=2048, port=0, api_server_count=servers)))


# Rounds


async def child(name: str, dtype: str, seed: int, requests: int) -> Figures:
    if name == "router":
        return await dispatch_router(requests)
    if name == "AsyncEngine, echo":
        return await dispatch_whole(requests)
    if name in DISPATCH:
        return await dispatch_http(requests, 2 if name.startswith("two") else 1)
    if name == WHOLE:
        whole = Whole(dtype)
        await whole.start()
        try:
            return await _after_a_warm_up(whole, seed)
        finally:
            await whole.close()
    with contextlib.closing(Alone(dtype) if name == ALONE else Served(dtype)) as side:
        return await _after_a_warm_up(side, seed)


async def _after_a_warm_up(side: Subject, seed: int) -> Figures:
    await side.streams(seed + 100)
    return await side.streams(seed)


def run(name: str, dtype: str, seed: int, requests: int) -> Figures:
    """One side in a process of its own."""
    command = [sys.executable, __file__, "--child", name, "--dtype", dtype, "--seed", str(seed)]
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    done = subprocess.run([*command, "--requests", str(requests)], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr}")
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def measure(names: list[str], rounds: int, dtype: str, requests: int) -> dict[str, Any]:
    figures: dict[str, list[Figures]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            figures[name].append(run(name, dtype, number, requests))
    result: dict[str, Any] = {"benchmark": "front_end", "dtype": dtype, "rounds": rounds}
    result["figures"] = {
        name: {figure: summary([of[figure] for of in rounds_of]) for figure in rounds_of[0]}
        for name, rounds_of in figures.items()
    }
    for name in (WHOLE, SERVER):
        if ALONE in figures and name in figures:
            pairs = list(zip(figures[name], figures[ALONE], strict=True))
            result[f"{name} / {ALONE}"] = {
                "throughput": summary([side["tok_s"] / alone["tok_s"] for side, alone in pairs]),
                "first_token_added_ms": summary(
                    [side["first_token_ms"] - alone["first_token_ms"] for side, alone in pairs]
                ),
            }
    result["hoped"] = {
        f"{WHOLE} / {ALONE}": {"throughput": LEAST_RATIO, "first_token_added_ms": MOST_MS},
        "AsyncEngine, echo": {"requests_s": LEAST_REQUESTS_S},
    }
    return {**result, **setting()}


def text(result: dict[str, Any]) -> str:
    lines = [
        f"{name}: " + ", ".join(f"{figure} {shown(values)}" for figure, values in of.items())
        for name, of in result["figures"].items()
    ]
    for name in (WHOLE, SERVER):
        if of := result.get(f"{name} / {ALONE}"):
            added = shown(of["first_token_added_ms"])
            lines.append(f"{name} / {ALONE}: throughput {shown(of['throughput'], 3)}, first token {added} ms later")
    hoped = f"{WHOLE} / {ALONE} {LEAST_RATIO} and {MOST_MS} ms, {LEAST_REQUESTS_S} requests/s through {WHOLE}"
    return "\n".join([*lines, f"hoped for: {hoped}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--requests", type=int, default=4000, help="of each side of `dispatch`")
    parser.add_argument("--side", action="append", choices=(*STREAMS, *DISPATCH), help="only these (repeatable)")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--echo-server", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.echo_server:
        echo_server(args.echo_server)
    elif args.child:
        answer = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what a library prints must not get into the answer
        print(json.dumps(asyncio.run(child(args.child, args.dtype, args.seed, args.requests))), file=answer, flush=True)
    else:
        result = measure(args.side or [*STREAMS, *DISPATCH], args.rounds, args.dtype, args.requests)
        write(result, args.json)
        print(text(result))


if __name__ == "__main__":
    main()

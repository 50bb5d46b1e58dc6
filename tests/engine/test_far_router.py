"""An API server's way to a router in another process, both ends here: a socket pair between `FarRouter` and
`FrontLink`, and a real `Router` behind it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from phalanx.engine.core_messages import Started
from phalanx.engine.echo import EchoEngine
from phalanx.engine.far_router import FarRouter
from phalanx.engine.frames import FrameStream
from phalanx.engine.front_link import FrontLink
from phalanx.engine.front_messages import Alive, decode_from_server, decode_to_server
from phalanx.engine.router import Router
from phalanx.errors import EngineDead, InvalidRequest
from tests.helpers.engine_requests import collect, collect_until, engine_request, tokens_of
from tests.helpers.processes import until


class Pair:
    """`link` is the router's end, `far` the server's."""

    def __init__(self, *engines: EchoEngine) -> None:
        self.engines = engines or (EchoEngine(),)
        self.router = Router(list(self.engines))
        self.told: list[Any] = []

    async def open(self) -> None:
        info = await self.router.start()
        ours, theirs = socket.socketpair()
        stream = await FrameStream.over(ours, decode_from_server)
        self.link = FrontLink(self.router, stream, heard=lambda: None, told=self.told.append)
        self.serving = asyncio.create_task(self.link.serve())
        self.far = FarRouter(
            await FrameStream.over(theirs, decode_to_server),
            beat=lambda: Alive(0),
            asked=lambda message: None,
            renewed=lambda info: None,
        )
        self.link.post(Started(info, self.router.status()))
        await self.far.start()

    async def close(self) -> None:
        await self.far.leave()
        await asyncio.wait_for(self.serving, 5)
        await self.router.close()

    @property
    def running(self) -> int:
        return sum(len(engine._running) for engine in self.engines)


@contextlib.asynccontextmanager
async def pair(*engines: EchoEngine) -> AsyncIterator[Pair]:
    made = Pair(*engines)
    await made.open()
    try:
        yield made
    finally:
        await made.close()


async def test_requests_are_answered_as_by_the_router_itself() -> None:
    async with pair(EchoEngine(), EchoEngine()) as both:
        answers = await asyncio.gather(
            *(collect(both.far.generate(engine_request(f"r{n}", prompt=(n, 2, 3), max_tokens=30))) for n in range(20))
        )
        for number, outputs in enumerate(answers):
            assert tokens_of(outputs) == [number, 2, 3] * 10
            assert [output.finish_reason for output in outputs if output.finish_reason] == ["length"]
        assert all(engine.requests for engine in both.engines), "the router spreads what comes from far away, too"
        assert isinstance(both.told[0], Alive)


async def test_what_nobody_reads_any_more_leaves_the_engine() -> None:
    async with pair(EchoEngine(delay=0.01)) as both:
        stream = both.far.generate(engine_request(max_tokens=1000))
        async for output in stream:
            if output.token_ids:
                break
        assert both.running == 1
        await stream.aclose()
        await until(lambda: both.running == 0)


async def test_abort_ends_a_stream_with_its_reason() -> None:
    async with pair(EchoEngine(delay=0.01)) as both:
        reading = asyncio.create_task(collect(both.far.generate(engine_request("gone", max_tokens=1000))))
        await until(lambda: both.running == 1)
        await both.far.abort("gone")
        assert (await reading)[-1].finish_reason == "abort"
        await until(lambda: both.running == 0)


async def test_when_a_server_is_gone_its_requests_leave_the_engine_and_others_go_on() -> None:
    engine = EchoEngine(delay=0.01)
    async with pair(engine) as gone:
        other = asyncio.create_task(collect(gone.router.generate(engine_request("other", max_tokens=100))))
        mine = [
            asyncio.create_task(
                collect_until(EngineDead, gone.far.generate(engine_request(f"r{n}", max_tokens=10_000)))
            )
            for n in range(3)
        ]
        await until(lambda: len(engine._running) == 4)
        await gone.far.leave()
        await asyncio.wait_for(gone.serving, 5)
        assert len(engine._running) == 1
        await asyncio.gather(*mine)
        assert len(tokens_of(await other)) == 100


async def test_when_the_router_is_gone_streams_end_and_it_is_lost() -> None:
    async with pair(EchoEngine(delay=0.01)) as both:
        reading = asyncio.create_task(collect_until(EngineDead, both.far.generate(engine_request(max_tokens=10_000))))
        await until(lambda: both.running == 1)
        await both.link.close()
        await asyncio.wait_for(reading, 5)
        assert "is gone" in str(await asyncio.wait_for(both.far.lost(), 5))
        assert both.far.status().state == "failed"
        with pytest.raises(EngineDead):
            await collect(both.far.generate(engine_request("late")))


async def test_errors_keep_their_class_and_status() -> None:
    async with pair(EchoEngine(max_requests=0)) as both:
        (output,) = await collect(both.far.generate(engine_request()))
        assert output.error is not None and output.error.status == 503 and output.error.retry_after
    async with pair(EchoEngine(delay=0.01)) as both:
        reading = asyncio.create_task(collect(both.far.generate(engine_request("lost", max_tokens=10_000))))
        await until(lambda: both.running == 1)
        both.engines[0].die()
        error = (await asyncio.wait_for(reading, 10))[-1].error
        assert error is not None and error.status == 503 and error.retry_after is None


async def test_an_id_that_runs_is_refused() -> None:
    async with pair(EchoEngine(delay=0.01)) as both:
        reading = asyncio.create_task(collect(both.router.generate(engine_request("same", max_tokens=20))))
        await until(lambda: both.running == 1)
        (output,) = await collect(both.far.generate(engine_request("same")))
        assert output.error is not None and output.error.status == 400
        stream = both.far.generate(engine_request("mine", max_tokens=1000))
        await anext(stream)
        with pytest.raises(InvalidRequest):
            await collect(both.far.generate(engine_request("mine")))
        await stream.aclose()
        assert len(tokens_of(await reading)) == 20

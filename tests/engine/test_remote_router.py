"""API servers' way to a router on another machine, both ends here: `RemoteRouter`, a real connection, `RemoteServers`,
`FrontEnds.host` and a real `Router` behind it. The connection breaks, the router goes and comes back, callers are
wrong."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from phalanx.config import EngineConfig
from phalanx.distributed.transports.abort import GroupBroken
from phalanx.engine import remote_router
from phalanx.engine.client import EngineOutput, EngineRequest
from phalanx.engine.core_messages import BrokenFrame
from phalanx.engine.echo import EchoEngine
from phalanx.engine.front_ends import FrontEnds
from phalanx.engine.front_messages import Alive
from phalanx.engine.remote_link import Join, Refused, SealedStream, call, decode_greeting, join_key
from phalanx.engine.remote_router import RemoteRouter
from phalanx.engine.remote_servers import RemoteServers, open_door
from phalanx.engine.router import Router
from phalanx.errors import ConfigError, EngineDead
from phalanx.executor.node_messages import FileFact, Survey
from phalanx.executor.survey import text_versions
from phalanx.metrics.counts import Counts, Family
from tests.helpers.engine_requests import collect, engine_request, tokens_of
from tests.helpers.processes import until
from tests.helpers.serving import free_port

SURVEY = Survey({}, [FileFact("config.json", 10, "ab"), FileFact("tokenizer.json", 20, "cd")])
WEIGHTS = FileFact("model.safetensors", 1000, "ef")
LONG = 100_000
CANARY = Path("/tmp/phalanx-was-here")


def counted(value: float) -> Counts:
    return {"phalanx:things": Family("counter", [("phalanx:things_total", (), value)])}


def value(counts: Counts) -> float:
    return counts["phalanx:things"].samples[0][2]


class RouterSide:
    """A machine with engines."""

    def __init__(self, port: int, engine: EchoEngine | None = None, survey: Survey = SURVEY, **options: Any):
        options = {"transport_key": "secret", "router_listen": f"127.0.0.1:{port}", "api_server_count": 0, **options}
        self.config = EngineConfig.from_options(**options)
        self.engine, self._survey = engine or EchoEngine(delay=0.005), survey

    async def open(self) -> RouterSide:
        self.router = Router([self.engine])
        info = await self.router.start()
        self.ends = FrontEnds(
            self.config, self.router, [], inherited=(), cleared=lambda n: None, counts=lambda: counted(1)
        )
        self.ends.started(info)
        self.door = open_door(self.config)
        self.servers = RemoteServers(self.config, self.door, self.ends.host)
        self.servers._located.set_result(("echo", self._survey))
        return self

    async def close(self) -> None:
        await self.servers.close()
        await self.ends.close()
        await self.router.close()
        self.door.close()

    @property
    def running(self) -> int:
        return len(self.engine._running)


class ServersSide:
    """A machine without any."""

    requests = 3

    def __init__(self, port: int, survey: Survey = SURVEY, **options: Any):
        options = {"transport_key": "secret", "router": f"127.0.0.1:{port}", **options}
        self.said: list[str] = []
        self.drained: list[float] = []
        self.router = RemoteRouter(
            EngineConfig.from_options(**options), say=self.said.append, renewed=lambda info: None
        )
        self.router.survey, self.router.servers = survey, self

    def known(self) -> Counts:
        return counted(10)

    async def counted(self) -> Counts:
        return counted(10)

    def drain(self, seconds: float) -> None:
        self.drained.append(seconds)

    async def hurt(self) -> None:
        """Its connection ends, without a word."""
        far = self.router._far
        assert far is not None
        far._stream.abort()
        await until(lambda: self.router._far is not far)


@contextlib.asynccontextmanager
async def both(**options: Any) -> AsyncIterator[tuple[RouterSide, ServersSide]]:
    port = free_port()
    near, far = await RouterSide(port, **options).open(), ServersSide(port, **options)
    try:
        await far.router.start()
        yield near, far
    finally:
        await far.router.close()
        await near.close()


def ask(far: ServersSide, name: str, tokens: int = 400, **params: Any) -> tuple[list[EngineOutput], asyncio.Task[Any]]:
    found: list[EngineOutput] = []
    request = engine_request(name, prompt=range(1, 8), max_tokens=tokens, **params)
    return found, asyncio.create_task(collect(far.router.generate(request), found))


def echoed(tokens: int) -> list[int]:
    return [1 + n % 7 for n in range(tokens)]


@pytest.mark.parametrize("encrypt", [False, True])
async def test_requests_are_answered_as_by_the_router_itself(encrypt: bool) -> None:
    async with both(encrypt_transport=encrypt) as (near, far):
        asked = [ask(far, f"r{n}", 50, logprobs=1) for n in range(20)]
        await asyncio.gather(*(task for _, task in asked))
        assert [tokens_of(found) for found, _ in asked] == [echoed(50)] * 20
        assert far.router.status().state == "ready" and near.running == 0
        assert "joined the router" in far.said[0]


async def test_a_link_that_breaks_loses_and_repeats_nothing() -> None:
    """Three times: a request is not to blame for it, however often it was there."""
    async with both() as (near, far):
        asked = [ask(far, f"r{n}") for n in range(4)]
        for times in range(1, 4):
            before = sum(len(found) for found, _ in asked)
            await until(lambda before=before: sum(len(found) for found, _ in asked) > before + 20)
            await far.hurt()
            await until(lambda times=times: len(near.engine.requests) == 4 * (times + 1))
        await asyncio.gather(*(task for _, task in asked))
        assert [tokens_of(found) for found, _ in asked] == [echoed(400)] * 4
        assert far.router.status().state == "ready"


def test_requests_that_come_while_the_link_breaks() -> None:
    """On the loop that servers have, which is strict about what is written to a connection that is closed."""

    async def in_each_turn() -> None:
        async with both() as (_, far):
            connection, asked = far.router._far, []
            assert connection is not None
            connection._stream.abort()
            while far.router._far is connection:
                asked.append(ask(far, f"r{len(asked)}", 20))
                await asyncio.sleep(0)
            await asyncio.gather(*(task for _, task in asked))
            assert len(asked) > 1 and all(tokens_of(found) == echoed(20) for found, _ in asked)

    pytest.importorskip("uvloop").run(in_each_turn())


async def test_a_request_that_comes_as_the_network_is_given_up() -> None:
    """The kernel's word for it is no ConnectionError."""
    async with both() as (_, far):
        assert far.router._far is not None
        found, task = ask(far, "r", 20)
        far.router._far._stream._reader.set_exception(TimeoutError(errno.ETIMEDOUT, "Connection timed out"))
        await task
        assert tokens_of(found) == echoed(20)


async def test_streams_go_on_at_another_life_of_the_router() -> None:
    port = free_port()
    near, far = await RouterSide(port).open(), ServersSide(port)
    await far.router.start()
    found, task = ask(far, "r")
    await until(lambda: len(found) > 20)
    await near.close()
    await until(lambda: far.router.status().state == "recovering")
    await until(lambda: (far.router.status().cause or "").endswith("It was called again: Connection refused."))
    late, later = ask(far, "late", 20)
    await until(lambda: bool(late))
    assert not late[0].token_ids and late[0].error is None, "accepted, and waits"
    near = await RouterSide(port).open()
    await asyncio.gather(task, later)
    assert tokens_of(found) == echoed(400) and tokens_of(late) == echoed(20)
    assert len(near.engine.requests[0].output_token_ids) > 10, "it went on where it was"
    await far.router.close()
    await near.close()


async def test_answers_do_not_go_on_with_other_weights() -> None:
    """The servers have no weights to compare."""
    port = free_port()
    near, far = await RouterSide(port).open(), ServersSide(port)
    await far.router.start()
    found, task = ask(far, "r")
    await until(lambda: len(found) > 20)
    await near.close()
    other = EchoEngine(delay=0.005)
    other._info = msgspec.structs.replace(other._info, weights="others")
    near = await RouterSide(port, other).open()
    await until(lambda: "are not those that the server started with" in (far.router.status().cause or ""))
    assert far.router.status().state == "recovering" and not other.requests
    await near.close()
    near = await RouterSide(port).open()
    await task
    assert tokens_of(found) == echoed(400)
    await far.router.close()
    await near.close()


async def test_a_former_connection_of_the_same_servers_is_given_up() -> None:
    """They may be back before anybody has noticed that they were gone, with the same ids."""
    async with both() as (near, far):
        found, task = ask(far, "r")
        await until(lambda: len(found) > 5)
        with contextlib.suppress(EOFError, OSError, BrokenFrame):
            await _greeted(near, near.door.getsockname()[1], Join(far.router._session, "b", 1, text_versions(), SURVEY))
        await asyncio.wait_for(task, 20)
        assert tokens_of(found) == echoed(400)
        (guests,) = near.ends._guests.values()
        assert guests.life == 3 and near.running == 0


async def test_two_groups_may_use_the_same_ids() -> None:
    async with both() as (near, far):
        other = ServersSide(near.door.getsockname()[1])
        await other.router.start()
        asked = [ask(side, "same") for side in (far, other)]
        await until(lambda: near.running == 2)
        await far.router.abort("same")
        await asyncio.gather(*(task for _, task in asked))
        assert [found[-1].finish_reason for found, _ in asked] == ["abort", "length"]
        assert tokens_of(asked[1][0]) == echoed(400)
        await other.router.close()


async def test_what_nobody_reads_any_more_leaves_the_engine() -> None:
    async with both() as (near, far):
        stream = far.router.generate(engine_request(max_tokens=LONG))
        async for output in stream:
            if output.token_ids:
                break
        assert near.running == 1
        await stream.aclose()
        await until(lambda: near.running == 0)
        found, task = ask(far, "gone", LONG)
        await until(lambda: near.running == 1)
        await far.router.abort("gone")
        await task
        assert found[-1].finish_reason == "abort"
        await until(lambda: near.running == 0)


@pytest.mark.parametrize("ahead", [-1e6, 1e6])
async def test_times_are_those_of_the_clock_here(ahead: float) -> None:
    """Each machine counts seconds from when it was started."""

    class Elsewhere(EchoEngine):
        async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
            async for output in super().generate(request):
                if output.scheduled_s is not None:
                    now = time.monotonic() + ahead
                    output = msgspec.structs.replace(output, queued_s=now - 0.5, scheduled_s=now)
                yield output

    port = free_port()
    near, far = await RouterSide(port, Elsewhere(delay=0.005)).open(), ServersSide(port)
    await far.router.start()
    before = time.monotonic()
    found = await collect(far.router.generate(engine_request()))
    (queued, scheduled), *others = [(o.queued_s, o.scheduled_s) for o in found if o.scheduled_s is not None]
    assert before <= queued <= time.monotonic() and scheduled == pytest.approx(queued + 0.5) and not others
    await far.router.close()
    await near.close()


async def test_servers_that_leave_or_vanish_leave_nothing() -> None:
    async with both() as (near, far):
        _, task = ask(far, "r", LONG)
        await until(lambda: near.running == 1)
        assert near.ends.requests == 3
        await far.router.close()
        with pytest.raises(EngineDead):
            await task
        await until(lambda: near.running == 0 and near.ends.requests == 0)


@pytest.mark.parametrize("mute", ["router", "servers"])
async def test_who_falls_silent_is_given_up_and_comes_back(mute: str) -> None:
    """Its connection does not end: the other side notices by itself. Requests go on where they were."""
    async with both() as (near, far):
        found, task = ask(far, "r", 300)
        await until(lambda: len(found) > 5)
        connection, (guests,) = far.router._far, near.ends._guests.values()
        assert connection is not None and guests.link is not None
        stream = connection._stream if mute == "servers" else guests.link._stream
        stream.post = lambda message: None  # type: ignore[method-assign]
        await until(lambda: guests.life == 2, 10)
        await asyncio.wait_for(task, 30)
        assert tokens_of(found) == echoed(300) and near.running == 0
        assert connection._lost is not None
        assert ("it has not answered for 3" in connection._lost.cause) == (mute == "router"), connection._lost.cause


async def test_counts_are_of_both_sides_and_never_twice() -> None:
    async with both() as (near, far):
        assert value(await far.router.gather(counted(10))) == 1
        place = near.ends._guests[far.router._session]
        assert value(place.counted) == 10
        assert value(await near.ends.counted()) == 11
        await far.hurt()
        assert value(await far.router.gather(counted(10))) == 1, "what was shown stays counted"
        await until(lambda: place.life == 2)
        assert value(await near.ends.counted()) == 11


async def test_drain_is_handed_on_and_then_the_end_of_the_router_is_no_loss() -> None:
    async with both() as (near, far):
        found, task = ask(far, "r", 200)
        await until(lambda: len(found) > 5)
        near.ends.drain(20.0)
        await asyncio.wait_for(far.router.drains(), 5)
        assert far.drained == [20.0] and far.router.drain_seconds == 20.0
        await task
        assert tokens_of(found) == echoed(200)
        await near.servers.close()
        assert "has ended" in str(await asyncio.wait_for(far.router.lost(), 5))


async def test_without_recovery_streams_end_at_once() -> None:
    async with both(enable_recovery=False) as (near, far):
        _, task = ask(far, "r", LONG)
        await until(lambda: near.running == 1)
        far.router._far._stream.abort()  # type: ignore[union-attr]
        with pytest.raises(EngineDead, match="was lost"):
            await asyncio.wait_for(task, 5)
        assert far.router.status().state == "failed"
        with pytest.raises(EngineDead):
            await collect(far.router.generate(engine_request("late")))


async def test_after_the_recovery_timeout_streams_end() -> None:
    async with both(recovery_timeout=1.0) as (near, far):
        _, task = ask(far, "r", LONG)
        await until(lambda: near.running == 1)
        await near.close()
        with pytest.raises(EngineDead, match="Waited 1 s for the router"):
            await asyncio.wait_for(task, 10)


async def test_while_the_router_is_away_so_many_may_wait_as_would_have_had_a_place() -> None:
    async with both(max_num_queued_reqs=2, max_num_seqs=1) as (near, far):
        await near.close()
        await until(lambda: far.router.status().state == "recovering")
        waiting = [ask(far, f"r{n}") for n in range(3)]
        await until(lambda: all(found for found, _ in waiting))
        (refused,) = await collect(far.router.generate(engine_request("one too many")))
        assert refused.error is not None and refused.error.status == 503 and refused.error.retry_after
        assert far.router.status().waiting == 3
        for _, task in waiting:
            task.cancel()


# Who is turned away


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"transport_key": "another"}, "transport keys differ"),
        ({"transport_key": None}, "transport keys differ"),
        ({"encrypt_transport": True}, "only one side encrypts"),
    ],
)
async def test_a_wrong_key_is_said_at_once(
    options: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    near, far = await RouterSide(port).open(), ServersSide(port, **options)
    with pytest.raises(ConfigError, match=says):
        await asyncio.wait_for(far.router.start(), 5)
    assert near.servers.refused == 3 and not near.ends._guests
    assert "Turned away a caller from 127.0.0.1: it does not have the transport key." in caplog.text
    await far.router.close()
    await near.close()


async def test_a_router_that_is_just_ending_turns_nobody_away() -> None:
    """It closes the connection without a word, as it would for a wrong key. Who is early waits for the next one."""
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as door:
        far = ServersSide(port)
        starting = asyncio.create_task(far.router.start())
        (await asyncio.to_thread(door.accept))[0].close()
    near = await RouterSide(port).open()
    await asyncio.wait_for(starting, 10)
    assert "waiting for the router" in far.said[0] and "it ended the connection" in far.said[0]
    await far.router.close()
    await near.close()


async def test_a_router_that_hangs_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_router, "_ANSWER_S", 0.2)
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as door:
        far = ServersSide(port)
        starting = asyncio.create_task(far.router.start())
        calls = [await asyncio.to_thread(door.accept) for _ in range(5)]
        assert "waiting for the router" in far.said[0] and "it did not answer in time" in far.said[0]
    for sock, _ in calls:
        sock.close()
    near = await RouterSide(port).open()
    await asyncio.wait_for(starting, 10)
    await far.router.close()
    await near.close()


async def test_without_a_key_both_sides_warn(caplog: pytest.LogCaptureFixture) -> None:
    async with both(transport_key=None) as (_, far):
        assert "WARNING: no transport key" in far.said[0]
        assert "No transport key: ANYBODY who can reach" in caplog.text


def _changed(survey: Survey, **changes: Any) -> Survey:
    return Survey({}, [*survey.files[:-1], msgspec.structs.replace(survey.files[-1], **changes)])


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        (_changed(SURVEY, size=21), "tokenizer.json has 20 bytes on .* and 21 bytes? on|tokenizer.json has 20 bytes"),
        (_changed(SURVEY, sum="xx"), "tokenizer.json begins differently"),
        (Survey({}, SURVEY.files[:1]), "lacks tokenizer.json"),
        (Survey({}, [*SURVEY.files, msgspec.structs.replace(WEIGHTS, size=999)]), "model.safetensors has 1000 bytes"),
    ],
)
async def test_servers_of_another_model_are_turned_away(theirs: Survey, says: str) -> None:
    port = free_port()
    near = await RouterSide(port, survey=Survey({}, [*SURVEY.files, WEIGHTS])).open()
    far = ServersSide(port, survey=theirs)
    with pytest.raises(ConfigError, match=says) as refused:
        await asyncio.wait_for(far.router.start(), 5)
    assert "Here the model is echo." in (refused.value.fix or "")
    await far.router.close()
    await near.close()


async def test_weights_need_not_be_where_only_text_is_worked_on() -> None:
    port = free_port()
    near, far = await RouterSide(port, survey=Survey({}, [*SURVEY.files, WEIGHTS])).open(), ServersSide(port)
    await asyncio.wait_for(far.router.start(), 5)
    await far.router.close()
    await near.close()


async def _greeted(near: RouterSide, port: int, first: msgspec.Struct | bytes) -> Any:
    key = join_key(near.config.parallel, port)
    secure = await call("127.0.0.1", port, key, encrypt=False, answer_s=5)
    stream: SealedStream[Any] = await SealedStream.after(secure, lambda body: body, 1 << 20)
    try:
        if isinstance(first, bytes):
            stream._writer.write(first)
        else:
            stream.post(first)
        return decode_greeting(await asyncio.wait_for(stream.body(), 8))
    finally:
        stream.abort()


async def test_another_version_is_named() -> None:
    port = free_port()
    near = await RouterSide(port).open()
    join = Join("s", "node-b", 1, {"Phalanx": "0.0.1"}, SURVEY)
    refused = await _greeted(near, port, join)
    assert isinstance(refused, Refused) and "Phalanx is" in refused.message and "0.0.1 on node-b" in refused.message
    await near.close()


NONSENSE: dict[str, Callable[[], msgspec.Struct | bytes]] = {
    "random bytes": lambda: os.urandom(500),
    "a pickle": lambda: b"\x80\x04\x95cposix\nsystem\n(S'touch /tmp/phalanx-was-here'\ntR." + bytes(100),
    "a frame that is too long": lambda: Join("s" * (2 << 20), "b", 1, {}, SURVEY),
    "a message of another kind": lambda: Refused("no"),
}


@pytest.mark.parametrize("nonsense", NONSENSE)
async def test_who_has_the_key_and_talks_nonsense_is_dropped(nonsense: str) -> None:
    async with both() as (near, far):
        port = near.door.getsockname()[1]
        with pytest.raises((EOFError, OSError, GroupBroken, BrokenFrame)):
            await _greeted(near, port, NONSENSE[nonsense]())
        assert near.servers.refused == 1
        assert not CANARY.exists()  # noqa: ASYNC240 (at once)
        found, task = ask(far, "r", 20)
        await task
        assert tokens_of(found) == echoed(20), "nobody else notices"


async def test_callers_without_the_key_get_no_answer() -> None:
    async with both() as (near, _):
        for words in (b"GET / HTTP/1.1\r\n\r\n" + bytes(100), bytes(500), b"\x80\x04cposix\n" + bytes(100)):
            reader, writer = await asyncio.open_connection("127.0.0.1", near.door.getsockname()[1])
            writer.write(words)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 8) == b""
            writer.close()
        assert near.servers.refused == 3


async def test_callers_that_say_nothing_keep_nobody_out() -> None:
    async with both() as (near, far):
        port = near.door.getsockname()[1]
        mute = [socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.9", 0)) for _ in range(40)]
        await until(lambda: len(near.servers._callers) == 32)
        await far.hurt()
        await until(lambda: far.router.status().state == "ready", 4)
        for sock in mute:
            sock.close()
        await until(lambda: not near.servers._callers)


async def test_a_frame_that_was_changed_ends_the_connection() -> None:
    async with both() as (_, far):
        connection = far.router._far
        assert connection is not None
        words = memoryview(msgspec.msgpack.encode(Alive(1)))
        data = bytearray(b"".join(connection._stream._secure.seal(1, words)))  # type: ignore[attr-defined]
        data[-1] ^= 1
        connection._stream._writer.write(data)
        await until(lambda: far.router._far is not connection, 5)


async def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_router, "JOIN_LIMIT_S", 1.0)
    far = ServersSide(free_port())
    with pytest.raises(ConfigError, match=r"Waited 1 s for the router at .*, in vain: Connection refused"):
        await far.router.start()
    assert far.said[0].startswith("waiting for the router at") and "gives up after 1 s" in far.said[0]
    await far.router.close()


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("0.0.0.0:29600", "would open this node to every network"),
        ("192.0.2.1:29600", "not an address of this node"),
        ("localhost:29600", "not an IP address"),
    ],
)
def test_addresses_that_cannot_be_listened_on(address: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_door(EngineConfig.from_options(router_listen=address))


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="in use by another program") as error:
            open_door(EngineConfig.from_options(router_listen=address))
        assert "--router-listen" in (error.value.fix or "")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1", "10.0.0.1:29600"),
        ("node-a:80", "node-a:80"),
        ("fd00::1", "[fd00::1]:29600"),
        ("[fd00::1]:80", "[fd00::1]:80"),
    ],
)
def test_how_addresses_are_written(text: str, address: str) -> None:
    assert EngineConfig.from_options(router=text).server.router == address


@pytest.mark.parametrize("text", ["", "a:b", "a:0", "a:70000", "http://a:1", "a b", ":80"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError):
        EngineConfig.from_options(router=text)

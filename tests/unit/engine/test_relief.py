"""When requests leave a slow engine: a model of engines in virtual time, and echo engines of which one is slow."""

from __future__ import annotations

import asyncio
import itertools
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.engine import recovery as recovery_module
from phalanx.engine import relief as relief_module
from phalanx.engine import router as router_module
from phalanx.engine.client import EngineOutput, RequestError
from phalanx.engine.echo import EchoEngine
from phalanx.engine.relief import Move, Relief, Sight
from phalanx.engine.router import Router
from phalanx.engine.routing import LeastWork
from tests.helpers.engine_requests import collect, engine_request, tokens_of
from tests.helpers.processes import until


def watch(relief: Relief, streams: list[int], token_s: list[float], seconds: float) -> list[Move]:
    """What it says while engine i takes `token_s[i]` over a token of each of its streams. Nobody follows."""
    moves = []
    for _ in range(round(seconds / 0.25)):
        made = [int(count * 25 / each) if each else 0 for count, each in zip(streams, token_s, strict=True)]
        sights = [Sight(True, count, tokens) for count, tokens in zip(streams, made, strict=True)]
        move = relief.look(sights, 0.25)
        moves += [move] if move is not None else []
    return moves


@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0.8, 1.2)), min_size=2, max_size=5))
def test_engines_that_are_alike_are_left_alone_whatever_the_noise(found) -> None:
    streams = [found[0][0]] * len(found)
    assert watch(Relief(len(found)), streams, [0.05 * noise for _, noise in found], 20) == []


@given(st.integers(1, 60), st.floats(2.5, 50))
def test_a_slow_one_is_relieved_after_a_while(streams, times) -> None:
    moves = watch(Relief(3), [streams] * 3, [0.05, 0.05 * times, 0.05], 10)
    if streams >= 4:  # with few, one more there weighs as much as the slowness here
        assert moves
    for move in moves:
        assert move.source == 1
        assert 1 <= move.count <= max(1, streams // 4)
    assert watch(Relief(3), [streams] * 3, [0.05, 0.05 * times, 0.05], relief_module.HOLD_S - 0.5) == []


def test_one_that_stands_still_is_relieved_too() -> None:
    relief = Relief(2)
    watch(relief, [4, 4], [0.05, 0.05], 5)
    assert watch(relief, [4, 4], [0.05, 0.0], 6)[0].source == 1


def test_one_that_computes_prompts_is_given_time_for_them() -> None:
    """16 prompts of 128 tokens, in one step of 4 seconds there and of 8 here; then both go on at the same pace."""

    def played(here: float, pending: int = 2048) -> list[Move]:
        relief, moves = Relief(2), []
        for look in range(300):
            sights = []
            for ready in (4.0, here):
                now = look * 0.25
                done, first = now >= ready, ready <= now < ready + 0.25
                sights.append(Sight(True, 16, 16 * done, pending * first, 0 if done else pending))
            move = relief.look(sights, 0.25)
            moves += [move] if move is not None else []
        return moves

    assert played(8.0) == []
    assert played(1000.0)  # it will not come
    assert played(8.0, pending=0)  # without prompts that is much too long


def test_requests_that_all_went_to_one_while_the_other_was_away_are_shared() -> None:
    relief, streams, moved = Relief(2), [32, 0], 0
    for _ in range(80):
        token_s = [0.02 + 0.0025 * count for count in streams]
        for move in watch(relief, streams, token_s, 0.25):
            assert (move.source, move.target) == (0, 1)
            streams = [streams[0] - move.count, streams[1] + move.count]
            moved += move.count
    assert 8 <= moved <= 16


def test_it_ends_and_does_not_come_back() -> None:
    """One engine is four times as slow. Whoever has left stays away: no request goes back and forth."""
    relief, streams, moves = Relief(2), [12, 12], []
    for _ in range(200):
        token_s = [0.02 + 0.002 * streams[0], 4 * (0.02 + 0.002 * streams[1])]
        for move in watch(relief, streams, token_s, 0.25):
            moves.append(move)
            streams[move.source] -= move.count
            streams[move.target] += move.count
    assert {move.source for move in moves} == {1}
    assert sum(move.count for move in moves) <= 12
    assert relief.slowness()[0] == 1.0


def test_slowness_is_known_and_forgiven() -> None:
    relief = Relief(2)
    assert relief.slowness() == [1.0, 1.0]
    watch(relief, [8, 8], [0.05, 0.2], 8)
    assert relief.slowness() == [1.0, pytest.approx(4, rel=0.1)]
    watch(relief, [8, 0], [0.05, 0.0], 60)
    assert relief.slowness() == [1.0, 1.0]
    watch(relief, [8, 8], [0.05, 0.2], 8)
    relief.forget(1)
    assert relief.slowness() == [1.0, 1.0]


# -- with a router


@pytest.fixture
def quick(monkeypatch):
    """The same in a tenth of the time."""
    for module, name in ((relief_module, "HOLD_S"), (relief_module, "WINDOW_S"), (router_module, "_LOOK_S")):
        monkeypatch.setattr(module, name, getattr(module, name) / 10)
    monkeypatch.setattr(relief_module, "EVIDENCE_S", 0.05)


async def served(relieve: bool) -> tuple[float, int, Router]:
    """Seconds for 12 requests, half of them at an engine that takes 20 times as long; and how many were moved."""
    fast, slow = EchoEngine(delay=0.002), EchoEngine(delay=0.04)
    router = Router([fast, slow], relieve=relieve, routing=LeastWork())
    await router.start()
    begin = time.monotonic()
    requests = [engine_request(f"r{i}", prompt=(i, i + 1, i + 2), max_tokens=60) for i in range(12)]
    found = await asyncio.gather(*(collect(router.generate(request)) for request in requests))
    seconds = time.monotonic() - begin
    for i, outputs in enumerate(found):
        assert tokens_of(outputs) == [i, i + 1, i + 2] * 20
        assert [output.finish_reason for output in outputs if output.finish_reason] == ["length"]
        assert sum(1 for output in outputs if not output.token_ids) == 1
    moved = router.status().engines[1].relieved
    assert router.status().engines[0].relieved == 0
    assert all(each.outstanding == 0 for each in router.status().engines)
    await router.close()
    return seconds, moved, router


async def test_requests_leave_a_slow_engine_and_nobody_notices_but_by_the_clock(quick):
    stuck, none, _ = await served(relieve=False)
    assert none == 0
    quickest = stuck
    for _ in range(4):  # a busy machine may hold one up
        seconds, moved, _ = await served(relieve=True)
        assert moved >= 4
        quickest = min(quickest, seconds)
        if quickest < 0.6 * stuck:
            return
    raise AssertionError(f"{quickest:.2f} s instead of {stuck:.2f} s")


class Queue(EchoEngine):
    """Answers one request at a time, in order."""

    def __init__(self, **options):
        super().__init__(**options)
        self.turn = asyncio.Lock()

    def status(self):
        status = super().status()
        status.waiting = max(0, status.running - 1)
        return status

    async def generate(self, request):
        stream = super().generate(request)
        yield await anext(stream)
        while self.turn.locked():
            await asyncio.sleep(0.001)
            if self._running[request.request_id]:
                yield EngineOutput(request.request_id, 0, finish_reason="abort")
                return
        async with self.turn:
            async for output in stream:
                yield output


async def test_those_that_wait_move_first(quick):
    """The one that runs is left where it is until nobody waits."""
    fast, slow = EchoEngine(delay=0.002), Queue(delay=0.05)
    router = Router([slow, fast], routing=LeastWork())
    await router.start()
    streams = [asyncio.create_task(collect(router.generate(engine_request(f"r{i}", max_tokens=40)))) for i in range(8)]
    await until(lambda: len(slow.requests) == len(fast.requests) == 4)
    first = [request.request_id for request in slow.requests]
    await until(lambda: router.status().engines[0].relieved > 0)
    for outputs in await asyncio.gather(*streams):
        assert tokens_of(outputs) == ([1, 2, 3] * 14)[:40]
    moved = [request.request_id for request in fast.requests[4:]]
    assert moved[:3] == first[:0:-1]  # the youngest first
    assert all(not request.output_token_ids for request in fast.requests[4:7])
    await router.close()


async def test_what_is_nearly_done_stays(quick):
    """Half of the requests have more behind them than before them."""
    slow, fast = EchoEngine(delay=0.03), EchoEngine(delay=0.002)
    router = Router([slow, fast], routing=LeastWork())
    await router.start()
    requests = [engine_request(f"r{i}", prompt=(7,) * (40 if i % 4 else 2), max_tokens=40) for i in range(8)]
    await asyncio.gather(*(collect(router.generate(request)) for request in requests))
    moved = {request.request_id for request in fast.requests if request.output_token_ids}
    there = {request.request_id for request in slow.requests}
    assert moved == {request.request_id for request in requests if len(request.prompt_token_ids) == 2} & there
    await router.close()


async def test_an_abort_while_it_moves_is_an_abort(quick):
    fast, slow = EchoEngine(delay=0.002), EchoEngine(delay=0.03)
    router = Router([slow, fast], routing=LeastWork())
    await router.start()
    streams = [asyncio.create_task(collect(router.generate(engine_request(f"r{i}", max_tokens=90)))) for i in range(8)]
    await until(lambda: router.status().engines[0].relieved > 0)
    ids = [request.request_id for request in slow.requests]
    for request_id in ids:
        await router.abort(request_id)
    found = {f"r{i}": outputs for i, outputs in enumerate(await asyncio.gather(*streams))}
    for request_id in ids:
        assert found[request_id][-1].finish_reason in ("abort", "length")
    assert any(outputs[-1].finish_reason == "abort" for outputs in found.values())
    await router.close()


async def test_one_that_fails_while_it_is_to_leave_has_failed(quick):
    class Failing(Queue):
        told = asyncio.Event()

        async def generate(self, request):
            yield EngineOutput(request.request_id, 0)
            await self.told.wait()
            error = RequestError("It is a bad request.", status=400)
            yield EngineOutput(request.request_id, 0, finish_reason="error", error=error)

        async def abort(self, request_id):
            self.told.set()

    slow, fast = Failing(), EchoEngine()
    router = Router([slow, fast], routing=LeastWork())
    await router.start()
    stream = asyncio.create_task(collect(router.generate(engine_request(max_tokens=9))))
    await until(lambda: bool(router._engines[0].members) and router._cursors["r#0"].accepted)
    await router._move(Move(0, 1, 1))
    outputs = await stream
    assert [output.finish_reason for output in outputs if output.finish_reason] == ["error"]
    assert fast.requests == []
    await router.close()


@pytest.mark.parametrize("seed", range(6))
async def test_moves_and_losses_and_aborts_at_random(seed, monkeypatch):
    """Whatever happens to a request, its tokens come once, in order, and it ends once; nothing is left behind."""
    monkeypatch.setattr(recovery_module, "BACK_OFF_S", (0.0, 0.005))
    draw, engines = random.Random(seed), []

    def make() -> EchoEngine:
        engines.append(EchoEngine(delay=0.001 * draw.randrange(3), die_after=draw.choice([None, None, 150])))
        return engines[-1]

    router = Router([make() for _ in range(3)], make=make, relieve=True)
    await router.start()
    requests = [
        engine_request(f"r{i}", prompt=(i, i + 1, i + 2), max_tokens=draw.randrange(1, 60), prompt_logprobs=0)
        for i in range(40)
    ]
    streams = [asyncio.create_task(collect(router.generate(request))) for request in requests]
    aborted = set()
    while not all(stream.done() for stream in streams):
        await asyncio.sleep(0.001)
        source, target = draw.sample(range(3), 2)
        await router._move(Move(source, target, draw.randrange(1, 6)))
        if draw.random() < 0.1:
            aborted.add(f"r{draw.randrange(40)}")
            await router.abort(max(aborted))
    for request, stream in zip(requests, streams, strict=True):
        outputs = stream.result()
        tokens = tokens_of(outputs)
        assert tokens == [request.prompt_token_ids[n % 3] for n in range(len(tokens))]
        reasons = [output.finish_reason for output in outputs if output.finish_reason]
        assert len(reasons) == 1
        assert outputs[-1].finish_reason == reasons[0]
        if reasons != ["abort"]:
            assert (reasons, len(tokens)) == (["length"], request.sampling.max_tokens)
            assert sum(len(output.prompt_logprobs or ()) for output in outputs) == 2
        else:
            assert request.request_id in aborted
    assert sum(each.relieved for each in router.status().engines) > 0
    assert [each.outstanding for each in router.status().engines] == [0, 0, 0]
    assert [engine.pending for engine in router._engines] == [0, 0, 0]
    await router.close()


async def test_a_single_engine_is_not_watched():
    router = Router([EchoEngine(delay=0.001)])
    await router.start()
    before = len(asyncio.all_tasks())
    await collect(router.generate(engine_request(max_tokens=3)))
    assert len(asyncio.all_tasks()) <= before
    (only,) = router.status().engines
    assert (only.state, only.outstanding, only.relieved) == ("ready", 0, 0)
    await router.close()


async def test_conversations_stay_where_they_began():
    engines = [EchoEngine(), EchoEngine(), EchoEngine()]
    router = Router(engines)
    await router.start()
    for turn, talk in itertools.product(range(4), range(9)):
        prompt = [talk] * 48 + list(range(100, 100 + 30 * turn))
        await collect(router.generate(engine_request(f"{talk}.{turn}", prompt=prompt, max_tokens=2)))
    homes = [{request.request_id.split(".")[0] for request in engine.requests} for engine in engines]
    assert sum(len(home) for home in homes) == 9  # each in one place
    assert all(homes)
    await router.close()

"""A real engine process is killed, stopped and killed again, and its requests' answers equal those of an undisturbed
run: text, tokens, log-probabilities, stop strings, grammar, all choices."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass

import httpx
import psutil
import pytest
import pytest_asyncio

from phalanx import AsyncEngine, EngineConfig, SamplingParams, StructuredOutputs
from phalanx.checkpoint.locate import locate
from phalanx.engine.client import EngineOutput
from phalanx.engine.replica import Replica
from phalanx.engine.resolution import for_engine, resolved
from phalanx.engine.router import Router
from phalanx.executor.death import kind_of
from phalanx.server.app import create_app
from tests.helpers.engine_requests import collect, engine_request, tokens_of
from tests.helpers.pace import Pace, pace_of
from tests.helpers.processes import alive, descendants, until
from tests.helpers.scopes import module_or_test
from tests.helpers.server import on_socket
from tests.helpers.tiny_model import write_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def config(folder: str, **options) -> EngineConfig:
    return EngineConfig.from_options(**{"model": folder, "dtype": "float32", "kv_cache_memory_bytes": "8M", **options})


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module", autouse=True)
def pace(tmp_path_factory) -> Iterator[Pace]:
    with pace_of(tmp_path_factory.mktemp("pace")) as pace:
        yield pace


@pytest_asyncio.fixture(scope=module_or_test, loop_scope="module")
async def engine(model) -> AsyncIterator[AsyncEngine]:
    """One engine, through all its lives."""
    before = descendants()
    async with AsyncEngine(config(model)) as engine:
        yield engine
    assert descendants() <= before


def params(**changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 220, "temperature": 0.0, "ignore_eos": True, **changes})


WORK = (
    ("greedy", params(logprobs=2)),
    ("seeded, two answers", params(temperature=1.0, seed=5, n=2, logprobs=0)),
    ("penalties", params(temperature=0.9, seed=6, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.2)),
    ("prompt logprobs", params(prompt_logprobs=1, temperature=0.5, seed=3)),
    ("grammar", params(structured_outputs=StructuredOutputs(json=SCHEMA), temperature=1.0, seed=2, max_tokens=200)),
    ("regular expression", params(structured_outputs=StructuredOutputs(regex="(hello|world|é|中){40}"), seed=4)),
)


async def answer(engine: AsyncEngine, prompt: str, wanted: SamplingParams, found: list[int] | None = None) -> dict:
    """Everything a client sees of a request, put together; `found` gets each token when it comes."""
    seen: dict = {"text": {}, "tokens": {}, "logprobs": {}, "reason": {}, "prompt_logprobs": None, "values": {}}
    async for delta in engine.generate(prompt, wanted):
        if delta.prompt_logprobs is not None:
            assert seen["prompt_logprobs"] is None
            seen["prompt_logprobs"] = [_ranked(entry) for entry in delta.prompt_logprobs]
            seen["values"][-1] = [value for entry in delta.prompt_logprobs for value in _values(entry)]
        for choice in delta.outputs:
            assert choice.index not in seen["reason"]
            seen["text"][choice.index] = seen["text"].get(choice.index, "") + choice.text
            seen["tokens"].setdefault(choice.index, []).extend(choice.token_ids)
            if found is not None:
                found += choice.token_ids
            seen["logprobs"].setdefault(choice.index, []).extend(map(_ranked, choice.logprobs or []))
            seen["values"].setdefault(choice.index, []).extend(v for e in choice.logprobs or [] for v in _values(e))
            if choice.finish_reason is not None:
                seen["reason"][choice.index] = (choice.finish_reason, choice.stop_reason)
    return seen


def _ranked(entry) -> tuple:
    return () if entry is None else tuple((each.token_id, each.rank) for each in (entry.chosen, *entry.top))


def _values(entry) -> list[float]:
    return [] if entry is None else [each.logprob for each in (entry.chosen, *entry.top)]


async def disturbed(engine: AsyncEngine, pace: Pace, disturb: Callable[[list[int]], Awaitable[None]]) -> None:
    """All of `WORK`, undisturbed and then while `disturb` does what it does, which is given the tokens that come. The
    answers must be equal."""
    expected = [await answer(engine, "hello world", wanted) for _, wanted in WORK]
    found: list[int] = []
    with pace.slow():
        running = [asyncio.create_task(answer(engine, "hello world", wanted, found)) for _, wanted in WORK]
        await disturb(found)
        assert not any(task.done() for task in running)
    for (name, _), want, got in zip(WORK, expected, await asyncio.gather(*running), strict=True):
        values, expected_values = got.pop("values"), want.pop("values")
        assert got == want, name
        for index, wanted_values in expected_values.items():  # computed in other pieces: other rounding errors
            assert values[index] == pytest.approx(wanted_values, abs=2e-3), name


async def tokens_later(found: list[int], tokens: int) -> None:
    wanted = len(found) + tokens
    await until(lambda: len(found) >= wanted)


async def recovered(engine: AsyncEngine, epoch: int) -> None:
    await until(lambda: engine.status().epoch >= epoch and engine.status().state == "ready")


@pytest.mark.recovery
async def test_killed_in_mid_stream(engine, pace):
    epoch, pid = engine.status().epoch, engine.info.pid

    async def kill(found: list[int]) -> None:
        await tokens_later(found, 200)
        os.kill(engine.info.pid, signal.SIGKILL)

    await disturbed(engine, pace, kill)
    status = engine.status()
    assert (status.state, status.epoch) == ("ready", epoch + 1)
    assert engine.info.pid != pid
    assert not alive(pid)
    recovery = status.recoveries[-1]
    assert (recovery.rank, recovery.plan) == (-1, "restart")
    assert recovery.cause == "it was killed by SIGKILL"
    assert recovery.kind == kind_of(recovery.cause) == "killed"
    assert recovery.detection_s < 0.5
    assert recovery.resumed == 7
    assert recovery.recomputed >= 200


async def test_stopped_in_mid_stream(engine, pace):
    """A process that answers nothing is noticed within a few seconds, and never comes back."""
    epoch, pid = engine.status().epoch, engine.info.pid

    async def stop(found: list[int]) -> None:
        await tokens_later(found, 100)
        os.kill(pid, signal.SIGSTOP)

    await disturbed(engine, pace, stop)
    status = engine.status()
    assert (status.epoch, status.recoveries[-1].kind) == (epoch + 1, "hung")
    assert 2.5 < status.recoveries[-1].detection_s < 10
    assert not alive(pid)


@pytest.mark.slow
async def test_killed_again_and_again_and_while_it_starts(engine, pace):
    epoch, lives = engine.status().epoch, random.Random(7)

    async def torment(found: list[int]) -> None:
        for _ in range(2):
            await tokens_later(found, 100)
            first = engine.info.pid
            os.kill(first, signal.SIGKILL)
            await until(lambda gone=first: _other_engine(gone) is not None)  # the next one, which loads
            await asyncio.sleep(lives.uniform(0.0, 0.8))
            loading = _other_engine(first)
            if loading is not None:
                loading.kill()
            await until(lambda gone=first: engine.info.pid != gone and engine.status().state == "ready")

    await disturbed(engine, pace, torment)
    status = engine.status()
    assert status.epoch >= epoch + 2
    assert status.failures["killed"] >= 4


def _other_engine(gone: int) -> psutil.Process | None:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if child.pid != gone and alive(child.pid) and "phalanx.engine.core" in child.cmdline():
                return child
    return None


@pytest.mark.recovery
async def test_a_stop_string_across_the_cut(model, engine, monkeypatch):
    """It begins before the engine dies and ends after it, and after the next one has died as well."""
    whole = (await answer(engine, "hello world", params(max_tokens=40)))["text"][0]
    stop = whole[12:18]
    wanted = params(max_tokens=200, stop=(stop,))
    expected = await answer(engine, "hello world", wanted)
    assert expected["text"][0] == whole[: whole.index(stop)]
    last = len(expected["tokens"][0])  # the one that ends the stop string; a step makes one
    assert last > 6
    faults = f"at=after_send,life=1,step={last - 4},do=kill;at=after_send,life=2,step=2,do=kill"
    monkeypatch.setenv("PHALANX_FAULT", faults)
    async with AsyncEngine(config(model)) as frail:
        got = await answer(frail, "hello world", wanted)
        assert (got["text"], got["tokens"], got["reason"]) == (expected["text"], expected["tokens"], expected["reason"])
        assert frail.status().epoch == 2


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("before_commit,do=hold", "hung"),  # its interpreter is locked: it says nothing
        ("before_commit,do=sleep=100", "hung"),  # it says that it lives, and does nothing
        pytest.param("before_commit,do=kill", "killed", marks=pytest.mark.recovery),
        pytest.param("after_commit,do=kill", "killed", marks=[pytest.mark.recovery, pytest.mark.slow]),
        pytest.param("after_send,do=kill", "killed", marks=[pytest.mark.recovery, pytest.mark.slow]),
        pytest.param("before_commit,do=segfault", "killed", marks=[pytest.mark.recovery, pytest.mark.slow]),
        pytest.param("before_commit,do=exit", "ended", marks=[pytest.mark.recovery, pytest.mark.slow]),
    ],
)
async def test_lost_at_a_certain_point(model, engine, monkeypatch, fault, kind):
    expected = await answer(engine, "hello world", params(max_tokens=60))
    monkeypatch.setenv("PHALANX_FAULT", f"step=30,life=1,at={fault}")
    async with AsyncEngine(config(model, hang_timeout=1.0)) as frail:
        got = await asyncio.wait_for(answer(frail, "hello world", params(max_tokens=60)), 60)
        await until(lambda: frail.status().recovery is None)
        assert (got["text"], got["tokens"]) == (expected["text"], expected["tokens"])
        assert [recovery.kind for recovery in frail.status().recoveries] == [kind]
        assert frail.status().recoveries[0].detection_s < 6


async def test_idle_and_killed(engine):
    epoch = engine.status().epoch
    os.kill(engine.info.pid, signal.SIGKILL)
    await until(lambda: engine.status().state == "recovering", 1)
    waiting = asyncio.create_task(answer(engine, "hello", params(max_tokens=5)))  # one that comes now is not refused
    await recovered(engine, epoch + 1)
    assert len((await waiting)["tokens"][0]) == 5


class Frail(Replica):
    """A real engine process that does not survive a request for poison: it is killed as soon as it has the request."""

    async def generate(self, request):
        async with aclosing(super().generate(request)) as outputs:
            async for output in outputs:
                if request.request_id == "poison":
                    os.kill(self.pid, signal.SIGKILL)
                    raise await self.lost()  # no token of it was made
                yield output


def replicas(folder: str, kind: type[Replica]) -> Callable[[], Replica]:
    checkpoint = locate(folder)
    prepared = for_engine(resolved(config(folder), checkpoint), checkpoint)

    def make() -> Replica:
        replica = kind()
        replica.configure(*prepared)
        return replica

    return make


async def test_what_kills_its_engine_each_time_is_refused_alone(model, pace):
    make = replicas(model, Frail)
    router = Router([make()], make=make)
    await router.start()
    sampling = [{"seed": seed, "temperature": seed % 2, "ignore_eos": True, "max_tokens": 200} for seed in range(4)]
    requests = [engine_request(f"r{i}", prompt=(i, 5, 6), **wanted) for i, wanted in enumerate(sampling)]
    expected = [tokens_of(await collect(router.generate(request))) for request in requests]
    assert router.status().epoch == 0
    seen: list[list[EngineOutput]] = [[] for _ in requests]
    with pace.slow():
        running = [asyncio.create_task(collect(router.generate(r), s)) for r, s in zip(requests, seen, strict=True)]
        await until(lambda: all(len(each) > 5 for each in seen))
        outputs = await asyncio.wait_for(collect(router.generate(engine_request("poison", max_tokens=100))), 120)
    assert (outputs[-1].error.status, outputs[-1].error.retryable) == (500, False)
    assert [tokens_of(each) for each in await asyncio.gather(*running)] == expected
    assert router.status().epoch == 3  # twice among others, once alone
    await router.close()


async def test_a_rolling_restart_behind_two_replicas_loses_nothing(model):
    make = replicas(model, Replica)
    router = Router([make(), make()], make=make)
    await router.start()
    begin = time.monotonic()
    answers: list[tuple[int, list[int]]] = []
    stop = asyncio.Event()

    async def client(number: int) -> None:
        """One request after the other, never refused."""
        count = 0
        while not stop.is_set():
            request = engine_request(f"c{number}-{count}", prompt=(number, 7), max_tokens=60, ignore_eos=True)
            outputs = await collect(router.generate(request))
            assert outputs[-1].error is None, outputs[-1]
            answers.append((number, tokens_of(outputs)))
            count += 1

    clients = [asyncio.create_task(client(number)) for number in range(6)]
    await until(lambda: len(answers) >= 12)
    first, second = router.clients
    for old in (first, second):
        assert await old.drain(10)
        await old.close()
        await until(lambda old=old: old not in router.clients and router.status().recovery is None)
        assert all(each.status().state == "ready" for each in router.clients)
    served = len(answers)
    await until(lambda: len(answers) >= served + 12)
    stop.set()
    await asyncio.gather(*clients)
    assert first not in router.clients
    assert second not in router.clients
    for number, tokens in answers:
        assert tokens == next(other for who, other in answers if who == number)
    assert time.monotonic() - begin < 120
    await router.close()


@dataclass
class Look:
    """One question for health."""

    began: float
    ended: float
    code: int
    told: dict


async def test_health_tells_the_truth_while_the_engine_is_killed(model, engine, pace):
    """Asked every 50 ms: not ready from within a second of the death until a token has moved, and never in between."""
    looks: list[Look] = []
    async with on_socket(create_app(engine, engine.config)) as port, httpx.AsyncClient() as client:
        base = f"http://127.0.0.1:{port}"

        async def poll() -> None:
            while True:
                began = time.monotonic()
                answer = await client.get(f"{base}/health/ready")
                looks.append(Look(began, time.monotonic(), answer.status_code, answer.json()))
                assert (await client.get(f"{base}/health/live")).status_code == 200
                assert (await client.get(f"{base}/status")).status_code == 200
                await asyncio.sleep(0.05)

        polling = asyncio.create_task(poll())
        times: list[float] = []
        tokens, killed = 0, 0.0
        with pace.slow():
            async for delta in await engine.submit("hello", params()):
                tokens += len(delta.outputs[0].token_ids)
                times.append(time.monotonic())
                if tokens >= 20 and not killed:
                    os.kill(engine.info.pid, signal.SIGKILL)
                    killed = time.monotonic()
                    pace.release()
        await until(lambda: looks[-1].began > times[-1])
        polling.cancel()
        with pytest.raises(asyncio.CancelledError):  # and nothing else
            await polling
    _, back = max((after - before, after) for before, after in itertools.pairwise(times) if after > killed)
    assert all(look.code == 200 for look in looks if look.ended < killed)
    unwell = [look for look in looks if look.code == 503]
    assert unwell
    assert sum(killed < look.began and look.ended < back for look in looks) > 3, "it waits for compute"
    late = [look for look in looks if look.began > killed + 1.0 and look.ended < back - 0.1]
    assert all(look.code == 503 for look in looks if unwell[0].began <= look.began and look.ended < back - 0.1)
    assert all(look.code == 503 for look in late)
    assert all(look.code == 200 for look in looks if look.began > back + 0.1)
    for told in (look.told for look in unwell):
        assert (told["status"], told["recovery"]["rank"], told["recovery"]["kind"]) == ("recovering", -1, "killed")
        assert told["recovery"]["estimate"] > 0

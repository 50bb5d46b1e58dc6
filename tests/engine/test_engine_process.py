"""AsyncEngine with a real engine process on a tiny model: equality, isolation, disconnects, and every way to die."""

import asyncio
import contextlib
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import psutil
import pytest
import pytest_asyncio

from phalanx import LLM, AsyncEngine, EngineConfig, SamplingParams, StructuredOutputs
from phalanx.checkpoint.locate import locate
from phalanx.engine.client import EngineOutput
from phalanx.engine.core_messages import Submit
from phalanx.engine.mailboxes import Mailbox, Mailboxes, merged
from phalanx.engine.replica import Replica
from phalanx.engine.resolution import for_engine, resolved
from phalanx.engine.router import Router
from phalanx.errors import ConfigError, EngineDead, InvalidRequest, NotEnoughMemory, PhalanxError, UserError
from phalanx.step import TokenLogprobs
from phalanx.text import tokenizer as tokenizer_module
from tests.helpers.engine_requests import collect, engine_request, tokens_of
from tests.helpers.pace import Pace, pace_of
from tests.helpers.processes import alive, descendants, gone_within, no_process_at_first, until
from tests.helpers.tiny_model import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
ON_MODULE_LOOP = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny")))


def config(folder: str, **options) -> EngineConfig:
    return EngineConfig.from_options(**{"model": folder, "dtype": "float32", "kv_cache_memory_bytes": "8M", **options})


@pytest.fixture(scope="module", autouse=True)
def pace(tmp_path_factory) -> Iterator[Pace]:
    with pace_of(tmp_path_factory.mktemp("pace")) as pace:
        yield pace


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model):
    """One engine process for the tests that leave it alive."""
    async with AsyncEngine(config(model)) as engine:
        yield engine
        assert alive(engine.info.pid)
        assert await idle(engine)
    assert not alive(engine.info.pid)


@pytest.fixture(scope="module")
def expected(model):
    """What the same model answers alone, in this process: (prompt, params) to the tokens of each choice."""
    with LLM(model, dtype="float32", kv_cache_memory_bytes="8M") as llm:

        def answer(prompt, params):
            return [choice.token_ids for choice in llm.generate(prompt, params)[0].outputs]

        yield answer


def params(**changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 30, "temperature": 0.0, "ignore_eos": True, **changes})


async def tokens(stream) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    async for delta in stream:
        for choice in delta.outputs:
            found.setdefault(choice.index, []).extend(choice.token_ids)
    return [found[index] for index in sorted(found)]


async def idle(engine: AsyncEngine) -> bool:
    """Whether all blocks come to be free."""

    def at_rest() -> bool:
        status = engine.status()
        return status.running == status.waiting == 0 and status.free_blocks == status.blocks

    await until(at_rest)
    return True


@ON_MODULE_LOOP
async def test_facts(engine):
    info = engine.info
    assert (info.dtype, info.device, info.max_model_len, info.executor) == ("float32", "cpu", 256, "inprocess")
    assert info.pid in descendants()
    status = engine.status()
    assert status.state == "ready"
    assert [worker.pid for worker in status.workers] == [info.pid]


@ON_MODULE_LOOP
async def test_the_process_gives_what_the_engine_gives_here(engine, expected):
    for wanted in (params(), params(n=3, temperature=1.0, seed=9), params(temperature=0.8, seed=1, top_k=20)):
        assert await tokens(engine.generate("hello world", wanted)) == expected("hello world", wanted)


@ON_MODULE_LOOP
async def test_two_hundred_requests_at_once(engine, expected):
    wanted = [params(max_tokens=5 + i % 20, seed=i, temperature=float(i % 2)) for i in range(200)]
    prompts = [f"{i} the hello" for i in range(200)]
    results = await asyncio.gather(*(tokens(engine.generate(p, w)) for p, w in zip(prompts, wanted, strict=True)))
    for i in range(0, 200, 17):
        assert results[i] == expected(prompts[i], wanted[i])
    assert await idle(engine)


@ON_MODULE_LOOP
async def test_a_client_that_goes_away_frees_its_blocks_within_one_step(engine, pace):
    assert await idle(engine)
    before = engine.status().computed_tokens
    with pace.slow():
        stream = await engine.submit("hello world", params(max_tokens=240))
        seen = (await anext(stream)).outputs[0].token_ids
        os.kill(engine.info.pid, signal.SIGSTOP)
        try:
            with contextlib.suppress(TimeoutError):  # all that it had sent
                while True:
                    seen += (await asyncio.wait_for(anext(stream), 0.2)).outputs[0].token_ids
            await stream.aclose()
        finally:
            os.kill(engine.info.pid, signal.SIGCONT)
        assert await idle(engine)
    # The abort crosses while the engine is in a step; it may begin one more before it reads it.
    assert engine.status().computed_tokens - before <= len(stream.prompt_token_ids) + len(seen) + 1


@ON_MODULE_LOOP
async def test_many_clients_go_away_at_any_moment(engine):
    async def leave(number):
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(tokens(engine.generate("x" * 50, params(max_tokens=200))), 0.002 * (number % 40))

    healthy = asyncio.create_task(tokens(engine.generate("hello world", params())))
    await asyncio.gather(*(leave(number) for number in range(300)))
    assert await healthy == await tokens(engine.generate("hello world", params()))
    assert await idle(engine)


@ON_MODULE_LOOP
async def test_bad_requests_do_not_disturb_a_healthy_one(engine, expected):
    """Past the front end's validator: what reaches the engine is its own to survive."""
    (replica,) = engine._client.clients
    healthy = asyncio.create_task(tokens(engine.generate("hello world", params(max_tokens=100))))
    good = msgspec.msgpack.encode(engine_request("bad"))
    whole = msgspec.msgpack.decode(good)
    for number, change in enumerate(
        ({"prompt_token_ids": []}, {"prompt_token_ids": "x"}, {"prompt_token_ids": [1] * 5000}, {"sampling": None},
         {"sampling": {"max_tokens": None}}, {"sampling": {"temperature": 1e400}}, {"choice": "x"}, {"request_id": 7})
    ):  # fmt: skip
        rid = f"bad{number}"
        mailbox = replica._mailboxes.open[rid] = Mailbox(0)
        replica._stream.post(Submit(rid, msgspec.Raw(msgspec.msgpack.encode(whole | change))))
        output = await asyncio.wait_for(mailbox.take(), 60)
        assert output.finish_reason == "error"
        del replica._mailboxes.open[rid]
    assert await healthy == expected("hello world", params(max_tokens=100))


@ON_MODULE_LOOP
async def test_the_engine_leaves_interrupts_to_its_parent(engine):
    os.kill(engine.info.pid, signal.SIGINT)
    assert len(await tokens(engine.generate("x", params()))) == 1


@ON_MODULE_LOOP
async def test_the_engine_listens_on_nothing(engine):
    assert psutil.Process(engine.info.pid).net_connections() == []


@ON_MODULE_LOOP
async def test_equal_ids_are_refused_and_abort_ends_a_stream(engine, pace):
    (replica,) = engine._client.clients
    with pace.slow():
        stream = replica.generate(engine_request("same", max_tokens=200, ignore_eos=True))
        await anext(stream)
        with pytest.raises(InvalidRequest, match="same"):
            await anext(replica.generate(engine_request("same")))
        await replica.abort("same")
    assert (await collect(stream))[-1].finish_reason == "abort"


@ON_MODULE_LOOP
async def test_an_idle_engine_shows_signs_of_life(engine):
    beats = [engine.status().heartbeat]
    while len(beats) < 6:
        await until(lambda: engine.status().heartbeat > beats[-1])
        beats.append(engine.status().heartbeat)
    assert max(later - earlier for earlier, later in pairwise(beats)) < 0.9


@ON_MODULE_LOOP
async def test_a_silent_engine_is_not_called_ready(engine):
    """For less than what counts as a hang."""
    assert engine.status().state == "ready"
    os.kill(engine.info.pid, signal.SIGSTOP)
    try:
        await until(lambda: engine.status().state == "recovering", 5)
        assert "not answered" in engine.status().cause
    finally:
        os.kill(engine.info.pid, signal.SIGCONT)
    await until(lambda: engine.status().state == "ready", 5)
    assert engine.status().epoch == 0


async def test_without_recovery_a_killed_engine_ends_its_streams_with_one_clear_error(model, pace):
    before = descendants()
    engine = AsyncEngine(config(model, enable_recovery=False))
    await engine.start()
    with pace.slow():
        streams = [await engine.submit("hello", params(max_tokens=250)) for _ in range(5)]
        await anext(streams[0])
        os.kill(engine.info.pid, signal.SIGKILL)
    begin = time.monotonic()
    for stream in streams:
        with pytest.raises(EngineDead, match="killed by SIGKILL"):
            await tokens(stream)
    assert time.monotonic() - begin < 1
    assert engine.status().state == "failed"
    assert (await asyncio.wait_for(engine.lost(), 60)).kind == "killed"
    with pytest.raises(EngineDead):
        await engine.submit("x", params())
    await engine.close()
    assert descendants() <= before


async def test_a_request_outlives_a_killed_engine_process(model, expected, pace):
    checkpoint = locate(model)
    replicas = [Replica(), Replica()]
    for each in replicas:
        each.configure(*for_engine(resolved(config(model), checkpoint), checkpoint))
    router = Router(replicas)
    await router.start()
    drawn = [{"temperature": i % 2, "seed": i, "ignore_eos": True, "max_tokens": 200} for i in range(6)]
    requests = [engine_request(f"r{i}", prompt=(i, 5, 6), **params) for i, params in enumerate(drawn)]
    seen: list[list[EngineOutput]] = [[] for _ in requests]
    with pace.slow():
        streams = [asyncio.create_task(collect(router.generate(r), s)) for r, s in zip(requests, seen, strict=True)]
        await until(lambda: all(len(outputs) > 3 for outputs in seen))
        os.kill(replicas[0].pid, signal.SIGKILL)
        assert not any(stream.done() for stream in streams)
    for request, outputs in zip(requests, await asyncio.gather(*streams), strict=True):
        prompt = {"prompt_token_ids": request.prompt_token_ids}
        assert [tokens_of(outputs)] == expected(prompt, request.sampling)
    await router.close()
    assert not any(alive(each.pid) for each in replicas)


async def test_a_process_that_the_system_does_not_give_at_first_is_asked_for_again(model):
    """Just after a loss it may have no memory for one, or this process no descriptors."""
    async with AsyncEngine(config(model)) as engine:
        wanted, held = await tokens(engine.generate("hello", params())), descriptors()
        with no_process_at_first() as refused:
            os.kill(engine.info.pid, signal.SIGKILL)
            await until(lambda: len(refused) == 1 and descriptors() < held)
            assert await tokens(engine.generate("hello", params())) == wanted


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_close_while_loading(model, monkeypatch):
    """The engine process stands still, so that nobody can wait until it has loaded; the tokenizer is read only when all
    is over."""
    before, closed, load = descendants(), threading.Event(), tokenizer_module.load_tokenizer
    monkeypatch.setattr(tokenizer_module, "load_tokenizer", lambda *given: (closed.wait(60), load(*given))[1])
    engine = AsyncEngine(config(model))
    starting = asyncio.create_task(engine.start())
    await until(lambda: bool(descendants() - before))
    for pid in descendants() - before:
        os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(0.3)
    starting.cancel()
    await asyncio.wait_for(asyncio.gather(starting, return_exceptions=True), 30)
    await asyncio.wait_for(engine.close(), 30)
    assert descendants() <= before
    closed.set()
    for _ in range(3):
        await asyncio.sleep(0.5)
        await until(lambda: descendants() <= before)


async def test_close_in_mid_work_leaves_nothing(model, pace):
    before = descendants()
    engine = AsyncEngine(config(model))
    await engine.start()
    with pace.slow():
        streams = [await engine.submit("hello", params(max_tokens=250)) for _ in range(20)]
        begin = time.monotonic()
        await engine.close()
    assert time.monotonic() - begin < 2
    assert descendants() <= before
    assert [delta async for delta in streams[0]] == []


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"model": "/no/such/model"}, UserError, "such"),
        ({"max_model_len": 100_000}, UserError, "max-model-len"),
        ({"kv_cache_memory_bytes": 100}, NotEnoughMemory, ""),
    ],
)
async def test_what_stops_the_start_is_one_clear_error(model, options, kind, text):
    before = descendants()
    with pytest.raises(kind) as caught:
        await AsyncEngine(config(model, **options)).start()
    assert text in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert descendants() <= before


async def test_a_damaged_checkpoint_is_one_clear_error(tmp_path):
    folder = write_tiny_model(tmp_path / "m")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    before = descendants()
    with pytest.raises(UserError) as caught:
        await AsyncEngine(config(str(folder))).start()
    assert "model.safetensors" in str(caught.value)
    assert descendants() <= before


@pytest.mark.parametrize("asked", ["awq", "gguf"])
def test_a_quantisation_that_the_weights_do_not_have_is_refused(model, asked):
    with pytest.raises(ConfigError, match=f"--quantization is '{asked}'"):
        resolved(EngineConfig.from_options(model=model, quantization=asked), locate(model))
    for possible in ("none", "int8"):
        assert resolved(EngineConfig.from_options(model=model, quantization=possible), locate(model))


async def test_an_unexpected_failure_while_loading_is_called_internal(model):
    replica = Replica()
    checkpoint = locate(model)
    local, name = for_engine(resolved(config(model), checkpoint), checkpoint)
    nonsense = dataclasses.replace(local.cache, kv_cache_dtype="float99")  # what `resolve` never gives
    replica.configure(dataclasses.replace(local, cache=nonsense), name)
    with pytest.raises(PhalanxError, match=r"internal error: KeyError: 'float99'\.") as caught:
        await replica.start()
    assert type(caught.value) is PhalanxError
    assert not alive(replica.pid)


PARENT = textwrap.dedent(
    """
    import asyncio, sys
    from phalanx import AsyncEngine, EngineConfig

    async def main():
        engine = AsyncEngine(EngineConfig.from_options(model=sys.argv[1], dtype="float32", kv_cache_memory_bytes="1M"))
        starting = asyncio.create_task(engine.start())
        if sys.argv[2] == "loading":
            while engine._client is None or engine._client.clients[0].pid is None:
                await asyncio.sleep(0.01)
            print(engine._client.clients[0].pid, flush=True)
        print((await starting).pid, flush=True)
        await asyncio.sleep(60)

    asyncio.run(main())
    """
)


@pytest.mark.parametrize("phase", ["loading", "ready"])
def test_the_engine_does_not_outlive_a_killed_parent(model, phase):
    command = [sys.executable, "-c", PARENT, model, phase]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
        assert gone_within(pid, 5.0)


async def test_the_engine_process_does_not_import_from_the_current_folder(model, tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise SystemExit('imported from the current folder')")
    monkeypatch.chdir(tmp_path)
    async with AsyncEngine(config(model)) as engine:
        assert len(await tokens(engine.generate("x", params(max_tokens=2)))) == 1


async def test_a_first_token_has_reached_its_reader_before_others_have_their_next_one():
    async def sent(message):
        pass

    mailboxes, seen = Mailboxes(sent, lambda message: None), []

    async def read(rid):
        async for output in mailboxes.generate(engine_request(rid)):
            seen.append((rid, output.token_ids))
            await asyncio.sleep(0)  # its text goes to another task
            seen.append((rid, "read"))

    readers = [asyncio.create_task(read(rid)) for rid in ("old", "older", "new")]
    await asyncio.sleep(0)
    outputs = [
        EngineOutput("old", 0, [3], finish_reason="length"),
        EngineOutput("new", 0),
        EngineOutput("new", 0, [4], finish_reason="length", scheduled_s=1.0),
        EngineOutput("older", 0, [5], finish_reason="length"),
    ]
    await mailboxes.deliver(outputs)
    await asyncio.gather(*readers)
    assert seen[:2] == [("new", [4]), ("new", "read")]
    assert sorted(seen[2:4]) == [("old", [3]), ("older", [5])]


def test_what_a_slow_reader_missed_is_merged():
    outputs = [
        EngineOutput("r", 4),
        EngineOutput(
            "r", 4, [1], logprobs=[TokenLogprobs(-1.0, 1)], num_cached_tokens=16, scheduled_s=2.0, queued_s=1.0
        ),
        EngineOutput("r", 5, [2, 3], logprobs=[TokenLogprobs(-1.0, 1)] * 2, finish_reason="stop", stop_token_id=3),
    ]
    whole = merged(outputs)
    assert (whole.start, whole.token_ids, len(whole.logprobs)) == (4, [1, 2, 3], 3)
    assert (whole.finish_reason, whole.stop_token_id, whole.num_cached_tokens) == ("stop", 3, 16)
    assert (whole.scheduled_s, whole.queued_s) == (2.0, 1.0)
    assert merged(outputs[:1] * 2) == outputs[0]


@pytest.fixture
def parted(model, tmp_path):
    """The folder of the model without its tokenizer, and that of the tokenizer."""
    bare, other = tmp_path / "bare", tmp_path / "tokenizer"
    bare.mkdir()
    other.mkdir()
    for file in Path(model).iterdir():
        (other if file.name.startswith("tokenizer") else bare).joinpath(file.name).write_bytes(file.read_bytes())
    return str(bare), str(other)


async def test_a_tokenizer_of_its_own_reaches_the_engine_too(parted):
    """The engine needs it for grammars; the model's own is not there."""
    async with AsyncEngine(config(parted[0], tokenizer=parted[1])) as engine:
        wanted = params(structured_outputs=StructuredOutputs(regex="(hello|world){4}"))
        text = "".join([delta.outputs[0].text async for delta in engine.generate("x", wanted)])
    assert re.fullmatch("(hello|world){4}", text)


async def test_a_tokenizer_that_is_gone_is_not_the_requests_fault(parted):
    async with AsyncEngine(config(parted[0], tokenizer=parted[1])) as engine:
        shutil.rmtree(parted[1])
        with pytest.raises(PhalanxError) as caught:
            await engine.submit("x", params(structured_outputs=StructuredOutputs(regex="a+")))
        assert not isinstance(caught.value, UserError)
        assert (caught.value.status, parted[1] in str(caught.value)) == (500, False)
        stream = await engine.submit("x", params())
        await stream.aclose()

"""AsyncEngine over EchoEngine: streams, admission, back-pressure, endings. No model."""

import asyncio
import gc
import threading
import time
import weakref

import pytest

from phalanx import AsyncEngine, EngineConfig, SamplingParams, StructuredOutputs
from phalanx.engine.client import EngineOutput
from phalanx.engine.echo import EchoEngine
from phalanx.errors import (
    ConfigError,
    ContextLengthExceeded,
    Draining,
    EngineDead,
    InvalidRequest,
    Loading,
    PhalanxError,
    QueueFull,
)
from phalanx.structured.grammar import GrammarCompiler
from phalanx.text.detokenizer import Detokenizer
from tests.helpers.byte_tokenizer import byte_tokenizer
from tests.helpers.processes import until

TOKENIZER = byte_tokenizer()


async def start(client: EchoEngine | None = None, **options) -> AsyncEngine:
    engine = AsyncEngine(EngineConfig.from_options(**options), client=client or EchoEngine(), tokenizer=TOKENIZER)
    await engine.start()
    return engine


def params(**changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, **changes})


async def text_of(stream) -> str:
    return "".join([choice.text async for delta in stream for choice in delta.outputs])


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_deltas_add_up():
    engine = await start()
    deltas = [delta async for delta in engine.generate("hello world", params(), "mine")]
    assert (
        "".join(d.outputs[0].text for d in deltas)
        == "hello worldhello worldhello worldhello worldhello worldhello world"
    )
    assert [d.finished for d in deltas] == [False] * (len(deltas) - 1) + [True]
    assert {d.request_id for d in deltas} == {"mine"}
    assert sum(len(d.outputs[0].token_ids) for d in deltas) == 12
    assert deltas[-1].outputs[0].finish_reason == "length"
    await engine.close()


async def test_before_start_and_after_close():
    engine = AsyncEngine(client=EchoEngine(), tokenizer=TOKENIZER)
    assert engine.status().state == "loading"
    with pytest.raises(Loading, match="not started"):
        await engine.submit("x", params())
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    with pytest.raises(Loading, match="is loading"):
        await engine.submit("x", params())
    await starting
    assert engine.status().state == "ready"
    assert engine.config.model.max_model_len == 4096
    await engine.close()
    await engine.close()
    with pytest.raises(EngineDead, match="closed"):
        await engine.submit("x", params())


async def test_it_is_not_ready_before_it_takes_requests():
    """Its first replica may be, long before the others."""

    class Several(EchoEngine):
        async def start(self):
            await super().start()
            began.set()
            return await others

    began, others = asyncio.Event(), asyncio.get_running_loop().create_future()
    engine = AsyncEngine(client=Several(), tokenizer=TOKENIZER)
    starting = asyncio.create_task(engine.start())
    await began.wait()
    assert engine.status().state == engine.phase == "loading"
    others.set_result(await EchoEngine().start())
    await starting
    assert engine.status().state == engine.phase == "ready"
    await engine.close()


async def test_a_client_needs_a_tokenizer():
    with pytest.raises(ConfigError, match="tokenizer"):
        await AsyncEngine(client=EchoEngine()).start()


async def test_errors_come_from_submit_with_their_own_class():
    engine = await start(max_model_len=100)
    for prompt, wanted, kind in (
        ("", params(), InvalidRequest),
        ([1] * 200, params(), ContextLengthExceeded),
        ("x " * 5000, params(), ContextLengthExceeded),
        ([-1], params(), InvalidRequest),
        ("x", params(n=200), InvalidRequest),
        ("x", None, InvalidRequest),
    ):
        with pytest.raises(kind):
            await engine.submit(prompt, wanted)
    assert engine.status().running == 0
    await engine.close()


async def test_a_full_queue_refuses_a_request_as_a_whole():
    engine = await start(EchoEngine(max_requests=3, delay=0.01))
    first = await engine.submit("x", params(n=2))
    with pytest.raises(QueueFull) as caught:
        await engine.submit("x", params(n=2))
    assert caught.value.status == 503
    assert caught.value.retry_after
    await settle()
    assert engine.status().running == 2
    await first.aclose()
    await engine.close()


async def test_choices_are_streamed_together():
    engine = await start()
    texts = {0: "", 1: "", 2: ""}
    async for delta in engine.generate("abc", params(n=3, max_tokens=6)):
        for choice in delta.outputs:
            texts[choice.index] += choice.text
    assert texts == {0: "abcabc", 1: "abcabc", 2: "abcabc"}
    await engine.close()


async def test_a_stop_string_ends_the_work_though_nobody_reads():
    client = EchoEngine(delay=0.001)
    engine = await start(client)
    stream = await engine.submit("abcd", params(max_tokens=4000, stop=("da",)))
    await until(lambda: not client.status().running)
    assert client.status().computed_tokens == 5
    assert await text_of(stream) == "abc"
    await engine.close()


async def test_a_slow_reader_gets_one_merged_delta_and_delays_nobody():
    engine = await start()
    slow = await engine.submit("ab", params(max_tokens=1000, logprobs=0))
    assert len(await text_of(await engine.submit("cd", params(max_tokens=100)))) == 100
    assert slow.running  # the other has finished first
    await until(lambda: not slow.running)
    deltas = [delta async for delta in slow]
    assert len(deltas) == 1
    (choice,) = deltas[0].outputs
    assert choice.text == "ab" * 500
    assert len(choice.token_ids) == len(choice.logprobs) == 1000
    assert choice.finish_reason == "length"
    await engine.close()


@pytest.mark.parametrize("how", ["aclose", "drop", "cancel", "break"])
async def test_leaving_a_stream_aborts_it(how):
    client = EchoEngine(delay=0.001)
    engine = await start(client)
    if how == "cancel":
        task = asyncio.create_task(text_of(engine.generate("ab", params(max_tokens=4000))))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    elif how == "break":
        async for _ in engine.generate("ab", params(max_tokens=4000)):
            break
    else:
        stream = await engine.submit("ab", params(max_tokens=4000))
        await anext(stream)
        assert client.status().running == 1
        if how == "aclose":
            await stream.aclose()
            await stream.aclose()
            assert [delta async for delta in stream] == []
        del stream
    gc.collect()
    await settle()
    assert client.status().running == 0
    await engine.close()


async def test_dropping_a_stream_that_is_over_wakes_nobody(monkeypatch):
    """Each wake-up of the event loop from outside costs it a turn and two calls of the system."""
    engine, woken = await start(), []
    monkeypatch.setattr(asyncio.get_running_loop(), "call_soon_threadsafe", woken.append)
    assert await text_of(engine.generate("ab", params()))
    stream = await engine.submit("ab", params(max_tokens=4000))
    await stream.aclose()
    del stream
    gc.collect()
    assert woken == []
    await engine.close()


async def test_cancelling_submit_leaves_nothing():
    class Slow(EchoEngine):
        async def generate(self, request):
            await asyncio.sleep(0.05)
            async for output in super().generate(request):
                yield output

    client = Slow()
    engine = await start(client)
    task = asyncio.create_task(engine.submit("x", params(n=3)))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0.1)
    assert client.requests == []
    await engine.close()


async def test_a_timed_out_wait_loses_nothing():
    engine = await start(EchoEngine(delay=0.02))
    stream = await engine.submit("abc", params(max_tokens=6))
    text = ""
    while True:
        try:
            delta = await asyncio.wait_for(anext(stream), 0.005)
        except TimeoutError:
            continue
        except StopAsyncIteration:
            break
        text += delta.outputs[0].text
    assert text == "abcabc"
    await engine.close()


async def test_a_dead_engine_ends_streams_after_what_it_had_sent():
    engine = await start(EchoEngine(die_after=5))
    stream = await engine.submit("abc", params(max_tokens=100))
    await settle()
    assert (await anext(stream)).outputs[0].text == "abcab"
    with pytest.raises(EngineDead):
        await anext(stream)
    assert engine.status().state == "failed"
    with pytest.raises(EngineDead):
        await engine.submit("abc", params())
    await engine.close()


async def test_one_failing_choice_fails_the_request_alone():
    class Poisoned(EchoEngine):
        async def generate(self, request):
            if request.choice == 1:
                yield EngineOutput(request.request_id, 0)
                yield EngineOutput(request.request_id, 4, [1])  # a gap
            else:
                async for output in super().generate(request):
                    yield output

    client = Poisoned(delay=0.001)
    engine = await start(client)
    healthy = asyncio.create_task(text_of(engine.generate("abc", params(max_tokens=60))))
    with pytest.raises(PhalanxError, match="lost on the way"):
        await text_of(engine.generate("x", params(n=2, max_tokens=60)))
    assert await healthy == "abc" * 20
    await settle()
    assert client.status().running == 0
    await engine.close()


async def test_an_answer_whose_text_cannot_be_made_ends_alone(monkeypatch):
    """In the midst of it; what came before is delivered."""
    push = Detokenizer.push
    (bad,) = TOKENIZER.encode("X")

    def breaking(self, tokens):
        if bad in tokens:
            raise UnicodeError("no such text")
        return push(self, tokens)

    monkeypatch.setattr(Detokenizer, "push", breaking)
    client = EchoEngine(delay=0.001)
    engine = await start(client)
    others = [asyncio.create_task(text_of(engine.generate(p, params(max_tokens=60)))) for p in ("abc", "defg")]
    seen: list[str] = []

    async def read() -> None:
        async for delta in engine.generate("hi X", params(max_tokens=60)):
            seen.append(delta.outputs[0].text)

    with pytest.raises(PhalanxError, match="failed inside Phalanx") as caught:
        await read()
    assert "".join(seen) == "hi "
    assert caught.value.status == 500 and isinstance(caught.value.__cause__, UnicodeError)
    await settle()
    assert client.status().running == 2  # its work is ended, theirs goes on
    assert [await other for other in others] == ["abc" * 20, "defg" * 15]
    assert engine.status().state == "ready"
    await engine.close()


async def test_equal_request_ids_do_not_meet():
    engine = await start(EchoEngine(delay=0.001))
    results = await asyncio.gather(*(text_of(engine.generate(c, params(), "same")) for c in "abcdef"))
    assert results == [c * 12 for c in "abcdef"]
    await engine.close()


async def test_two_thousand_requests_at_once():
    engine = await start()
    begin = time.perf_counter()
    prompts = [str(number) for number in range(2000)]
    results = await asyncio.gather(*(text_of(engine.generate(p, params(max_tokens=len(p) * 2))) for p in prompts))
    assert results == [p * 2 for p in prompts]
    assert time.perf_counter() - begin < 30
    assert engine.status().running == 0
    await engine.close()


async def test_long_texts_do_not_stop_the_event_loop():
    engine = await start(EchoEngine(max_model_len=10**6), max_model_len=10**6)
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    ticking = asyncio.create_task(tick())
    stream = await engine.submit("hello world é " * 40_000, params(max_tokens=1))
    ticking.cancel()
    await stream.aclose()
    assert ticks > 10  # tokenising takes a quarter of a second; on the loop there would be none
    assert len(stream.prompt_token_ids) > 100_000
    await engine.close()


async def test_drain_refuses_new_requests_and_lets_the_old_finish():
    engine = await start(EchoEngine(delay=0.002))
    running = asyncio.create_task(text_of(engine.generate("ab", params(max_tokens=40))))
    await asyncio.sleep(0.01)
    assert not await engine.drain(0.01)
    assert engine.status().state == "draining"
    with pytest.raises(Draining) as caught:
        await engine.submit("x", params())
    assert caught.value.retry_after
    assert await engine.drain(5)
    assert await running == "ab" * 20
    await engine.close()


async def test_close_ends_streams():
    engine = await start(EchoEngine(delay=0.001))
    stream = await engine.submit("ab", params(max_tokens=4000))
    reading = asyncio.create_task(text_of(stream))
    await asyncio.sleep(0.01)
    await engine.close()
    await asyncio.wait_for(reading, 60)
    assert engine.status().state == "failed"


async def test_chat_template_and_tokenize():
    engine = await start()
    messages = [{"role": "user", "content": "hello"}]
    assert await engine.apply_chat_template(messages) == "<user>hello<bot>"
    assert await engine.apply_chat_template(messages, add_generation_prompt=False) == "<user>hello"
    assert await engine.tokenize("hello world") == TOKENIZER.encode("hello world")
    await engine.close()
    engine = await start(chat_template="{{ messages[0].content }}!")
    assert await engine.apply_chat_template(messages) == "hello!"
    await engine.close()


async def test_a_missing_template_file_stops_the_start():
    client = EchoEngine()
    engine = AsyncEngine(EngineConfig.from_options(chat_template="/no/such.jinja"), client=client, tokenizer=TOKENIZER)
    with pytest.raises(ConfigError, match=r"no/such\.jinja"):
        await engine.start()
    assert client.status().state == "failed"


async def test_bad_grammars_are_refused_at_submission():
    engine = await start()
    with pytest.raises(InvalidRequest):
        await engine.submit("x", params(structured_outputs=StructuredOutputs(regex="([")))
    stream = await engine.submit("x", params(structured_outputs=StructuredOutputs(regex="x+")))
    await stream.aclose()
    await engine.close()


async def test_others_do_not_wait_while_grammars_are_tried(monkeypatch):
    going_on, tried = threading.Event(), threading.Semaphore(0)

    def slow(self, wanted):
        tried.release()
        assert going_on.wait(60)

    monkeypatch.setattr(GrammarCompiler, "validate", slow)
    engine = await start()
    wanted = params(structured_outputs=StructuredOutputs(regex="x+"))
    trials = [asyncio.create_task(engine.submit("x", wanted)) for _ in range(8)]
    await until(lambda: tried.acquire(blocking=False))
    try:
        prompt = await asyncio.wait_for(engine.apply_chat_template([{"role": "user", "content": "hello"}]), 30)
        stream = await asyncio.wait_for(engine.submit(prompt * 100, params()), 30)  # long, so tokenised in a thread
        assert await asyncio.wait_for(text_of(stream), 30)
        assert not any(trial.done() for trial in trials)
    finally:
        going_on.set()
    for trial in trials:
        await (await trial).aclose()
    await engine.close()


async def test_nothing_grows():
    client = EchoEngine()
    engine = await start(client)
    for _ in range(3):
        await asyncio.gather(*(text_of(engine.generate("x", params(max_tokens=2))) for _ in range(200)))
    gc.collect()
    assert len(engine._streams) == 0
    await engine.close()


@pytest.mark.parametrize("asked", [0, 3])
async def test_a_closed_stream_is_gone_without_the_collector(asked):
    """Clients that hang up by the thousand leave nothing behind that must be looked for."""
    engine = await start(EchoEngine(delay=0.001))
    gc.disable()
    try:
        stream = await engine.submit("hello", params(max_tokens=1000))
        for _ in range(asked):
            await anext(stream)
        gathering = weakref.ref(stream._gathering)
        await stream.aclose()
        del stream
        await settle()
        assert gathering() is None
    finally:
        gc.enable()
    await engine.close()

import asyncio

import msgspec
import pytest

from phalanx.engine.echo import EchoEngine
from phalanx.errors import EngineDead
from tests.helpers.engine_requests import collect, collect_until, engine_request, tokens_of


async def echo(**options) -> EchoEngine:
    engine = EchoEngine(**options)
    assert engine.status().state == "loading"
    await engine.start()
    return engine


async def test_repeats_the_prompt_up_to_max_tokens():
    outputs = await collect((await echo()).generate(engine_request(max_tokens=7)))
    assert tokens_of(outputs) == [1, 2, 3, 1, 2, 3, 1]
    assert outputs[-1].finish_reason == "length"


@pytest.mark.parametrize(("min_tokens", "length"), [(0, 2), (3, 5)])
async def test_ends_at_end_of_text_after_min_tokens(min_tokens, length):
    request = engine_request(max_tokens=9, min_tokens=min_tokens, eos=(2,))
    outputs = await collect((await echo()).generate(request))
    assert len(tokens_of(outputs)) == length
    assert (outputs[-1].finish_reason, outputs[-1].stop_token_id) == ("stop", None)


async def test_ends_at_a_stop_token():
    outputs = await collect((await echo()).generate(engine_request(stop_token_ids=(3,))))
    assert tokens_of(outputs) == [1, 2, 3]
    assert (outputs[-1].finish_reason, outputs[-1].stop_token_id) == ("stop", 3)


async def test_goes_on_after_delivered_tokens():
    request = msgspec.structs.replace(engine_request(max_tokens=5), output_token_ids=(1, 2))
    outputs = await collect((await echo()).generate(request))
    assert outputs[0].start == 2
    assert [t for o in outputs for t in o.token_ids] == [3, 1, 2]


async def test_logprobs_are_parallel():
    outputs = await collect((await echo()).generate(engine_request(logprobs=1, prompt_logprobs=0)))
    assert all(len(o.logprobs) == len(o.token_ids) for o in outputs if o.token_ids)
    assert len(outputs[1].prompt_logprobs) == 2


async def test_refuses_when_full_and_when_draining():
    engine = await echo(max_requests=1, delay=0.01)
    stream = engine.generate(engine_request("a"))
    await anext(stream)
    (output,) = await collect(engine.generate(engine_request("b")))
    assert (output.error.status, output.error.code) == (503, "overloaded")
    assert not await engine.drain(0)
    await stream.aclose()
    assert await engine.drain(0)
    (output,) = await collect(engine.generate(engine_request("c")))
    assert output.error.status == 503


async def test_dies_on_demand():
    engine = await echo(die_after=4)
    received = await collect_until(EngineDead, engine.generate(engine_request()))
    assert len(tokens_of(received)) == 4
    assert engine.status().state == "failed"
    with pytest.raises(EngineDead):
        await collect(engine.generate(engine_request("b")))


async def test_abort_and_close():
    engine = await echo(delay=0.001)
    task = asyncio.create_task(collect(engine.generate(engine_request(max_tokens=1000))))
    await asyncio.sleep(0.01)
    await engine.abort("r#0")
    assert (await task)[-1].finish_reason == "abort"
    await engine.close()
    assert engine.status().state == "failed"

import asyncio
import time
from contextlib import aclosing

import msgspec
import pytest

from phalanx.engine import router as router_module
from phalanx.engine.client import EngineOutput, Recovery
from phalanx.engine.cursor import Cursor
from phalanx.engine.echo import EchoEngine
from phalanx.engine.router import Router
from phalanx.errors import EngineDead
from phalanx.step import TokenLogprobs
from tests.helpers.engine_requests import collect, collect_until, engine_request, tokens_of
from tests.helpers.processes import until


async def started(*engines: EchoEngine) -> Router:
    router = Router(engines)
    await router.start()
    return router


async def test_passes_everything_through():
    engine = EchoEngine()
    router = await started(engine)
    outputs = await collect(router.generate(engine_request(max_tokens=5)))
    assert outputs[0].token_ids == []
    assert outputs[0].finish_reason is None
    assert tokens_of(outputs) == [1, 2, 3, 1, 2]
    assert outputs[-1].finish_reason == "length"


@pytest.mark.parametrize("die_after", range(1, 9))
async def test_a_request_outlives_its_engine(die_after):
    first, second = EchoEngine(die_after=die_after), EchoEngine()
    router = await started(first, second)
    request = engine_request(max_tokens=8, logprobs=0)
    outputs = await collect(router.generate(request))
    assert tokens_of(outputs) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert sum(len(output.logprobs or ()) for output in outputs) == 8
    assert [o.finish_reason for o in outputs].count("length") == 1
    if die_after < 8:
        (resumed,) = second.requests
        assert list(resumed.output_token_ids) == [1, 2, 3, 1, 2, 3, 1, 2][:die_after]
        assert resumed.sampling == request.sampling
    assert sum(1 for output in outputs if not output.token_ids) == 1  # one acknowledgement


async def test_resumption_is_not_told_what_is_delivered_already():
    first, second = EchoEngine(die_after=1), EchoEngine()
    router = await started(first, second)
    outputs = await collect(router.generate(engine_request(max_tokens=3, prompt_logprobs=0)))
    assert sum(len(output.prompt_logprobs or ()) for output in outputs) == 2
    assert second.requests[0].sampling.prompt_logprobs is None


class Pieces(EchoEngine):
    """Delivers prompt log-probabilities one by one, and dies in the middle of them."""

    def __init__(self, pieces: int, **options):
        super().__init__(**options)
        self.pieces = pieces

    async def generate(self, request):
        yield EngineOutput(request.request_id, 0)
        for number in range(self.pieces):
            yield EngineOutput(request.request_id, 0, prompt_logprobs=[TokenLogprobs(float(number), 1)])
        raise EngineDead("in the middle")


async def test_prompt_logprobs_are_not_repeated_when_cut_in_the_middle():
    router = await started(Pieces(1), EchoEngine())
    outputs = await collect(router.generate(engine_request(prompt=(1, 2, 3, 4), max_tokens=2, prompt_logprobs=0)))
    assert sum(len(output.prompt_logprobs or ()) for output in outputs) == 3
    assert tokens_of(outputs) == [1, 2]


async def test_when_no_engine_is_left_the_stream_ends_with_one_clear_error():
    router = await started(EchoEngine(die_after=3), EchoEngine(die_after=2))
    received = await collect_until(EngineDead, router.generate(engine_request(max_tokens=8)))
    assert tokens_of(received) == [1, 2, 3, 1, 2]
    with pytest.raises(EngineDead):
        await collect(router.generate(engine_request()))


async def test_many_streams_move_over_together():
    first, second = EchoEngine(die_after=333), EchoEngine()
    router = await started(first, second)
    requests = [engine_request(f"r{i}", prompt=(i, i + 1), max_tokens=10) for i in range(100)]
    results = await asyncio.gather(*(collect(router.generate(request)) for request in requests))
    for i, outputs in enumerate(results):
        assert tokens_of(outputs) == [i, i + 1] * 5
    assert any(request.output_token_ids for request in second.requests)


async def test_least_outstanding_work_first():
    first, second = EchoEngine(delay=0.01), EchoEngine(delay=0.01)
    router = await started(first, second)
    heavy = asyncio.create_task(collect(router.generate(engine_request("heavy", max_tokens=50))))
    await asyncio.sleep(0)
    light = [asyncio.create_task(collect(router.generate(engine_request(f"l{i}", max_tokens=5)))) for i in range(3)]
    await asyncio.gather(*light)
    heavy.cancel()
    await asyncio.gather(heavy, return_exceptions=True)
    assert [r.request_id for r in first.requests] == ["heavy"]
    assert len(second.requests) == 3


async def test_a_full_engine_passes_on_to_another():
    full, other = EchoEngine(max_requests=0), EchoEngine()
    router = await started(full, other)
    assert tokens_of(await collect(router.generate(engine_request(max_tokens=3)))) == [1, 2, 3]
    assert len(other.requests) == 1


async def test_when_all_are_full_the_refusal_is_passed_on():
    router = await started(EchoEngine(max_requests=0), EchoEngine(max_requests=0))
    (output,) = await collect(router.generate(engine_request()))
    assert output.error.status == 503
    assert output.error.code == "overloaded"


async def test_abort_reaches_the_engine_that_has_the_request():
    engine = EchoEngine(delay=0.001)
    router = await started(engine, EchoEngine())
    stream = router.generate(engine_request(max_tokens=1000))
    await anext(stream)
    await router.abort("r#0")
    rest = await collect(stream)
    assert rest[-1].finish_reason == "abort"
    await router.abort("unknown")


async def test_closing_the_stream_stops_the_engine():
    engine = EchoEngine()
    router = await started(engine)
    stream = router.generate(engine_request(max_tokens=1000))
    await anext(stream)
    assert engine.status().running == 1
    await stream.aclose()
    assert engine.status().running == 0


async def test_a_gap_is_an_error_of_the_request():
    class Lossy(EchoEngine):
        async def generate(self, request):
            yield EngineOutput(request.request_id, 0)
            yield EngineOutput(request.request_id, 3, [1])

    router = await started(Lossy())
    with pytest.raises(Exception, match="lost on the way"):
        await collect(router.generate(engine_request()))


async def test_status_of_several():
    first, second = EchoEngine(), EchoEngine()
    router = await started(first, second)
    await collect(router.generate(engine_request(max_tokens=4)))
    status = router.status()
    assert (status.state, status.blocks, status.computed_tokens) == ("ready", 8192, 4)
    first.die()
    assert router.status().state == "ready"
    second.die("broken")
    assert router.status().state == "failed"
    assert router.status().cause


async def test_drain_and_close_reach_all():
    first, second = EchoEngine(delay=0.001), EchoEngine(delay=0.001)
    router = await started(first, second)
    running = asyncio.create_task(collect(router.generate(engine_request(max_tokens=20))))
    await asyncio.sleep(0.005)
    assert not await router.drain(0.001)
    assert await router.drain(5)
    assert tokens_of(await running) == [1, 2, 3] * 6 + [1, 2]
    (output,) = await collect(router.generate(engine_request()))
    assert output.error.status == 503
    await router.close()
    assert router.status().state == "failed"


def test_no_engines():
    with pytest.raises(ValueError, match="at least one"):
        Router([])


async def test_cache_hits_of_another_engine_are_not_counted_again():
    cursor = Cursor.of(engine_request(max_tokens=8))
    assert cursor.accept(EngineOutput("r#0", 0, [1], num_cached_tokens=16)).num_cached_tokens == 16
    cursor.resume()
    assert cursor.accept(EngineOutput("r#0", 1, [2], num_cached_tokens=64)).num_cached_tokens == 0


# Engines that have lost their workers


class Workers(EchoEngine):
    """Can lose its workers in mid-answer: it says so, and nothing comes any more until they are back."""

    def __init__(self, **options):
        super().__init__(**options)
        self.back = asyncio.Event()
        self.back.set()
        self.recovery: Recovery | None = None
        self.epoch = 0
        self.aborted: set[str] = set()

    def lose(self, plan: str) -> None:
        self.back.clear()
        self.epoch += 1
        self.recovery = Recovery(self.epoch, 0, "n", "killed", "it was killed", time.time(), plan)

    async def generate(self, request):
        self.aborted.discard(request.request_id)
        async with aclosing(super().generate(request)) as outputs:
            async for output in outputs:
                await self.stuck(request.request_id)
                yield output

    async def stuck(self, request_id):
        while not self.back.is_set() and request_id not in self.aborted:  # noqa: ASYNC110
            await asyncio.sleep(0.002)

    async def abort(self, request_id):
        self.aborted.add(request_id)
        await super().abort(request_id)

    def status(self):
        status = super().status()
        if self.recovery is None:
            return status
        return msgspec.structs.replace(status, state="recovering", recovery=self.recovery)


async def by_itself(*engines: EchoEngine) -> Router:
    """Without relief, which would help as well, later."""
    router = Router(engines, relieve=False)
    await router.start()
    return router


@pytest.mark.parametrize(
    ("plan", "patience", "leaves"), [("wait", 9.0, True), ("restart", 0.1, True), ("restart", 9.0, False)]
)
async def test_requests_leave_an_engine_that_does_not_get_its_workers_back(monkeypatch, plan, patience, leaves):
    monkeypatch.setattr(router_module, "_LOOK_S", 0.01)
    monkeypatch.setattr(router_module, "_PATIENCE_S", patience)
    first, second = Workers(delay=0.002), Workers(delay=0.002)
    router = await by_itself(first, second)
    running = [asyncio.create_task(collect(router.generate(engine_request(f"r{i}", max_tokens=60)))) for i in range(4)]
    await until(lambda: second.status().computed_tokens >= 20)
    second.lose(plan)
    if leaves:
        for task in running:
            assert tokens_of(await asyncio.wait_for(task, 60)) == [1, 2, 3] * 20
        assert router.status().engines[1].relieved == 2
        resumed = [request for request in first.requests if request.output_token_ids]
        assert len(resumed) == 2
    else:
        await asyncio.sleep(0.3)
        assert router.status().engines[1].relieved == 0
        second.recovery = None
        second.back.set()
        for task in running:
            assert tokens_of(await asyncio.wait_for(task, 60)) == [1, 2, 3] * 20
    await router.close()


async def test_nobody_leaves_while_no_other_engine_is_ready(monkeypatch):
    monkeypatch.setattr(router_module, "_LOOK_S", 0.01)
    first, second = Workers(delay=0.002), Workers(delay=0.002)
    router = await by_itself(first, second)
    running = [asyncio.create_task(collect(router.generate(engine_request(f"r{i}", max_tokens=60)))) for i in range(4)]
    await until(lambda: second.status().computed_tokens >= 20)
    first.lose("wait"), second.lose("wait")
    await asyncio.sleep(0.2)
    assert [each.relieved for each in router.status().engines] == [0, 0]
    for engine in (first, second):
        engine.recovery = None
        engine.back.set()
    for task in running:
        assert tokens_of(await asyncio.wait_for(task, 60)) == [1, 2, 3] * 20
    await router.close()


async def test_who_ends_workers_wherever_it_runs_is_tried_alone_and_refused(monkeypatch):
    """Each engine waits for its workers after it; the others' requests go on to the end."""
    monkeypatch.setattr(router_module, "_LOOK_S", 0.01)

    class Killed(Workers):
        async def generate(self, request):
            async with aclosing(super().generate(request)) as outputs:
                async for output in outputs:
                    if request.request_id == "poison" and output.token_ids:
                        while request.request_id not in self.aborted:
                            self.lose("wait")
                            asyncio.get_running_loop().call_later(0.3, self.recover)
                            await self.stuck(request.request_id)
                        output = EngineOutput(request.request_id, output.start, finish_reason="abort")
                    yield output

        def recover(self):
            self.recovery = None
            self.back.set()

    engines = [Killed(delay=0.002) for _ in range(3)]
    router = await by_itself(*engines)
    good = [asyncio.create_task(collect(router.generate(engine_request(f"r{i}", max_tokens=60)))) for i in range(6)]
    outputs = await asyncio.wait_for(collect(router.generate(engine_request("poison", max_tokens=60))), 60)
    assert outputs[-1].error.code == "poison_request"
    for task in good:
        assert tokens_of(await asyncio.wait_for(task, 60)) == [1, 2, 3] * 20
    await router.close()

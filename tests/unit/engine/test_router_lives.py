"""A router whose engines are lost and come back: what becomes of requests over their lives."""

import asyncio
import platform

import pytest

from phalanx.config import RecoveryConfig
from phalanx.engine import recovery as recovery_module
from phalanx.engine import router as router_module
from phalanx.engine.client import EngineLost, EngineOutput, request_error
from phalanx.engine.echo import EchoEngine
from phalanx.engine.router import Router
from phalanx.errors import ClusterMissing, EngineDead, NotEnoughMemory, PhalanxError
from tests.helpers.engine_requests import collect, collect_until, engine_request, tokens_of
from tests.helpers.processes import until


class Family:
    """Makes echo engines: each life as the next of `options` says, the last of them for ever."""

    def __init__(self, *options):
        self.options = list(options)
        self.born = []

    def __call__(self) -> EchoEngine:
        engine = EchoEngine(**self.options[min(len(self.born), len(self.options) - 1)])
        self.born.append(engine)
        return engine


@pytest.fixture
def quick(monkeypatch):
    """No pauses before another start."""
    monkeypatch.setattr(recovery_module, "BACK_OFF_S", (0.0, 0.005))


async def revived(first: dict, *later: dict, clients: int = 1, **options) -> tuple[Router, Family]:
    family = Family(first, *later)
    router = Router([family() for _ in range(clients)], make=family, **options)
    await router.start()
    return router, family


@pytest.mark.parametrize("die_after", range(1, 9))
async def test_a_request_outlives_the_only_engine(die_after, quick):
    router, _family = await revived({"die_after": die_after}, {})
    request = engine_request(max_tokens=8, logprobs=0, prompt_logprobs=0)
    outputs = await collect(router.generate(request))
    assert tokens_of(outputs) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert sum(len(output.logprobs or ()) for output in outputs) == 8
    assert sum(len(output.prompt_logprobs or ()) for output in outputs) == 2
    assert [o.finish_reason for o in outputs if o.finish_reason] == ["length"]
    if die_after < 8:
        status = router.status()
        assert (status.state, status.epoch, status.failures) == ("ready", 1, {"killed": 1})
        (recovery,) = status.recoveries
        assert (recovery.rank, recovery.resumed, recovery.recomputed) == (-1, 1, 3 + die_after)
        assert recovery.first_token_s >= recovery.reload_s > 0
        assert status.computed_tokens == 8
    await router.close()


@pytest.mark.parametrize("given_up", [True, False])
async def test_who_keeps_something_for_the_next_life_hears_that_there_will_be_none(quick, given_up):
    ended: list[int] = []
    later = {"refuse_to_start": PhalanxError("no")} if given_up else {}
    router, _ = await revived({"die_after": 3}, later, ended=ended.append)
    await asyncio.gather(collect(router.generate(engine_request(max_tokens=8))), return_exceptions=True)
    if given_up:
        await asyncio.wait_for(router.lost(), 60)
        await until(lambda: ended == [0], 5)
    assert len(ended) == given_up
    await router.close()
    assert set(ended) == {0}


async def test_with_recovery_switched_off_the_first_life_is_the_only_one():
    router, family = await revived({"die_after": 3}, {}, recovery=RecoveryConfig(enable_recovery=False))
    received = await collect_until(EngineDead, router.generate(engine_request(max_tokens=8)))
    assert tokens_of(received) == [1, 2, 3]
    assert len(family.born) == 1
    assert (await asyncio.wait_for(router.lost(), 60)).kind == "killed"
    assert router.status().state == "failed"


async def test_many_lives_and_many_requests(quick):
    router, family = await revived({"die_after": 333})
    requests = [engine_request(f"r{i}", prompt=(i, i + 1), max_tokens=10) for i in range(100)]
    results = await asyncio.gather(*(collect(router.generate(request)) for request in requests))
    for i, outputs in enumerate(results):
        assert tokens_of(outputs) == [i, i + 1] * 5
        assert sum(output.finish_reason is not None for output in outputs) == 1
    assert len(family.born) >= 3
    assert router.status().epoch == len(family.born) - 1
    assert router.status().computed_tokens == 1000
    await router.close()


async def test_new_requests_wait_for_the_engine_up_to_a_limit(quick):
    release = asyncio.Event()

    class Slow(EchoEngine):
        async def start(self):
            await release.wait()
            return await super().start()

    first = EchoEngine(delay=0.001)
    router = Router([first], make=Slow, places=3)
    await router.start()
    old = asyncio.create_task(collect(router.generate(engine_request("old", max_tokens=30))))
    await asyncio.sleep(0.01)
    first.die()
    await asyncio.sleep(0.01)
    assert router.status().state == "recovering"
    streams = [router.generate(engine_request(f"new{i}", max_tokens=3)) for i in range(3)]
    admitted = [await asyncio.wait_for(anext(stream), 60) for stream in streams]
    assert [output.error is not None for output in admitted] == [False, False, True]
    assert (admitted[2].error.status, admitted[2].error.code) == (503, "overloaded")
    assert admitted[2].error.retry_after > 0
    await streams[2].aclose()
    assert router.status().waiting == 3
    await router.abort("new1")
    assert [output.finish_reason for output in await collect(streams[1])] == ["abort"]
    release.set()
    assert tokens_of([admitted[0], *await collect(streams[0])]) == [1, 2, 3]
    assert tokens_of(await old) == [1, 2, 3] * 10
    await router.close()


async def test_starts_that_fail_are_tried_again(quick):
    broken = {"refuse_to_start": EngineLost("It died.", "it died", kind="killed")}
    router, family = await revived({"die_after": 2}, broken, broken, {})
    assert tokens_of(await collect(router.generate(engine_request(max_tokens=5)))) == [1, 2, 3, 1, 2]
    assert len(family.born) == 4
    assert router.status().failures == {"killed": 3}
    assert len(router.status().recoveries) == 1
    await router.close()


async def test_when_nothing_helps_every_stream_ends_and_the_cause_is_named(quick):
    broken = {"refuse_to_start": PhalanxError("The disk is gone.")}
    router, family = await revived({"die_after": 2}, broken)
    received = await collect_until(EngineDead, router.generate(engine_request(max_tokens=5)))
    assert tokens_of(received) == [1, 2]
    assert len(family.born) == 1 + recovery_module.MAX_TRIES
    loss = await asyncio.wait_for(router.lost(), 60)
    assert loss.message.endswith("The disk is gone.")
    assert router.status().state == "failed"
    with pytest.raises(EngineDead, match="disk"):
        await collect(router.generate(engine_request()))


@pytest.mark.parametrize(
    "missing", [NotEnoughMemory("It needs 3 GB, 1 GB is free."), ClusterMissing("RAY_ADDRESS is a:1, where nobody is.")]
)
async def test_while_something_is_missing_new_requests_are_refused_and_accepted_ones_wait(quick, monkeypatch, missing):
    monkeypatch.setattr(recovery_module, "CAPACITY_S", 0.02)
    router, _family = await revived({"die_after": 2}, *[{"refuse_to_start": missing}] * 12, {})
    accepted = asyncio.create_task(collect(router.generate(engine_request(max_tokens=5))))
    await until(lambda: router.status().recovery is not None and router.status().recovery.plan == "wait")
    assert missing.message in router.status().recovery.missing
    (refusal,) = await collect(router.generate(engine_request("late")))
    assert (refusal.error.status, refusal.error.retry_after is not None) == (503, True)
    assert missing.message.rstrip(".") in refusal.error.message
    assert tokens_of(await accepted) == [1, 2, 3, 1, 2]
    await router.close()


async def test_waiting_for_memory_ends_with_the_time_for_it(quick, monkeypatch):
    monkeypatch.setattr(recovery_module, "CAPACITY_S", 0.02)
    small = {"refuse_to_start": NotEnoughMemory("It needs 3 GB, 1 GB is free.")}
    router, _family = await revived({"die_after": 2}, small, recovery=RecoveryConfig(recovery_timeout=0.2))
    received = await asyncio.wait_for(collect_until(EngineDead, router.generate(engine_request(max_tokens=5))), 60)
    assert tokens_of(received) == [1, 2]


async def test_an_idle_engine_is_ready_again_once_a_probe_has_run(quick):
    router, family = await revived({}, {"delay": 0.05})
    family.born[0].die()
    await until(lambda: len(family.born) == 2 and router.status().recovery.reload_s is not None)
    assert router.status().state == "recovering"
    await until(lambda: router.status().state == "ready")
    assert family.born[1].requests[0].request_id == "probe"
    assert router.status().recoveries[0].first_token_s >= 0.05
    await router.close()


async def test_a_poisonous_request_is_refused_alone_and_the_others_finish(quick):
    """Its answer is that of its prompt, until the one token that ends every engine."""
    router, family = await revived({"poison": 666})
    poison = engine_request("bad", prompt=(1, 2, 3, 666), max_tokens=8)
    healthy = [engine_request(f"r{i}", prompt=(10 + i, 20 + i), max_tokens=12) for i in range(6)]
    bad, *good = await asyncio.gather(*(collect(router.generate(request)) for request in (poison, *healthy)))
    assert tokens_of(bad) == [1, 2, 3]
    assert (bad[-1].finish_reason, bad[-1].error.status, bad[-1].error.retryable) == ("error", 500, False)
    for i, outputs in enumerate(good):
        assert tokens_of(outputs) == [10 + i, 20 + i] * 6
    assert len(family.born) <= 4
    assert router.status().state == "ready"
    assert tokens_of(await collect(router.generate(engine_request(max_tokens=3)))) == [1, 2, 3]
    await router.close()


async def test_poison_beside_other_engines_leaves_them_alone_after_two(quick):
    router, family = await revived({"poison": 666, "delay": 0.001}, clients=3)
    poison = engine_request("bad", prompt=(1, 2, 3, 666), max_tokens=8)
    healthy = [engine_request(f"r{i}", prompt=(10 + i, 20 + i), max_tokens=40) for i in range(6)]
    bad, *good = await asyncio.gather(*(collect(router.generate(request)) for request in (poison, *healthy)))
    assert bad[-1].error.code == "poison_request"
    assert all(tokens_of(outputs) == [10 + i, 20 + i] * 20 for i, outputs in enumerate(good))
    await until(lambda: router.status().recovery is None)
    assert len(family.born) == 3 + 3
    await router.close()


async def test_a_request_that_only_happens_to_be_there_is_not_refused(quick):
    """The engine dies every ten tokens, whoever runs."""
    router, _family = await revived({"die_after": 10})
    assert tokens_of(await collect(router.generate(engine_request(max_tokens=100)))) == ([1, 2, 3] * 34)[:100]
    await router.close()


async def test_an_accepted_request_is_never_refused_as_too_many(quick):
    """The next life has fewer places than there are requests."""
    router, family = await revived({"delay": 0.002}, {"max_requests": 2})
    streams = [router.generate(engine_request(f"r{i}", max_tokens=4)) for i in range(8)]
    firsts = [await anext(stream) for stream in streams]
    family.born[0].die()
    rest = await asyncio.gather(*(collect(stream) for stream in streams))
    for first, outputs in zip(firsts, rest, strict=True):
        assert tokens_of([first, *outputs]) == [1, 2, 3, 1]
    await router.close()


async def test_others_take_over_at_once_while_the_lost_one_starts(quick, caplog):
    release = asyncio.Event()

    class Slow(EchoEngine):
        async def start(self):
            await release.wait()
            return await super().start()

    first, second = EchoEngine(delay=0.001), EchoEngine(delay=0.001)
    router = Router([first, second], make=Slow)
    await router.start()
    running = [asyncio.create_task(collect(router.generate(engine_request(f"r{i}", max_tokens=20)))) for i in range(4)]
    await asyncio.sleep(0.005)
    first.die()
    await asyncio.sleep(0)
    for outputs in await asyncio.gather(*running):
        assert tokens_of(outputs) == ([1, 2, 3] * 7)[:20]
    status = router.status()
    assert (status.state, status.recovery.rank) == ("ready", -1)
    assert status.cause.startswith("The engine process of replica 0 was lost: ")
    release.set()
    await until(lambda: router.status().recovery is None)
    assert first not in router.clients
    lost, recovered = caplog.messages
    assert lost.startswith(f"The engine process of replica 0 on {platform.node()} was lost: ")
    assert lost.endswith("Recovering: its 2 requests go on in the other replicas.")
    assert ": the engine process of replica 0 was started again in " in recovered
    assert "; its 2 requests went on in the other replicas, " in recovered
    await router.close()


async def test_closing_while_an_engine_starts(quick):
    class Never(EchoEngine):
        async def start(self):
            await asyncio.Event().wait()

    first = EchoEngine(delay=0.001)
    router = Router([first], make=Never)
    await router.start()
    running = asyncio.create_task(collect(router.generate(engine_request(max_tokens=20))))
    await asyncio.sleep(0.005)
    first.die()
    await asyncio.sleep(0.01)
    await asyncio.wait_for(router.close(), 60)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_an_engine_that_calls_itself_dead_is_waited_for(quick, monkeypatch):
    """Its requests get errors a moment before it is gone, and the next one takes longer than that to start."""
    monkeypatch.setattr(router_module, "_LAST_WORDS_S", 0.03)

    class GivingUp(EchoEngine):
        async def generate(self, request):
            yield EngineOutput(request.request_id, 0)
            yield EngineOutput(request.request_id, 0, [1])
            error = request_error(EngineDead("The workers are lost."))
            yield EngineOutput(request.request_id, 1, finish_reason="error", error=error)

    class Slow(EchoEngine):
        async def start(self):
            await asyncio.sleep(0.1)
            return await super().start()

    first = GivingUp()
    router = Router([first], make=Slow)
    await router.start()
    running = asyncio.create_task(collect(router.generate(engine_request(max_tokens=5))))
    await asyncio.sleep(0.01)
    first.die()
    assert tokens_of(await running) == [1, 2, 3, 1, 2]
    await router.close()


async def test_an_engine_that_calls_itself_dead_and_lives_on_takes_no_requests(quick, monkeypatch):
    monkeypatch.setattr(router_module, "_LAST_WORDS_S", 0.03)

    class Dead(EchoEngine):
        async def generate(self, request):
            error = request_error(EngineDead("The workers are lost."))
            yield EngineOutput(request.request_id, 0, finish_reason="error", error=error)

    router = Router([Dead()])
    await router.start()
    await collect_until(EngineDead, router.generate(engine_request(max_tokens=5)))
    await router.close()


async def test_a_suspect_whose_engine_is_gone_for_good_is_tried_in_another(quick):
    """Three engines without a second life: two are lost to it, the third refuses nobody else."""
    engines = [EchoEngine(poison=666, delay=0.001), EchoEngine(poison=666, delay=0.001), EchoEngine(delay=0.001)]
    router = Router(engines)
    await router.start()
    bad = asyncio.create_task(collect(router.generate(engine_request("bad", prompt=(1, 666), max_tokens=3))))
    good = [asyncio.create_task(collect(router.generate(engine_request(f"r{i}", max_tokens=60)))) for i in range(4)]
    assert tokens_of(await asyncio.wait_for(bad, 60)) == [1, 666, 1]  # the third engine survives it
    assert [tokens_of(await each) for each in good] == [[1, 2, 3] * 20] * 4

"""Two replicas on a Ray cluster, each on a node of its own, behind one engine: a node that vanishes in mid-stream."""

from __future__ import annotations

import asyncio

import pytest

from phalanx import AsyncEngine, EngineConfig, SamplingParams
from phalanx.engine.resolution import resolved
from phalanx.errors import ConfigError
from tests.helpers.pace import pace_of
from tests.helpers.processes import descendants, until
from tests.helpers.ray_cluster import ray_cluster
from tests.helpers.tiny_model import write_tiny_model


async def tokens(engine: AsyncEngine, number: int, found: list[int] | None = None) -> list[int]:
    """A stream's tokens; `found` has at any moment those that have come."""
    params = SamplingParams(max_tokens=200, temperature=1.0, seed=number, ignore_eos=True)
    found = [] if found is None else found
    async for delta in engine.generate([3 + number, 17, 40 + number], params):
        found += delta.outputs[0].token_ids
    return found


@pytest.mark.slow
async def test_streams_outlive_their_node(tmp_path, monkeypatch) -> None:
    model = str(write_tiny_model(tmp_path))
    options = {"model": model, "dtype": "float32", "kv_cache_memory_bytes": "8M", "replacement_timeout": 1.0}
    async with AsyncEngine(EngineConfig.from_options(**options)) as engine:
        expected = await asyncio.gather(*(tokens(engine, n) for n in range(6)))
    with ray_cluster(h1={"num_cpus": 1}, h2={"num_cpus": 1}) as cluster, pace_of(tmp_path) as pace:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        options |= {"data_parallel_size": 2, "distributed_executor_backend": "ray"}
        async with AsyncEngine(EngineConfig.from_options(**options)) as engine:
            assert set(cluster.taken()) == {cluster.id("h1"), cluster.id("h2")}
            assert [each.state for each in engine.status().engines] == ["ready", "ready"]
            streams: list[list[int]] = [[] for _ in range(6)]
            with pace.slow():
                running = [asyncio.create_task(tokens(engine, n, found)) for n, found in enumerate(streams)]
                await until(lambda: all(streams))
                assert all(each.outstanding for each in engine.status().engines)
                await asyncio.to_thread(cluster.kill, "h2")
                await until(lambda: "recovering" in [each.state for each in engine.status().engines])
            assert await asyncio.wait_for(asyncio.gather(*running), 60) == expected
            assert sorted(each.state for each in engine.status().engines) == ["ready", "recovering"]
            assert sum(each.relieved for each in engine.status().engines) > 0
            cluster.add("h3", num_cpus=1)  # Ray wants the main thread
            await until(lambda: [each.state for each in engine.status().engines] == ["ready", "ready"], 60)
        assert cluster.is_clean()
    assert not [process for process in descendants() if "phalanx" in str(process)]


def test_without_a_cluster_it_is_said(tmp_path, monkeypatch) -> None:
    from phalanx.checkpoint.locate import locate

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    model = str(write_tiny_model(tmp_path / "m"))
    config = EngineConfig.from_options(model=model, data_parallel_size=2, distributed_executor_backend="ray")
    with pytest.raises(ConfigError, match="no Ray cluster runs here"):
        resolved(config, locate(model))

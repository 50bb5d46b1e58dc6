"""An engine process with one rank leaves the image of its weights with the front end, and the one in its place finds it
there: it reads nothing. What is no good is never used, and nothing stays."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx import AsyncEngine, EngineConfig
from phalanx.checkpoint.fingerprint import fingerprint
from phalanx.checkpoint.locate import locate
from phalanx.engine.client import EngineLost
from phalanx.engine.replica import Replica
from phalanx.engine.resolution import for_engine, resolved
from phalanx.errors import CheckpointError, NotEnoughMemory
from phalanx.executor.kept_image import KeptImage
from phalanx.loading.image import slower
from tests.helpers.engine_requests import collect, engine_request, tokens_of
from tests.helpers.processes import images, until
from tests.helpers.tiny_model import write_tiny_model
from tests.helpers.worker_model import retrain

pytestmark = pytest.mark.skipif(slower(), reason="the kernel has huge pages for private memory only")


def config(folder: Path, **options: object) -> EngineConfig:
    return EngineConfig.from_options(
        **{"model": str(folder), "dtype": "float32", "kv_cache_memory_bytes": "8M", **options}
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


@pytest.fixture
def kept() -> Iterator[KeptImage]:
    kept = KeptImage()
    yield kept
    kept.let_go()
    assert not images(os.getpid())


async def lived(folder: Path, kept: KeptImage, life: int = 1, **options: object) -> list[int]:
    """What an engine process says, from its start to its end."""
    checkpoint = locate(str(folder))
    replica = Replica(kept=kept, life=life)
    replica.configure(*for_engine(resolved(config(folder, **options), checkpoint), checkpoint))
    try:
        await replica.start()
        request = engine_request(max_tokens=30, ignore_eos=True, temperature=0.0)
        return tokens_of(await collect(replica.generate(request)))
    finally:
        await replica.close()


def inode(kept: KeptImage) -> int | None:
    return None if kept.fd is None else os.fstat(kept.fd).st_ino


async def test_who_is_killed_while_it_reads_leaves_none(model, kept, monkeypatch) -> None:
    monkeypatch.setenv("PHALANX_FAULT", "at=fill,life=1,do=kill")
    with pytest.raises(EngineLost, match="killed"):
        await lived(model, kept)
    assert kept.fd is None
    whole = await lived(model, kept, 2)
    assert kept.fd is not None
    retrain(model)
    assert await lived(model, kept, 3) == whole


async def test_who_is_killed_before_it_has_found_its_own_leaves_it_to_the_next(model, kept, monkeypatch) -> None:
    monkeypatch.setenv("PHALANX_FAULT", "at=load,life=2,do=kill")
    whole, first = await lived(model, kept), inode(kept)
    retrain(model)
    with pytest.raises(EngineLost, match="killed"):
        await lived(model, kept, 2)
    assert await lived(model, kept, 3) == whole
    assert inode(kept) == first


@pytest.mark.parametrize("change", ["dtype", "configuration", "weights"])
async def test_an_image_of_something_else_is_not_used(model, kept, change) -> None:
    """One of its own takes its place."""
    was, first = await lived(model, kept), inode(kept)
    options = {"dtype": "bfloat16"} if change == "dtype" else {}
    kept.weights = ""  # nobody waits for those
    if change == "configuration":
        settings = model / "config.json"
        settings.write_text(settings.read_text().replace("10000.0", "20.0"))
    elif change == "weights":
        retrain(model)
        kept.weights = fingerprint(locate(str(model)))
    fresh = KeptImage()
    expected = await lived(model, fresh, **options)
    fresh.let_go()
    assert await lived(model, kept, 2, **options) == expected != was
    assert inode(kept) not in (None, first)


async def test_weights_that_are_not_wanted_are_not_left(model, kept, tmp_path) -> None:
    """There is no image, and the files have changed: who finds that leaves nothing to those who come after the files
    are back."""
    before = shutil.copytree(model, tmp_path / "before")
    whole = await lived(model, kept)
    kept.let_go()
    retrain(model)
    with pytest.raises(CheckpointError, match="not those that the server started with"):
        await lived(model, kept, 2)
    assert kept.fd is None
    shutil.copy(before / "model.safetensors", model)
    assert await lived(model, kept, 3) == whole


async def test_nothing_is_kept_beyond_the_engine(model) -> None:
    async with AsyncEngine(config(model)) as engine:
        os.kill(engine.info.pid, 9)
        await until(lambda: engine.status().epoch == 1 and engine.status().state == "ready")
        assert len(images(os.getpid())) == 1
    assert not images(os.getpid())
    engine = AsyncEngine(config(model))
    await engine.start()
    os.kill(engine.info.pid, 9)
    await until(lambda: engine.status().state == "recovering")
    await engine.close()
    assert not images(os.getpid())
    with pytest.raises(NotEnoughMemory):  # it finds that when the weights are loaded
        await AsyncEngine(config(model, kv_cache_memory_bytes="100")).start()
    assert not images(os.getpid())


async def test_where_nobody_comes_after_it_none_is_left(model) -> None:
    async with AsyncEngine(config(model, enable_recovery=False)) as engine:
        os.kill(engine.info.pid, 9)
        await asyncio.wait_for(engine.lost(), 60)
        assert not images(os.getpid())

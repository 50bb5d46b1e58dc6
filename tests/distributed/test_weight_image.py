"""A rank that is lost leaves the image of its weights with the supervisor, and the one in its place finds it there: it
reads nothing. What is no good is never used."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from phalanx.checkpoint.fingerprint import fingerprint
from phalanx.checkpoint.locate import locate
from phalanx.distributed.mesh import Mesh
from phalanx.errors import CheckpointError
from phalanx.executor.multiprocess import SupervisorProcess
from phalanx.loading.image import slower
from tests.helpers.processes import images, wait_until
from tests.helpers.rank_processes import mp_executor, pids, requests, serve, start_engine, undisturbed
from tests.helpers.worker_model import engine_config, retrain

pytestmark = pytest.mark.skipif(slower(), reason="the kernel has huge pages for private memory only")

WANTED = requests(4)


@pytest.fixture
def own_model(rank_model, tmp_path) -> Path:
    return Path(shutil.copytree(rank_model, tmp_path / "own"))


@pytest.fixture(scope="module")
def expected(rank_model):
    return undisturbed(engine_config(rank_model), WANTED)


@pytest.mark.recovery
def test_a_replacement_reads_nothing(supervisor, own_model, expected):
    """Other weights are in the checkpoint by then: one number of them, and the tokens would be others."""
    engine = start_engine(executor := mp_executor(supervisor, Mesh(tp=2)), engine_config(own_model))
    try:
        first = fingerprint(locate(str(own_model)))
        retrain(own_model)
        killed = 0

        def each(steps: int, tokens: int) -> None:
            nonlocal killed
            if tokens >= 20 * (killed + 1) and killed < 3:  # the second one of rank 1 finds what the first has left
                os.kill(pids(executor)[(1, 1, 0)[killed]], signal.SIGKILL)
                killed += 1

        served = serve(engine, WANTED, each)
        assert killed == 3
        assert (served.tokens, served.errors) == (expected, {})
        assert {status.weights for status in executor.check_health()} == {first}
        assert len(images(supervisor._process.pid)) == 2
    finally:
        engine.close()
    assert wait_until(lambda: not images(supervisor._process.pid), 5), "the next engine may serve something else"


def test_another_configuration_is_not_mixed_with_it(supervisor, own_model):
    executor = mp_executor(supervisor, Mesh(tp=2))
    executor.start(engine_config(own_model))
    try:
        config = own_model / "config.json"
        before = config.read_text()
        config.write_text(before.replace("10000.0", "20000.0"))
        os.kill(pids(executor)[1], signal.SIGKILL)
        with pytest.raises(CheckpointError, match="not those that the server started with"):
            executor.restart(1)
        config.write_text(before)
        executor.restart(2)
    finally:
        executor.close()


@pytest.mark.recovery
def test_who_is_killed_while_it_loads_leaves_none(rank_model, expected, monkeypatch):
    """All ranks and images are lost with their supervisor, and then one of the ranks that load again."""
    monkeypatch.setenv("PHALANX_FAULT", "at=fill,rank=1,life=2,do=kill")
    own = SupervisorProcess(zygote=True)
    engine = start_engine(executor := mp_executor(own, Mesh(tp=2)), engine_config(rank_model))
    try:
        lost = False

        def each(steps: int, tokens: int) -> None:
            nonlocal lost
            if tokens >= 20 and not lost:
                lost = True
                os.kill(own._process.pid, signal.SIGKILL)

        served = serve(engine, WANTED, each)
        assert (served.tokens, served.errors) == (expected, {})
        assert executor._lives == {0: 2, 1: 3}
        assert not images(own._process.pid)
    finally:
        engine.close()
        own.close()

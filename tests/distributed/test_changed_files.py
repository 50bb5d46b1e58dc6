"""A model whose files change while it is served: who starts again reads what is there, which must not be mixed in."""

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
from tests.helpers.rank_processes import mp_executor, pids
from tests.helpers.worker_model import engine_config, retrain


@pytest.fixture
def own_model(rank_model, tmp_path) -> Path:
    return Path(shutil.copytree(rank_model, tmp_path / "own"))


def test_ranks_of_other_weights_are_refused_until_the_files_are_back(supervisor, own_model, rank_model):
    executor = mp_executor(supervisor, Mesh(tp=2))
    executor.start(engine_config(own_model))
    try:
        survivor = pids(executor)[0]
        retrain(own_model)
        for epoch in (1, 2):
            if epoch == 1:
                os.kill(pids(executor)[1], signal.SIGKILL)
                assert supervisor.cause(1, 5)
                supervisor.let_go()  # else there is an image of the right ones
            with pytest.raises(CheckpointError, match="not those that the server started with") as caught:
                executor.restart(epoch)
            assert caught.value.fix
        assert executor.check_health()[1].state == "dead"
        shutil.copy(rank_model / "model.safetensors", own_model)
        executor.restart(3)
        assert pids(executor)[0] == survivor, "it has kept its weights"
        assert len({status.weights for status in executor.check_health()}) == 1
    finally:
        executor.close()


def test_a_fingerprint_is_of_contents(own_model, rank_model):
    first = fingerprint(locate(str(rank_model)))
    os.utime(own_model / "model.safetensors", (1, 1))
    assert fingerprint(locate(str(own_model))) == first
    retrain(own_model)
    assert fingerprint(locate(str(own_model))) != first


def test_a_fingerprint_knows_the_configuration(own_model):
    first = fingerprint(locate(str(own_model)))
    config = own_model / "config.json"
    config.write_text(config.read_text().replace("10000", "20000") + " ")
    assert fingerprint(locate(str(own_model))) != first

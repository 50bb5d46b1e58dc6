"""A supervisor that hangs is found out when it is needed, and replaced."""

from __future__ import annotations

import os
import signal

import pytest

from phalanx.distributed.mesh import Mesh
from phalanx.executor import multiprocess
from phalanx.executor.base import WorkerDied
from phalanx.executor.multiprocess import SupervisorProcess
from tests.helpers.processes import gone_within, wait_until
from tests.helpers.rank_processes import mp_executor, pids
from tests.helpers.worker_model import engine_config


@pytest.fixture
def own_supervisor():
    process = SupervisorProcess(zygote=True)
    yield process
    process.close()


def test_a_stopped_supervisor_is_replaced_when_a_rank_is_to_be_started(own_supervisor, rank_model, monkeypatch):
    monkeypatch.setattr(multiprocess, "_START_S", 1.0)
    monkeypatch.setattr(multiprocess, "_END_S", 1.0)
    executor = mp_executor(own_supervisor, Mesh(tp=2))
    launcher = executor._launcher
    executor.start(engine_config(rank_model))
    try:
        launcher.on_start = None
        before = own_supervisor._process.pid
        os.kill(before, signal.SIGSTOP)
        os.kill(pids(executor)[1], signal.SIGKILL)
        with pytest.raises(WorkerDied, match="supervisor"):
            executor.restart(1)
        assert gone_within(before, 5)
        assert wait_until(lambda: executor.check_health()[0].state == "dead", 5), "the other rank goes with it, later"
        executor.restart(2)
        assert own_supervisor._process.pid != before
        assert len(pids(executor)) == 2
    finally:
        executor.close()

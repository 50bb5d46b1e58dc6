"""What a rank says a step takes: measured while it warms up, beside whatever else the machine does."""

from __future__ import annotations

from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest

from phalanx.worker.model_runner import ModelRunner
from phalanx.worker.worker import open_worker
from tests.helpers.worker_model import engine_config, write_model


def test_a_step_that_was_disturbed_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = 0.001
    times = chain([prompt, 0.050, 0.066, 0.013], repeat(0.066))
    run = ModelRunner.run

    def timed(runner: ModelRunner, plan: Any) -> Any:
        result = run(runner, plan)
        runner.worked_s = next(times)
        return result

    monkeypatch.setattr(ModelRunner, "run", timed)
    worker = open_worker(engine_config(write_model(tmp_path)))
    worker.load()
    worker.allocate()
    assert worker.status().step_s == 0.013
    worker.close()

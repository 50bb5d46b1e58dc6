"""Proposed tokens over several ranks and replicas, also when one is killed: the tokens of one rank without any."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from phalanx.distributed.mesh import Mesh
from phalanx.engine.client import EngineRequest
from phalanx.executor.multiprocess import SupervisorProcess
from phalanx.sampling_params import SamplingParams
from phalanx.speculative_config import parse_speculative_config
from tests.helpers.rank_processes import mp_executor, pids, serve, start_engine, undisturbed
from tests.helpers.worker_model import engine_config

CONFIG = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
LAYOUTS = {
    "tp2": (Mesh(tp=2), {}),
    "pp3": (Mesh(pp=3), {}),
    "tp2 pp2": (Mesh(tp=2, pp=2), {"stage_layers": (2, 1)}),
    "2 and 1": (Mesh.of_widths((2, 1)), {}),
}


def wanted() -> list[EngineRequest]:
    """A bias and little heat: the random model repeats some of its prompt then."""
    return [
        EngineRequest(
            f"r{i}",
            [5, 9, 7, 9, 5, 9, 7, 9, 60 + i],
            SamplingParams(
                max_tokens=40, temperature=(0.0, 0.6)[i % 2], seed=i, ignore_eos=True, logprobs=0,
                logit_bias={5: 6.0, 9: 7.0, 7: 6.0}, repetition_penalty=(1.0, 1.05)[i % 3 == 0],
            ),
        )
        for i in range(6)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def expected(rank_model: Path) -> dict[str, list[int]]:
    return undisturbed(engine_config(rank_model), wanted())


@pytest.mark.parametrize(
    "kill", [pytest.param(False, id="undisturbed"), pytest.param(True, id="killed", marks=pytest.mark.recovery)]
)
@pytest.mark.parametrize("name", LAYOUTS)
def test_over_ranks(
    supervisor: SupervisorProcess, rank_model: Path, expected: dict[str, list[int]], name: str, kill: bool
) -> None:
    mesh, layout = LAYOUTS[name]
    executor = mp_executor(supervisor, mesh, **layout)
    engine = start_engine(executor, engine_config(rank_model, speculative_config=parse_speculative_config(CONFIG)))
    killed = []

    def each_step(_: int, tokens: int) -> None:
        if kill and not killed and engine.status().speculation.accepted_tokens > 20:
            killed.append(pids(executor)[-1])
            os.kill(killed[0], signal.SIGKILL)

    try:
        served = serve(engine, wanted(), each_step)
        status = engine.status()
    finally:
        engine.close()
    assert served.tokens == expected and not served.errors
    assert status.speculation.accepted_tokens > 40
    assert bool(status.failures.get("killed")) == bool(killed) == kill

"""What being able to recover costs an undisturbed run, in instructions: counted, so that other work does not matter.

    python benchmarks/recovery_instructions.py              # needs valgrind (apt-get install valgrind)

`Engine.step` runs under callgrind, with recovery on and off, each with two amounts of work; the difference is what the
work takes without starting and ending. Eight requests, and workers that answer at once, so that everything counted is
the engine's own: the model's work, which is the same in both, would only make the shares smaller. The front end and
the watch over ranks are not counted; what they do goes by time, and not by steps.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import Future
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

REQUESTS = 8
AMOUNTS = (100, 300)
"""Tokens of each request."""


def steps(tokens: int, recover: bool) -> None:
    from phalanx.config import CacheConfig, EngineConfig, ModelConfig, RecoveryConfig, SchedulerConfig
    from phalanx.engine.client import EngineRequest
    from phalanx.engine.engine import Engine
    from phalanx.executor.base import CacheLayout
    from phalanx.sampling_params import SamplingParams
    from phalanx.step import StepPlan, StepResult, pack, unpack

    class Workers:
        max_in_flight, hang_bound, progress, wants_restart = 1, 0.0, 0, None

        def submit(self, plan: StepPlan) -> Future[StepResult]:
            done: Future[StepResult] = Future()
            rows = len(unpack(plan.rows.slots, "H"))
            done.set_result(StepResult(plan.epoch, plan.step_id, plan.rows.slots, pack([1] * rows)))
            return done

        def check_health(self) -> list[object]:
            return []

    config = EngineConfig(
        model=ModelConfig(max_model_len=2 * max(AMOUNTS)),
        cache=CacheConfig(block_size=16),
        scheduler=SchedulerConfig(max_num_seqs=REQUESTS),
        recovery=RecoveryConfig(enable_recovery=recover),
    )
    subject = Engine(config, Workers(), CacheLayout(1024, 16, 1, 64))  # type: ignore[arg-type]
    for number in range(REQUESTS):
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, seed=0)
        subject.add(EngineRequest(str(number), [number + 1] * 4, sampling))
    made = 0
    while subject.has_work:
        made += sum(len(output.token_ids) for output in subject.step())
    if made != REQUESTS * tokens:
        raise SystemExit(f"{made} tokens instead of {REQUESTS * tokens}")


def counted(tokens: int, recover: bool) -> int:
    """Instructions of the whole process."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out", sys.executable, __file__]
        command += ["--tokens", str(tokens), *(["--recover"] if recover else [])]
        env = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    found = re.search(r"Collected : (\d+)", done.stderr)
    if found is None:
        raise SystemExit(f"valgrind counted nothing:\n{done.stderr}")
    return int(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--recover", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tokens:
        steps(options.tokens, options.recover)
        return
    each = {}
    for recover in (False, True):
        few, many = (counted(tokens, recover) for tokens in AMOUNTS)
        each[recover] = (many - few) / (REQUESTS * (AMOUNTS[1] - AMOUNTS[0]))
    print(
        f"{each[False]:,.0f} instructions a token with recovery off, {each[True]:,.0f} with it on: "
        f"{each[True] / each[False]:.4f}"
    )


if __name__ == "__main__":
    main()

"""What being able to recover costs an undisturbed run, in instructions: counted, so that other work does not matter.

    python benchmarks/recovery_instructions.py              # needs valgrind (apt-get install valgrind)

With recovery off and on, under callgrind:

- `engine`: `Engine.step` alone, with two amounts of work; the difference is what the work takes without starting and
  ending. Eight requests, and workers that answer at once, so that everything counted is the engine's own: the model's
  work, which is the same in both, would only make the shares smaller.
- `server`: a whole `phalanx serve` while a stream is answered, from the request to the answer: its front end, and its
  engine process with the executor. Some things go by time and not by tokens (beats, status, the watch over processes
  and ranks), and callgrind makes all else some fifty times slower. So a fast stream and a slow one are counted, which
  tells the two apart. The two ranks run a tiny model at full speed and are not counted; they do not know the setting.

Switched off, nothing is replaced any more; that processes and ranks are watched over is the same in both.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import shown, summary

CALLGRIND = ("valgrind", "--tool=callgrind")
REQUESTS = 8
AMOUNTS = (100, 300)
"""Tokens of each request."""
SERVERS, COUNTS = 2, 4
"""Of each setting in turn, and how often each is counted: no two take quite the same number of instructions."""
TOKENS, FEW = 800, 60
"""Of a stream as fast as it can, and of one that waits so long at each step:"""
SLOW_S = 0.1
SERVE = ("-tp", "2", "--dtype", "float32", "--kv-cache-memory-bytes", "8M", "--hang-timeout", "100")
START_S = 220.0
"""For a server under callgrind."""


class Each(NamedTuple):
    """Instructions of what is done for each, whatever the other."""

    token: float
    second: float


Counted = tuple[dict[str, int], float]
"""Instructions of the processes, by what they are, and seconds."""


# ----------------------------------------------------------------------------------------------- the engine alone


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
        command = [*CALLGRIND, f"--callgrind-out-file={folder}/out", sys.executable, __file__]
        command += ["--tokens", str(tokens), *(["--recover"] if recover else [])]
        env = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    found = re.search(r"Collected : (\d+)", done.stderr)
    if found is None:
        raise SystemExit(f"valgrind counted nothing:\n{done.stderr}")
    return int(found[1])


def engine(recover: bool) -> float:
    """For each token."""
    few, many = (counted(tokens, recover) for tokens in AMOUNTS)
    return (many - few) / (REQUESTS * (AMOUNTS[1] - AMOUNTS[0]))


# ---------------------------------------------------------------------------------------------- a whole server


def server(recover: bool) -> list[dict[str, Each]]:
    """Instructions of each kind of process, several times."""
    from tests.helpers.pace import Pace
    from tests.helpers.serving import Serving
    from tests.helpers.tiny_model import write_tiny_model

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pace = Pace(folder, SLOW_S)
        counts = [*CALLGRIND, f"--callgrind-out-file={folder}/%p", "--instr-atstart=no"]
        counts += ["--trace-children=yes", "--trace-children-skip-by-arg=*superviso?"]
        arguments = [str(write_tiny_model(folder / "model", positions=1024)), *SERVE]
        serving = Serving(
            arguments if recover else [*arguments, "--no-enable-recovery"],
            folder / "log",
            env={"PYTHONHASHSEED": "0", "PHALANX_FAULT": pace.fault},
            start=lambda command, **rest: subprocess.Popen([*counts, *command], **rest),
        )
        found = []
        try:
            serving.says("Ready: ", START_S)
            members = {role: pids for role, pids in serving.members().items() if role in ("front", "engine")}
            ask(serving, TOKENS)
            for _ in range(COUNTS):
                fast = count(folder, members, lambda: ask(serving, TOKENS))
                with pace.slow():
                    slow = count(folder, members, lambda: ask(serving, FEW))
                found.append({role: solved(fast, slow, role) for role in members})
        finally:
            serving.kill()
    return found


def solved(fast: Counted, slow: Counted, role: str) -> Each:
    """From two runs of different length and different speed."""
    token, second = fast[0][role] / TOKENS, fast[1] / TOKENS
    rate = (slow[0][role] / FEW - token) / (slow[1] / FEW - second)
    return Each(token - rate * second, rate)


def ask(serving: Any, tokens: int) -> None:
    """A stream of so many, which is alone, so that all steps are alike."""
    from tests.helpers.history import assemble
    from tests.helpers.serving import Client

    body = {"prompt": "hello", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    client = Client(serving, "alone", body, timeout=START_S)
    client.join(START_S)
    answer = assemble(client.saw)
    if client.is_alive() or client.saw.broken or answer.errors or answer.complaints:
        raise SystemExit(f"the stream went wrong: {client.saw.broken} {answer.errors} {answer.complaints}")


def count(folder: Path, members: dict[str, list[int]], work: Callable[[], object]) -> Counted:
    """Of `work`."""
    pids = [pid for group in members.values() for pid in group]
    for words in (("instrumentation", "on"), ("zero",)):
        for pid in pids:
            tell(pid, *words)
    began = time.monotonic()
    work()
    for pid in pids:
        tell(pid, "dump")
    seconds = time.monotonic() - began
    for pid in pids:
        tell(pid, "instrumentation", "off")
    return {role: sum(total(folder, pid) for pid in group) for role, group in members.items()}, seconds


def tell(pid: int, *words: str) -> None:
    subprocess.run(["vgdb", f"--pid={pid}", *words], check=True, capture_output=True, timeout=60)


def total(folder: Path, pid: int) -> int:
    """Of the latest dump."""
    dumps = sorted(folder.glob(f"{pid}.*"), key=lambda path: int(path.suffix[1:]))
    found = re.search(r"^totals: (\d+)", dumps[-1].read_text(), re.M)
    if found is None:
        raise SystemExit(f"valgrind counted nothing for process {pid}")
    return int(found[1])


def servers() -> None:
    found: dict[bool, list[dict[str, Each]]] = {False: [], True: []}
    for _ in range(SERVERS):
        for recover, counts in found.items():
            counts += server(recover)
    for role in found[True][0]:
        for what in Each._fields:
            off, on = ([getattr(each[role], what) for each in counts] for counts in found.values())
            ratio = statistics.median(on) / statistics.median(off)
            print(
                f"{role}: instructions a {what} {shown(summary(off), 0)} with recovery off, "
                f"{shown(summary(on), 0)} with it on: {ratio:.4f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", choices=("engine", "server"), help="only that")
    parser.add_argument("--tokens", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--recover", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tokens:
        steps(options.tokens, options.recover)
        return
    if options.of != "server":
        off, on = engine(False), engine(True)
        print(f"Engine.step: instructions a token {off:,.0f} with recovery off, {on:,.0f} with it on: {on / off:.4f}")
    if options.of != "engine":
        servers()


if __name__ == "__main__":
    main()

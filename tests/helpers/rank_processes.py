"""Executors whose ranks are processes of this node, the engines over them, and looking at what they leave behind."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.config import EngineConfig
from phalanx.distributed.mesh import Mesh
from phalanx.engine.client import EngineRequest
from phalanx.engine.engine import Engine
from phalanx.executor.base import Executor
from phalanx.executor.hub import HubExecutor
from phalanx.executor.inprocess import InProcessExecutor
from phalanx.executor.launcher import Layout
from phalanx.executor.messages import RankStart
from phalanx.executor.multiprocess import SupervisorLauncher, SupervisorProcess
from phalanx.sampling_params import SamplingParams
from tests.helpers.processes import descendants, wait_until


class Launcher(SupervisorLauncher):
    """Under a supervisor that several tests share; `on_start` is called with each rank and its process."""

    def __init__(self, supervisor: SupervisorProcess, world_size: int):
        super().__init__(world_size, "cpu", supervisor=supervisor, keep=True)
        self.on_start: Callable[[int, int], None] | None = None
        self.started: list[int] = []
        """Every rank that was launched, in order."""

    def launch(self, starts: list[RankStart]) -> None:
        super().launch(starts)
        self.started += [start.rank for start in starts]
        if self.on_start is not None:
            for start in starts:
                assert wait_until(lambda rank=start.rank: self._supervisor.pid(rank) > 0, 20)
                self.on_start(start.rank, self._supervisor.pid(start.rank))


def mp_executor(supervisor: SupervisorProcess, mesh: Mesh, **layout: object) -> HubExecutor:
    return HubExecutor(Launcher(supervisor, mesh.world_size), Layout(mesh, **layout))


def launcher(executor: HubExecutor) -> Launcher:
    assert isinstance(executor._launcher, Launcher)
    return executor._launcher


def pids(executor: Executor) -> list[int]:
    return [status.pid for status in executor.check_health()]


def requests(count: int, *, tokens: int = 24, prompt: int = 9) -> list[EngineRequest]:
    """Greedy ones and drawn ones, with prompts of different lengths."""
    return [
        EngineRequest(
            f"r{i}",
            [(7 * i + 3 * j) % 131 for j in range(prompt + i % 5)],
            SamplingParams(max_tokens=tokens, temperature=float(i % 2), seed=i, ignore_eos=True),
        )
        for i in range(count)
    ]


@dataclass
class Served:
    """What an engine answered."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def serve(
    engine: Engine, wanted: Iterable[EngineRequest], each_step: Callable[[int, int], None] | None = None
) -> Served:
    """Until all are answered; `each_step` is called with the number of steps and of tokens so far."""
    served, steps = Served(), 0
    for request in wanted:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            tokens = served.tokens.setdefault(output.request_id, [])
            assert output.start == len(tokens)  # nothing is lost and nothing comes twice
            tokens.extend(output.token_ids)
            if output.error is not None:
                served.errors[output.request_id] = output.error.message
        steps += 1
        if each_step is not None:
            each_step(steps, sum(map(len, served.tokens.values())))
    return served


def start_engine(executor: Executor, config: EngineConfig) -> Engine:
    return Engine(config, executor, executor.start(config), debug=True)


def undisturbed(config: EngineConfig, wanted: Iterable[EngineRequest]) -> dict[str, list[int]]:
    """The tokens of a single rank."""
    engine = start_engine(InProcessExecutor(), config)
    try:
        return serve(engine, wanted).tokens
    finally:
        engine.close()


def left_behind() -> set[str]:
    """Listening places with our name that this process or one below it holds, and our names in /dev/shm. (What only
    dead processes held, the kernel has taken back.)"""
    held = set()
    for pid in (os.getpid(), *descendants()):
        for fd in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                held.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    names = {f[7] for f in lines if len(f) > 7 and f[7].startswith("@phalanx-") and f[6] in held}
    return names | {name for name in os.listdir("/dev/shm") if "phalanx" in name}

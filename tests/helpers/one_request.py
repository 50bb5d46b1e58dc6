"""One greedy request through an executor, as the executor and cluster tests ask it."""

from __future__ import annotations

from phalanx.executor.base import Executor
from tests.helpers.plans import GREEDY, Run, admission, answer, plan

PROMPT = [3, 77, 12, 12, 45, 101, 9, 64, 2, 110, 31]


def generate(executor: Executor, count: int = 10, *, epoch: int = 0) -> list[int]:
    """The tokens after PROMPT; the request is released again."""
    out: list[int] = []
    admit = [admission(0, PROMPT, list(range(8)), sampling=GREEDY)]
    while len(out) < count:
        run = Run(0, 1, out[-1]) if out else Run(0, len(PROMPT))
        out.append(answer(executor.submit(plan([run], admit=admit, epoch=epoch)).result()).tokens[0])
        admit = []
    executor.submit(plan(release=[0], epoch=epoch)).result()
    return out

"""Clients ask while a nemesis does harm: every answer is the undisturbed one, and nothing is left behind.

`FIXED` are the cases of every run; the pairwise sample has every two values of fault, target, phase, executor and
layout together. Beyond them: `make chaos`. A case that failed is a line; `make chaos CASE="…"` runs it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.helpers import worlds
from tests.helpers.cases import HANGS, HARMLESS, Case, pairwise, parse
from tests.helpers.nemesis import Nemesis, unable
from tests.helpers.worlds import World

FIXED = [
    parse(line)
    for line in (
        "fault=kill target=rank1 phase=decode executor=mp layout=tp2 seed=1",
        "fault=stop_then_continue target=rank0 phase=decode executor=mp layout=tp2 seed=2",
        "fault=segfault target=rank1 phase=prefill executor=mp layout=tp2 seed=3",
        "fault=exit target=rank0 phase=decode executor=mp layout=tp2 seed=4",
        "fault=raise target=rank1 phase=decode executor=mp layout=tp2 seed=5",
        "fault=hold target=rank1 phase=decode executor=mp layout=tp2 seed=6",
        "fault=out_of_memory target=rank1 phase=decode executor=mp layout=tp2 seed=7",
        "fault=abort target=rank1 phase=recovery executor=mp layout=tp2 seed=8",
        "fault=kill target=engine phase=decode executor=mp layout=tp2 seed=9",
        "fault=kill target=rank0 phase=drain executor=mp layout=tp2 seed=10",
        "fault=kill target=rank1 phase=idle executor=mp layout=uneven seed=11",
        "fault=cut target=host phase=decode executor=nodes layout=tp2 seed=12",
    )
]
SAMPLE = pairwise(1)


def recovers(case: Case) -> bool:
    """Whether something has to be made good for it to pass. (Without recovery an engine that hangs is waited for.)"""
    waits = case.target == "engine" and case.fault in HANGS
    return case.fault not in HARMLESS and case.target != "front" and case.phase != "load" and not waits


Places = Callable[[Case], World]


@pytest.fixture(scope="module")
def places(tiny_model: str) -> Iterator[Places]:
    """One world at a time; cases that can share one come one after the other."""
    now: list[World] = []

    def place(case: Case, *options: str) -> World:
        if reason := worlds.missing(case.executor) or unable(case):
            pytest.skip(reason)
        if not now or (now[0].executor, now[0].layout) != (case.executor, case.layout):
            for old in now:
                old.close()
            now[:] = [World(case.executor, case.layout, tiny_model, *options)]
        return now[0]

    yield place
    for old in now:
        old.close()


@pytest.mark.parametrize("case", FIXED, ids=str)
def test_fixed(places: Places, case: Case) -> None:
    report = Nemesis(places(case)).run(case)
    assert not report.complaints, str(report)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.recovery if recovers(case) else ()) for case in SAMPLE], ids=str
)
def test_pairwise(places: Places, case: Case) -> None:
    report = Nemesis(places(case)).run(case)
    assert not report.complaints, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("case", FIXED, ids=str)
def test_negative_proof(tiny_model: str, case: Case) -> None:
    """With recovery switched off each fixed case fails, and for want of it: streams end with the loss as error."""
    if reason := worlds.missing(case.executor) or unable(case):
        pytest.skip(reason)
    with worlds.world(case.executor, case.layout, tiny_model, "--no-enable-recovery") as place:
        complaints = Nemesis(place).run(case).complaints
    assert any("it ended with an error: The engine process is gone" in each for each in complaints), complaints

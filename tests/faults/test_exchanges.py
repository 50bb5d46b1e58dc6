"""A rank that is late, gone, or elsewhere when its peers wait for it in an exchange: mostly in a sum in the middle of
a block that they play natively (`phalanx.kernels.tape`). No result of such a step is used, and every answer is the
undisturbed one."""

from __future__ import annotations

import re

import pytest

from phalanx.kernels.library import native
from tests.helpers.days import check, day, under_way

SLOW = pytest.mark.slow
IN_A_BLOCK = "at=exchange,rank=1,after=3"
"""Sums of a step: of the token table, then two of each block. The peer of rank 1 plays its second block."""

needs_native = pytest.mark.skipif(native() is None, reason="the native library was not built")


@pytest.mark.recovery
@pytest.mark.parametrize(
    ("layout", "fault", "kind", "words"),
    [
        pytest.param("tp2", f"{IN_A_BLOCK},do=kill", "killed", "killed by SIGKILL", marks=needs_native),
        pytest.param("tp2", f"{IN_A_BLOCK},do=segfault", "killed", "killed by SIGSEGV", marks=[needs_native, SLOW]),
        pytest.param("tp2", f"{IN_A_BLOCK},do=exit", "ended", "ended with status 0", marks=[needs_native, SLOW]),
        pytest.param("tp2", f"{IN_A_BLOCK},do=raise", "failed", "InjectedFault", marks=[needs_native, SLOW]),
        pytest.param("tp2", f"{IN_A_BLOCK},do=stop", "hung", "no progress", marks=[needs_native, SLOW]),
        pytest.param("tp2", f"{IN_A_BLOCK},do=hold", "hung", "no progress", marks=[needs_native, SLOW]),
        pytest.param("tp3", f"{IN_A_BLOCK},do=kill", "killed", "killed by SIGKILL", marks=[needs_native, SLOW]),
        ("tp2", "at=step,rank=1,do=skip", "hung", r"rank 0 for rank 1, rank 1 for a plan"),
        pytest.param(
            "tp2", f"{IN_A_BLOCK},do=skip", "failed",
            r"Ranks disagree in exchange \d+: rank [01] is in \w+ of .*, rank [01] in \w+ of ", marks=SLOW,
        ),
        pytest.param(
            "tp2pp2", "at=exchange,rank=3,do=skip", "failed",
            r"Ranks disagree in exchange \d+: rank [23] is in \w+ of .*, rank [23] in \w+ of ", marks=SLOW,
        ),
    ],
)  # fmt: skip
def test_ranks_that_do_not_meet(tiny_model: str, layout: str, fault: str, kind: str, words: str) -> None:
    """It is named which and why."""
    with day(tiny_model, layout, fault) as (place, serving):
        oracle, clients = under_way(place, "greedy", "seeded")
        place.let_off()
        check(place, oracle, clients)
        (recovery,) = serving.status()["recoveries"]
        assert recovery["kind"] == kind and re.search(words, recovery["cause"]), recovery


@SLOW
@needs_native
def test_a_rank_that_comes_late_is_waited_for(tiny_model: str) -> None:
    """Far longer than native code waits, and shorter than a hang."""
    with day(tiny_model, faults=f"{IN_A_BLOCK},do=sleep=0.4") as (place, serving):
        oracle, clients = under_way(place, "greedy", "seeded")
        place.let_off()
        check(place, oracle, clients)
        assert not place.waiting and not serving.status()["recoveries"]

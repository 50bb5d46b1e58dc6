"""What can go wrong, as data: a fault, where, when, under which executor and layout. Pure.

case = parse("fault=kill target=rank1 phase=decode executor=mp layout=tp2 seed=7")
why_not(case)          # why there is no such case; empty when there is
pairwise(seed)         # few cases in which every two values that can meet do meet
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, fields

FAULTS = (
    "kill", "stop", "stop_then_continue", "abort", "exit", "segfault", "raise", "hold", "out_of_memory", "freeze",
    "cut", "flap", "half_open", "slow", "shm_full",
)  # fmt: skip
TARGETS = ("front", "engine", "rank0", "rank1", "rank2", "rank3", "actor", "raylet", "host")
PHASES = ("load", "prefill", "decode", "recovery", "drain", "idle")
EXECUTORS = ("mp", "ray", "nodes")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "tp2": (2, ("-tp", "2")),
    "tp3": (3, ("-tp", "3")),
    "pp2": (2, ("-pp", "2")),
    "tp2pp2": (4, ("-tp", "2", "-pp", "2")),
    "uneven": (2, ("-tp", "2", "--tensor-split", "3,1")),
}
"""Ranks, and the flags that ask for them."""

SIGNALS = ("kill", "stop", "stop_then_continue", "abort", "segfault")
"""Faults that one process does to another."""
LINK = ("cut", "flap", "half_open", "slow")
HANGS = ("stop", "stop_then_continue", "hold", "freeze")
HARMLESS = ("slow", "shm_full", "flap")
"""Nothing is lost by these; a flap may look like a loss."""
DONE_TO = {
    "front": ("kill", "abort", "segfault", "stop_then_continue"),
    "engine": ("kill", "stop", "stop_then_continue", "abort", "segfault", "exit", "raise", "hold"),
    "rank": (*SIGNALS, "exit", "raise", "hold", "out_of_memory", "freeze"),
    "actor": ("kill", "abort"),
    "raylet": ("kill",),
    "host": ("kill", "freeze", "shm_full", *LINK),
}


@dataclass(frozen=True)
class Case:
    fault: str
    target: str
    phase: str
    executor: str
    layout: str
    seed: int = 0

    @property
    def rank(self) -> int | None:
        return int(self.target[4:]) if self.target.startswith("rank") else None

    @property
    def world(self) -> int:
        return LAYOUTS[self.layout][0]

    @property
    def replaces_the_server(self) -> bool:
        """Whether the server is gone afterwards."""
        return self.phase in ("load", "drain") or (self.target == "front" and self.fault != "stop_then_continue")

    def __str__(self) -> str:
        return " ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


def parse(line: str) -> Case:
    """What `str` of a case wrote. Raises ValueError."""
    values = dict(word.partition("=")[::2] for word in line.split())
    seed = int(values.pop("seed", "0"))
    try:
        case = Case(**values, seed=seed)
    except TypeError:
        raise ValueError(f"{line!r} is not a case") from None
    if reason := why_not(case):
        raise ValueError(f"{line!r}: {reason}")
    return case


def why_not(case: Case) -> str:
    """Why there is no such case; empty when there is."""
    if case.layout not in LAYOUTS or case.phase not in PHASES or case.executor not in EXECUTORS:
        return "there is no such layout, phase or executor"
    kind = "rank" if case.rank is not None else case.target
    if case.fault not in DONE_TO.get(kind, ()):
        return f"{case.fault} is not done to {case.target}"
    if case.rank is not None and case.rank >= case.world:
        return f"{case.layout} has only {case.world} ranks"
    return _nowhere(case) or _at_no_time(case)


def _nowhere(case: Case) -> str:
    if case.target in ("actor", "raylet") and case.executor != "ray":
        return f"only Ray has an {case.target}"
    if case.target == "host":
        if case.fault == "shm_full":
            return "" if case.executor == "mp" else "the memory of one machine is filled"
        if case.executor != "nodes":
            return "all is on one machine: it has no link, and with it all is gone; Ray's hosts have their own tests"
    if case.fault == "freeze" and case.executor == "ray":
        return "a frozen process of one machine is the same with mp"
    return ""


def _at_no_time(case: Case) -> str:
    from_inside = case.fault in ("exit", "raise", "hold")
    if case.phase == "idle" and from_inside:
        return "nothing runs in an idle process that could do it"
    if case.phase == "idle" and case.fault == "out_of_memory":
        return "an idle process asks for no memory"
    if case.phase == "load":
        if case.target in ("host", "raylet", "actor") or case.fault in ("freeze", "stop_then_continue"):
            return "tests of starting have it"
        if case.target == "engine" and from_inside:
            return "the engine has no such point while it loads"
    if case.phase == "drain" and case.target in ("front", "host", "raylet"):
        return "as in decode"
    if case.phase == "recovery" and case.fault in HARMLESS:
        return "as in decode"
    if case.target == "front" and case.fault == "stop_then_continue" and case.phase != "decode":
        return "a pause is a pause"
    return ""


def all_cases(executors: Iterable[str] = EXECUTORS, layouts: Iterable[str] = tuple(LAYOUTS)) -> Iterator[Case]:
    for values in itertools.product(FAULTS, TARGETS, PHASES, executors, layouts):
        case = Case(*values)
        if not why_not(case):
            yield case


def pairs(case: Case) -> set[tuple[tuple[int, str], tuple[int, str]]]:
    values = list(enumerate(astuple(case)[:-1]))
    return set(itertools.combinations(values, 2))


def pairwise(seed: int, executors: Iterable[str] = EXECUTORS) -> list[Case]:
    """Every two values that occur together in some case do so in one of these. Greedy, and the same for a seed."""
    rng = random.Random(seed)
    candidates = list(all_cases(executors))
    rng.shuffle(candidates)
    covers = {case: pairs(case) for case in candidates}
    missing = set().union(*covers.values()) if covers else set()
    chosen = []
    while missing:
        best = max(candidates, key=lambda case: len(covers[case] & missing))
        missing -= covers[best]
        chosen.append(Case(*astuple(best)[:-1], seed=rng.randrange(1000)))
    return sorted(chosen, key=lambda case: (case.executor, case.layout, case.replaces_the_server))


def random_case(
    rng: random.Random, executors: Iterable[str] = EXECUTORS, layouts: Iterable[str] = tuple(LAYOUTS)
) -> Case:
    """Each fault as likely as any other, whatever the number of its places."""
    by_fault = _by_fault(tuple(executors), tuple(layouts))
    found = rng.choice(by_fault[rng.choice(sorted(by_fault))])
    return Case(*astuple(found)[:-1], seed=rng.randrange(1_000_000))


@functools.cache
def _by_fault(executors: tuple[str, ...], layouts: tuple[str, ...]) -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {}
    for case in all_cases(executors, layouts):
        found.setdefault(case.fault, []).append(case)
    return found

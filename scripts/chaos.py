"""`make chaos MINUTES=10 SEED=1`: a random walk through faults, for a chosen time.

Prints the seed and one line for each case. A case that failed prints what was wrong; its line is replayed with
`make chaos CASE="fault=… target=…"`. Exit code 1 when one failed. Faults of nodes need root (network namespaces).
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.helpers import worlds
from tests.helpers.cases import EXECUTORS, LAYOUTS, Case, parse, random_case
from tests.helpers.nemesis import Nemesis, Report, unable
from tests.helpers.tiny_model import write_tiny_model

STAY = 8
"""Cases in one world, before the next one: starting costs more than a case."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=None, help="of the walk; default: a new one")
    parser.add_argument("--case", action="append", default=[], help="run this instead; may be given several times")
    parser.add_argument("--executors", default=",".join(EXECUTORS), help="default: %(default)s")
    return parser.parse_args()


def usable(executors: list[str]) -> list[str]:
    for executor in executors:
        if reason := worlds.missing(executor):
            print(f"without {executor}: {reason}")
    return [executor for executor in executors if not worlds.missing(executor)]


def walk(rng: random.Random, executors: list[str]) -> list[Case]:
    """The next stay: cases of one executor and layout."""
    executor, layout = rng.choice(executors), rng.choice(list(LAYOUTS))
    cases: list[Case] = []
    while len(cases) < STAY:
        case = random_case(rng, [executor], [layout])
        if not unable(case):
            cases.append(case)
    return cases


def run(cases: list[Case], model: str, until: float) -> list[Report]:
    """One after the other, in one world while they share it; each is printed."""
    reports: list[Report] = []
    place: worlds.World | None = None
    try:
        for case in cases:
            if time.monotonic() > until:
                break
            if place is None or (place.executor, place.layout) != (case.executor, case.layout):
                if place is not None:
                    place.close()
                place = worlds.World(case.executor, case.layout, model)
            reports.append(Nemesis(place).run(case))
            print(reports[-1], flush=True)
    finally:
        if place is not None:
            place.close()
    return reports


def main() -> int:
    wanted = arguments()
    seed = wanted.seed if wanted.seed is not None else random.SystemRandom().randrange(1_000_000)
    reports: list[Report] = []
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_tiny_model(Path(folder) / "tiny"))
        if wanted.case:
            reports = run([parse(line) for line in wanted.case], model, float("inf"))
        else:
            executors = usable(wanted.executors.split(","))
            print(f"seed {seed}: {wanted.minutes:g} minutes of {', '.join(executors)}", flush=True)
            rng, until = random.Random(seed), time.monotonic() + 60 * wanted.minutes
            while time.monotonic() < until:
                reports += run(walk(rng, executors), model, until)
    failed = [report for report in reports if report.complaints]
    print(f"{len(reports)} cases, {len(failed)} failed" + ("" if wanted.case else f" (seed {seed})"))
    for report in failed:
        print(f'  make chaos CASE="{report.case}"')
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

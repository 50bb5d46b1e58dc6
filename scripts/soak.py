"""`make soak MINUTES=60`: constant load, and a random fault every 20 to 60 seconds, on one server after the other.

The first half is one machine with two ranks (`mp`); the second, where network namespaces can be made, three hosts with
a rank each (`nodes`), whose hosts and links fail too. Every answer is compared with that of an undisturbed run. Prints
what happens and writes JSON: requests, faults, lost answers (must be 0), and p50, p99 and maximum of detection, reload,
splitting anew, and the first token after a recovery. Exit code 1 when an answer was lost or anything else was wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.helpers import worlds
from tests.helpers.asks import Oracle
from tests.helpers.cases import HARMLESS, Case, random_case
from tests.helpers.history import Log, check_rest, check_stream, longest_gap, next_event_after
from tests.helpers.nemesis import Nemesis, unable
from tests.helpers.processes import wait_until
from tests.helpers.serving import Client, Serving
from tests.helpers.tiny_model import write_tiny_model

STREAMS = 4
EVERY_S = 2.0
"""Each of the streams asks again so often, or when it is done."""
PLACES = {"mp": "tp2", "nodes": "tp3", "ray": "tp2"}


class Load(threading.Thread):
    """One stream after another, each checked when it ends."""

    def __init__(self, serving: Serving, oracle: Oracle, seed: int):
        super().__init__(daemon=True)
        self.now: Client | None = None
        self.asked = self.accepted = self.refused = self.lost = 0
        self.complaints: list[str] = []
        self.silence = 0.0
        self.over = threading.Event()
        self._serving, self._oracle, self._rng = serving, oracle, random.Random(seed)
        self.start()

    def run(self) -> None:
        while not self.over.is_set():
            name = self._rng.choice(list(self._oracle.bodies))
            self.now = client = self._oracle.ask(self._serving, name)
            client.join()
            self._check(client.saw)
            self.over.wait(max(0.0, client.saw.sent + EVERY_S - time.monotonic()))

    def _check(self, log: Log) -> None:
        self.asked += 1
        complaints = check_stream(log, self._oracle.answers[log.ask])
        if log.accepted:
            self.accepted += 1
            self.lost += bool(complaints)
            self.silence = max(self.silence, longest_gap(log)[1])
        else:
            self.refused += 1
        self.complaints += complaints
        for complaint in complaints:
            print(f"    WRONG {complaint}", flush=True)


class Stretch:
    """A time with one server. `figures` has what came of it."""

    def __init__(self, place: worlds.World, rng: random.Random, pauses: tuple[float, float]):
        self.place, self._rng, self._pauses = place, rng, pauses
        self.faults: Counter[str] = Counter()
        self.recoveries: dict[int, dict[str, Any]] = {}
        self.moved: list[float] = []
        self.complaints: list[str] = []
        self._nemesis = Nemesis(place)

    def run(self, seconds: float) -> dict[str, Any]:
        serving = self.place.open()
        oracle = self.place.oracle or Oracle(serving)
        before = serving.baseline()
        loads = [Load(serving, oracle, self._rng.randrange(1 << 30)) for _ in range(STREAMS)]
        until = time.monotonic() + seconds
        try:
            while (left := until - time.monotonic()) > 0 and serving.process.poll() is None:
                self._wait(serving, min(left, self._rng.uniform(*self._pauses)))
                if time.monotonic() < until:
                    self._fault(serving, loads)
        finally:
            self._nemesis.undo()
            for load in loads:
                load.over.set()
            for load in loads:
                load.join(120)
        self._end(serving, before)
        return self._figures(loads)

    def _wait(self, serving: Serving, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._look(serving)
            time.sleep(min(1.0, max(0.0, until - time.monotonic())))

    def _look(self, serving: Serving) -> dict[str, Any]:
        """The status; recoveries that are over are kept."""
        try:
            status = serving.status()
        except OSError as error:
            return {"state": f"/status does not answer: {error}", "epoch": -1}
        self.recoveries.update({recovery["epoch"]: recovery for recovery in status.get("recoveries") or []})
        return status

    def _fault(self, serving: Serving, loads: list[Load]) -> None:
        case = self._choose()
        wait_until(lambda: self._look(serving)["state"] == "ready", 60)
        epoch = self._look(serving)["epoch"]
        clients = [load.now for load in loads if load.now is not None and load.now.is_alive()]
        try:
            at = self._nemesis.strike(case, self._rng)
        except (OSError, AssertionError) as error:
            self.complaints.append(f"{case}: it could not be done: {error}")
            return
        self.faults[f"{case.fault} {case.target}"] += 1
        bound = self._nemesis.bound(case, serving) + 30

        def over() -> bool:
            status = self._look(serving)
            return status["state"] == "ready" and (case.fault in HARMLESS or status["epoch"] > epoch)

        if case.fault in HARMLESS:
            time.sleep(5)
        if not wait_until(over, bound) and (self._nemesis.felt(case) or self._look(serving)["state"] != "ready"):
            self.complaints.append(f"{case}: not ready again within {bound:.0f} s: {self._look(serving)}")
        for client in clients:
            client.join(bound)
        moved = next_event_after([client.saw for client in clients], at)
        if case.fault in (*HARMLESS, "exit", "raise", "hold") or case.target == "engine":
            moved = None  # nothing stood still, or it happened a moment after it was asked for
        if moved is not None:
            self.moved.append(moved)
        words = "" if moved is None else f"; streams moved after {moved:.2f} s"
        print(f"  {time.strftime('%H:%M:%S')}  {case.fault} {case.target}{words}", flush=True)
        self._nemesis.undo()
        if case.target == "host" and case.fault in ("kill", "freeze", "cut", "half_open"):
            self._return_of(case)

    def _choose(self) -> Case:
        while True:
            found = random_case(self._rng, [self.place.executor], [self.place.layout])
            if found.phase == "decode" and found.target != "front" and not unable(found):
                return found

    def _return_of(self, case: Case) -> None:
        """The host comes back after a while, as if it had been started again."""
        time.sleep(5)
        host = self.place.hosts[-1]
        host.kill()
        self.place.start_node(len(self.place.hosts) - 1)

    def _end(self, serving: Serving, before: Any) -> None:
        if serving.process.poll() is not None:
            self.complaints.append(f"the server ended with exit code {serving.process.poll()}")
            self.complaints.append(serving.output[-3000:])
            return
        if not serving.at_rest(60):
            self.complaints.append(f"it does not come to rest: {self._look(serving)}")
        else:
            self._look(serving)
            wait_until(lambda: not check_rest(before, serving.baseline()), 30)
            self.complaints += check_rest(before, serving.baseline())
        try:
            if (code := serving.stop()) != 0:
                self.complaints.append(f"it ended with exit code {code}")
        except AssertionError as error:
            self.complaints.append(str(error)[:1000])
        if left := serving.left():
            self.complaints.append(f"processes are left: {left}")

    def _figures(self, loads: list[Load]) -> dict[str, Any]:
        found = list(self.recoveries.values())
        splits = [r for r in found if r["plan"] == "split" and r["kind"] != "regained"]
        regained = [r for r in found if r["kind"] == "regained"]

        def of(name: str, among: list[dict[str, Any]]) -> list[float]:
            return [recovery[name] for recovery in among if recovery.get(name) is not None]

        return {
            "executor": self.place.executor,
            "layout": self.place.layout,
            "requests": sum(load.asked for load in loads),
            "accepted": sum(load.accepted for load in loads),
            "refused": sum(load.refused for load in loads),
            "lost": sum(load.lost for load in loads),
            "faults": sum(self.faults.values()),
            "faults_by_kind": dict(sorted(self.faults.items())),
            "recoveries": len(found),
            "longest_silence_s": max(load.silence for load in loads),
            "times": {
                "detection": of("detection_s", found),
                "reload": of("reload_s", [r for r in found if r["plan"] == "restart"]),
                "re-split": of("reload_s", splits),
                "taking back": of("reload_s", regained),
                "first token": of("first_token_s", found),
                "streams moved (clients)": self.moved,
            },
            "complaints": self.complaints + [text for load in loads for text in load.complaints],
        }


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"n": len(ordered), "p50": ordered[len(ordered) // 2], "p99": p99, "max": ordered[-1]}


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--executors", default="mp,nodes", help="the time is shared among them; default: %(default)s")
    parser.add_argument("--pause", type=float, nargs=2, default=(20.0, 60.0), metavar=("LEAST", "MOST"))
    parser.add_argument("--json", default="soak.json", help="where to write; default: %(default)s")
    wanted = parser.parse_args()
    seed = wanted.seed if wanted.seed is not None else random.SystemRandom().randrange(1_000_000)
    executors = [executor for executor in wanted.executors.split(",") if not worlds.missing(executor)]
    print(f"seed {seed}: {wanted.minutes:g} minutes of {', '.join(executors)}, {STREAMS} streams", flush=True)
    stretches = []
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_tiny_model(Path(folder) / "tiny"))
        for executor in executors:
            print(f"{executor}, {PLACES[executor]}:", flush=True)
            with worlds.world(executor, PLACES[executor], model) as place:
                stretch = Stretch(place, random.Random(seed), tuple(wanted.pause))
                stretches.append(stretch.run(60 * wanted.minutes / len(executors)))
    result = {"seed": seed, "minutes": wanted.minutes, "date": time.strftime("%Y-%m-%d"), "stretches": stretches}
    for stretch_figures in stretches:
        stretch_figures["times"] = {name: spread(values) for name, values in stretch_figures["times"].items()}
    Path(wanted.json).write_text(json.dumps(result, indent=2) + "\n")
    return tell(stretches, wanted.json)


def tell(stretches: list[dict[str, Any]], target: str) -> int:
    wrong = 0
    for figures in stretches:
        wrong += len(figures["complaints"])
        requests = f"{figures['requests']} requests ({figures['refused']} refused)"
        print(f"\n{figures['executor']}, {figures['layout']}: {requests}")
        print(f"  {figures['faults']} faults, {figures['recoveries']} recoveries, lost: {figures['lost']}")
        for name, values in figures["times"].items():
            if values is not None:
                shown = ", ".join(f"{key} {values[key]:.2f} s" for key in ("p50", "p99", "max"))
                print(f"  {name:24} {shown}  (of {values['n']})")
        for complaint in figures["complaints"][:20]:
            print(f"  WRONG {complaint[:500]}")
    print(f"\nwritten to {target}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

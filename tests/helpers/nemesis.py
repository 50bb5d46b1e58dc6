"""Does to a server what a case says while clients ask, and has their history checked afterwards.

    with world("mp", "tp2", model) as place:
        report = Nemesis(place).run(parse("fault=kill target=rank1 phase=decode executor=mp layout=tp2 seed=7"))
        report.complaints        # none: the case is passed

Every wait is bounded. What was done is undone at the end of a case; a server that a case has ended is made anew for the
next one.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from phalanx.executor.deadlines import SILENT_LOADING
from phalanx.executor.seating import REST_S
from tests.helpers.asks import Oracle, wait_for_events
from tests.helpers.bad_network import bad_cable
from tests.helpers.cases import HANGS, HARMLESS, LINK, SIGNALS, Case
from tests.helpers.history import (
    Baseline,
    Outage,
    check_counts,
    check_gap,
    check_health,
    check_rest,
    check_stream,
    longest_gap,
    next_event_after,
)
from tests.helpers.processes import alive, name_of, wait_until
from tests.helpers.serving import Client, Onlooker, Serving
from tests.helpers.worlds import Groups, World, freezer_missing, gone, memory_missing

KILLED_S = 0.5
"""A death is noticed within."""
SILENT_S = 3.0
"""A network that says nothing is noticed within."""
RESTART_S = {"mp": 5.0, "nodes": 8.0, "ray": 12.0}
"""From the notice to the next event of every stream; or twice what the server took to start, on a busy machine."""
ENGINE_S = 8.0
"""More than that when the engine itself starts again; or twice what the server took to start."""
UNKILLABLE_S = 6.0
"""More, when what was lost cannot even be killed: its end is waited for a while."""
ENDS_S = 5.0
"""From the notice of a loss while ranks load to the end of the server."""
SHARE_S = 4.0
"""More, when a place does not come back: `--replacement-timeout` 2, and a split anew."""
REGAIN_S = REST_S + 10.0
"""A place that was given up rests for a while before it is taken in again."""

SIGNAL = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "stop_then_continue": signal.SIGSTOP,
    "abort": signal.SIGABRT,
    "segfault": signal.SIGSEGV,
}
KINDS: dict[str, frozenset[str]] = {
    "kill": frozenset({"killed"}),
    "abort": frozenset({"killed"}),
    "segfault": frozenset({"killed"}),
    "stop": frozenset({"hung"}),
    "stop_then_continue": frozenset({"hung"}),
    "freeze": frozenset({"hung"}),
    "hold": frozenset({"hung"}),
    "exit": frozenset({"ended"}),
    "raise": frozenset({"failed"}),
    "out_of_memory": frozenset({"out_of_memory"}),
    "cut": frozenset({"network", "hung"}),
    "half_open": frozenset({"network", "hung"}),
}
"""What a loss by this fault may be counted as."""
DIED_OF = {
    "kill": "SIGKILL",
    "abort": "SIGABRT",
    "segfault": "SIGSEGV",
    "exit": "ended with status 0",
    "raise": "InjectedFault",
    "stop": "did not answer",
    "hold": "did not answer",
    "out_of_memory": "out of memory",
}
"""As the last line of a server says it that ends of it."""


@dataclass
class Report:
    case: Case
    complaints: list[str] = field(default_factory=list)
    seconds: float = 0.0
    silence: float = 0.0
    """The longest of any stream."""
    moved: float | None = None
    """From the fault until every stream that was under way had moved again."""
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    """As /status has them."""

    def __str__(self) -> str:
        moved = "" if self.moved is None else f", streams moved after {self.moved:.2f} s"
        head = f"{'FAILED' if self.complaints else 'ok'}  {self.case}  ({self.seconds:.1f} s{moved})"
        return "\n    ".join([head, *self.complaints])


def unable(case: Case) -> str:
    """Why this machine cannot do it; empty when it can."""
    if case.fault == "freeze":
        return freezer_missing()
    if case.fault == "out_of_memory":
        return memory_missing()
    return ""


class Nemesis:
    def __init__(self, place: World):
        self.world = place
        self._heal: list[Callable[[], object]] = []
        self._groups = Groups()
        self._hit_at = 0.0

    def run(self, case: Case) -> Report:
        """Raises AssertionError when not even an undisturbed server can be had."""
        assert (case.executor, case.layout) == (self.world.executor, self.world.layout)
        report, began = Report(case), time.monotonic()
        self.world.open(ask=case.phase != "load")
        try:
            {"load": self._loading}.get(case.phase, self._serving)(case, report)
        except (OSError, AssertionError, KeyError) as error:  # the server does not answer, say
            report.complaints.append(f"{type(error).__name__}: {str(error)[:2000]}")
        finally:
            self.undo()
            if report.complaints or case.replaces_the_server or case.target in ("host", "raylet"):
                self.world.forget()
        report.seconds = time.monotonic() - began
        return report

    def strike(self, case: Case, rng: random.Random) -> float:
        """Do it now, whatever the phase; when that was. `undo` takes back what can be taken back."""
        inside = case.fault in ("exit", "raise", "hold") or (case.target == "engine" and rng.random() < 0.5)
        if not (inside and self._arm(case, rng)):
            self._hit(case, rng)
        else:
            self._hit_at = time.monotonic()
        return self._hit_at

    def undo(self) -> None:
        for heal in reversed(self._heal):
            with contextlib.suppress(OSError):
                heal()
        self._heal.clear()
        self._groups.close()
        self.world.disarm()

    # A server that serves

    def _serving(self, case: Case, report: Report) -> None:
        serving, oracle = self.world.serving, self.world.oracle
        assert serving is not None and oracle is not None
        assert serving.at_rest(), f"it is not at rest before the fault: {serving.status()}"
        before, counted = serving.baseline(), dict(serving.status()["failures"])
        bound = self.bound(case, serving)
        epoch, looker, offset = serving.status()["epoch"], Onlooker(serving), time.time() - time.monotonic()
        able_from = time.monotonic()
        clients = self._ask_and_strike(case, serving, oracle)
        for client in clients:
            client.join(bound + 60)
        able_to = time.monotonic()
        looker.stop()
        if any(client.is_alive() for client in clients):
            report.complaints.append(f"streams that do not end: {[c.saw.ask for c in clients if c.is_alive()]}")
            report.complaints.append(f"the server says: {serving.output[-1500:]}")
            return
        if case.target == "front" and case.fault != "stop_then_continue":
            self._front_is_gone(serving, report)
            return
        self._check_streams(case, clients, oracle, bound, report)
        if self.world.armed():
            report.complaints.append(f"the fault never happened: {self.world.armed()}")
        if case.phase == "drain":
            self._ended_well(serving, report)
            return
        if case.target != "host":
            self.undo()  # what was frozen or stopped, and given up, ends when it can
        self._check_server(case, serving, before, counted, report)
        report.recoveries = [r for r in serving.status()["recoveries"] if r["epoch"] > epoch]
        outages = [_outage(recovery, offset) for recovery in report.recoveries]
        if case.target != "front":  # it was stopped, and could not answer
            report.complaints += check_health(looker.samples, outages, able=(able_from, able_to))

    def _ask_and_strike(self, case: Case, serving: Serving, oracle: Oracle) -> list[Client]:
        """Ask, and do it, in the order that the phase says."""
        rng = random.Random(case.seed)
        if case.phase == "idle":
            self._hit(case, rng)
            time.sleep(rng.uniform(0.0, 0.5))
            return oracle.ask_all(serving)
        with self.world.pace.slow():  # so that it does not come too late
            return self._strike_amid(case, rng, serving, oracle)

    def _strike_amid(self, case: Case, rng: random.Random, serving: Serving, oracle: Oracle) -> list[Client]:
        if case.phase == "prefill":
            if not self._arm(case, rng):
                clients = oracle.ask_all(serving)
                time.sleep(rng.uniform(0.0, 0.02))
                self._hit(case, rng)
                return clients
            self._hit_at = time.monotonic()
            return oracle.ask_all(serving)
        clients = oracle.ask_all(serving)
        assert wait_for_events(clients, rng.randint(40, 500)), "the streams do not start"
        if case.phase == "drain":
            serving.process.send_signal(signal.SIGTERM)
            time.sleep(rng.uniform(0.0, 0.05))
        if case.phase == "recovery":
            self._hit_twice(case, rng, serving)
        else:
            self.strike(case, rng)
        return clients

    def _arm(self, case: Case, rng: random.Random) -> bool:
        """Have it happen from inside; False where it cannot."""
        if case.fault not in ("kill", "stop", "abort", "segfault", "exit", "raise", "hold"):
            return False
        if case.rank is not None:
            self.world.arm(rng.choice(("step", "computed")), case.rank, case.fault)
        elif case.target == "engine":
            self.world.arm(rng.choice(("before_commit", "after_commit", "after_send")), None, case.fault)
        else:
            return False
        return True

    def _hit_twice(self, case: Case, rng: random.Random, serving: Serving) -> None:
        """One loss, and the case's within the recovery from it."""
        inside = case.fault in ("exit", "raise", "hold") or (case.fault in ("kill", "abort") and rng.random() < 0.5)
        first = f"rank{(case.rank + 1) % case.world}" if case.rank is not None else "rank0"
        if case.target == "engine" and case.fault != "stop_then_continue":
            self.world.arm("recover", None, case.fault)
            os.kill(self.world.pid(first), signal.SIGKILL)
        elif case.rank is not None and inside:  # the one that takes its place fails too
            self.world.arm("load", case.rank, case.fault)
            os.kill(self.world.pid(case.target), signal.SIGKILL)
        else:
            victim = self.world.pid(case.target) if case.target != "host" else 0
            os.kill(self.world.pid(first), signal.SIGKILL)
            wait_until(lambda: serving.status()["state"] == "recovering", 2)
            self._hit(case, rng, victim)
        self._hit_at = time.monotonic()

    # The deeds

    def _hit(self, case: Case, rng: random.Random, pid: int = 0) -> None:
        """From outside, now."""
        if case.target == "host":
            self._hit_host(case, rng)
            return
        pid = pid or self.world.pid(case.target)
        below = self.world.pid("rank1") if case.target == "raylet" else 0
        self._hit_at = time.monotonic()
        if case.fault in SIGNALS:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, SIGNAL[case.fault])
                if case.fault.startswith("stop"):
                    self._heal.append(lambda: os.kill(pid, signal.SIGCONT) if alive(pid) else None)
            if case.fault == "stop_then_continue":
                self._continue_later(case, pid)
        elif case.fault in ("freeze", "out_of_memory"):
            with contextlib.suppress(ProcessLookupError):  # a first loss may have taken it along: recovery is off
                self._groups.freeze([pid]) if case.fault == "freeze" else self._groups.starve(pid, 1 << 16)
            self._hit_at = time.monotonic()
        else:
            raise AssertionError(f"{case.fault} cannot be done from outside")
        if below:  # an actor looks once a second whether its raylet is there: answers may be over by then
            self.world.reap(pid)
            assert gone([below], 10), "the rank outlives its raylet"
            self._hit_at = time.monotonic()

    def _continue_later(self, case: Case, pid: int) -> None:
        """Once it has been given up; a front end, after two seconds."""
        serving = self.world.serving
        assert serving is not None
        epoch = 0 if case.target == "front" else serving.status()["epoch"]

        def wait_and_continue() -> None:
            if case.target == "front":
                time.sleep(2)
            else:
                with contextlib.suppress(OSError):
                    wait_until(lambda: not alive(pid) or serving.status()["epoch"] > epoch, 20)
            if alive(pid):
                os.kill(pid, signal.SIGCONT)

        thread = threading.Thread(target=wait_and_continue, daemon=True)
        thread.start()
        self._heal.append(lambda: thread.join(25))

    def _hit_host(self, case: Case, rng: random.Random) -> None:
        self._hit_at = time.monotonic()
        if case.fault == "shm_full":
            self._fill_shm()
            return
        host = self.world.hosts[-1]
        if case.fault == "kill":
            host.kill()
        elif case.fault == "freeze":
            self._groups.freeze(host.pids())
        elif case.fault == "cut":
            self._heal.append(host.heal)
            host.cut()
        elif case.fault == "flap":
            self._heal.append(host.heal)
            for _ in range(3):
                host.cut()
                time.sleep(rng.uniform(0.1, 0.6))
                host.heal()
                time.sleep(rng.uniform(0.1, 0.3))
        else:
            stack = contextlib.ExitStack()
            delay = {"delay": 0.02, "jitter": 0.05} if case.fault == "slow" else {}
            cable = stack.enter_context(bad_cable(host, **delay))
            self._heal.append(stack.close)
            cable.deaf = case.fault == "half_open"

    def _fill_shm(self) -> None:
        assert self.world.serving is not None
        shm = self.world.serving.shm
        if os.path.samefile(shm, "/dev/shm"):
            raise AssertionError("its /dev/shm is everybody's")
        filler = shm / "filler"
        self._heal.append(lambda: filler.unlink(missing_ok=True))
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(1 << 20)):
                pass

    # Afterwards

    def felt(self, case: Case) -> bool:
        """Whether what was done could be: a process that gets by with what memory it has lives on."""
        return case.fault != "out_of_memory" or self._groups.killed > 0

    def bound(self, case: Case, serving: Serving) -> float:
        """Seconds that a stream may be silent."""
        hang = max(1.0, serving.status()["hang_bound"])
        noticed = hang + 1 if case.fault in HANGS else SILENT_S if case.fault in LINK else KILLED_S
        start = 2 * serving.start_s
        bound = noticed + max(RESTART_S[case.executor], start)
        if case.target == "engine":
            bound += max(ENGINE_S, start)
        if case.fault == "freeze":
            bound += UNKILLABLE_S
        if case.target in ("host", "raylet", "actor"):
            bound += SHARE_S
        return bound * 2 if case.phase == "recovery" else bound

    def _check_streams(self, case: Case, clients: list[Client], oracle: Oracle, bound: float, report: Report) -> None:
        logs = [client.saw for client in clients]
        for log in logs:
            report.complaints += check_stream(log, oracle.answers[log.ask]) + check_gap(log, bound)
            if not log.accepted and case.phase not in ("recovery", "idle"):
                report.complaints.append(f"{log.ask}: refused with {log.status}")
        report.silence = max(longest_gap(log)[1] for log in logs)
        report.moved = next_event_after(logs, self._hit_at)

    def _check_server(
        self, case: Case, serving: Serving, before: Baseline, counted: dict[str, int], report: Report
    ) -> None:
        if not serving.at_rest(30):
            report.complaints.append(f"it does not come to rest: {serving.status()}")
            return
        if case.target in ("host", "raylet"):
            return  # there is less of it now
        recoveries = serving.status()["recoveries"]
        regains = bool(recoveries) and recoveries[-1]["plan"] == "split" and recoveries[-1]["kind"] != "regained"
        wait_until(lambda: not check_rest(before, serving.baseline()), REGAIN_S if regains else 15)
        report.complaints += check_rest(before, serving.baseline())
        failures = serving.status()["failures"]
        if failures != (measured := _measured_failures(serving)):
            report.complaints.append(f"/status counts the losses {failures}, the metrics {measured}")
        if case.phase != "recovery" and case.target not in ("actor", "front"):
            new = {kind: number - counted.get(kind, 0) for kind, number in failures.items()}
            wanted = [] if case.fault in HARMLESS else [KINDS[case.fault]]
            report.complaints += check_counts(wanted, new)

    def _ended_well(self, serving: Serving, report: Report) -> None:
        code = serving.ends(45)
        if code != 0:
            report.complaints.append(f"it ended with exit code {code} after draining:\n{serving.output[-1500:]}")
        report.complaints += _left(serving)

    def _front_is_gone(self, serving: Serving, report: Report) -> None:
        """Everything else goes with it, and its port is free at once."""
        self.undo()
        report.complaints += _left(serving)
        serving.kill()
        for host in self.world.hosts[1:]:
            if not wait_until(lambda host=host: not host.pids(), 8):  # type: ignore[misc]
                report.complaints.append(f"left on {host.name}: {host.pids()}")
        again = self.world.start(serving.port)
        again.ready()
        assert self.world.oracle is not None
        client = self.world.oracle.ask(again, "greedy")
        client.join(30)
        report.complaints += check_stream(client.saw, self.world.oracle.answers["greedy"])

    # A server that loads

    def _loading(self, case: Case, report: Report) -> None:
        """It ends in seconds with one line that says what was lost, where and why, and nothing is left."""
        self.world.forget()
        with self.world.long_loads():
            serving = self.world.start()
            bound = self._strike_loading(case, serving)
            if case.fault == "out_of_memory":
                wait_until(lambda: self._groups.killed > 0 or "Ready: " in serving.output, 60)
            if self.felt(case):
                code = serving.ends(bound)
                report.complaints += self._last_words(case, serving, code)
            else:  # it had all its memory, and serves
                serving.ready()
                serving.stop()
        report.complaints += _left(serving)

    def _strike_loading(self, case: Case, serving: Serving) -> float:
        """While ranks load; within how many seconds the server has to end."""
        if case.rank is not None and case.fault != "out_of_memory":
            self.world.arm("load", case.rank, case.fault)
            assert wait_until(lambda: not self.world.armed(), 60), f"the fault never happened:\n{serving.output}"
        else:
            assert wait_until(lambda: self._loading_rank(case.rank or 0, serving) > 0, 60), serving.output
            time.sleep(random.Random(case.seed).uniform(0, 1))
            if case.rank is not None:
                self._groups.starve(self._loading_rank(case.rank, serving), 1 << 16)
            else:
                os.kill(serving.members()[case.target][0], SIGNAL[case.fault])
        return ENDS_S + (SILENT_LOADING if case.fault in HANGS else KILLED_S)  # `--hang-timeout` is 1

    def _loading_rank(self, rank: int, serving: Serving) -> int:
        """Its process; 0 while there is none."""
        ranks = serving.members().get("rank", [])
        return next((pid for pid in ranks if name_of(pid) == f"phalanx-rank-{rank}"), 0)

    def _last_words(self, case: Case, serving: Serving, code: int) -> list[str]:
        if case.target == "front":
            return [] if code == -SIGNAL[case.fault] else [f"it ended with exit code {code}"]
        last = (serving.output.strip().splitlines() or [""])[-1]
        who = rf"(Worker|Rank) {case.rank} on \S+" if case.rank is not None else "engine process"
        told = re.match(f"error: .*{who}.*{DIED_OF[case.fault]}", last)
        if code == 1 and told and "Traceback" not in serving.output:
            return []
        return [f"it ended with exit code {code} and these words:\n{serving.output[-1500:]}"]


def _left(serving: Serving) -> list[str]:
    left = serving.left()
    return [f"processes are left: {left}"] if left and not gone([p for g in left.values() for p in g], 0.1) else []


def _outage(recovery: dict[str, Any], offset: float) -> Outage:
    """On the monotonic clock."""
    noticed = recovery["since"] - offset
    return Outage(noticed - (recovery["detection_s"] or 0.0), noticed, noticed + (recovery["reload_s"] or 0.0))


def _measured_failures(serving: Serving) -> dict[str, int]:
    """By kind, from the metrics; those that there were."""
    found = {}
    for name, value in serving.metrics().items():
        if name.startswith("phalanx:worker_failures_total") and value:
            found[name.partition('kind="')[2].partition('"')[0]] = int(value)
    return found

"""A server on a Ray cluster of hosts (`tests.helpers.ray_hosts`), and streams that go through what is done to it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import psutil

from tests.helpers.asks import Oracle, wait_for_events
from tests.helpers.history import check_stream, longest_gap, next_event_after
from tests.helpers.hosts import Host
from tests.helpers.pace import Pace
from tests.helpers.processes import name_of, wait_until
from tests.helpers.ray_hosts import RayHosts
from tests.helpers.serving import Client, Serving
from tests.helpers.worlds import OPTIONS

NAMES = ("greedy", "logprobs", "seeded", "penalties", "several")
STREAMS = 20


class Served:
    """A server on one of the hosts, and what it answers undisturbed."""

    def __init__(self, bed: RayHosts, model: str, layout: str = "-tp", *more: str, on: int = 0):
        """`layout` is the flag of what there is two of: `-tp` or `-dp`; `more` are further options."""
        self.bed = bed
        host, arguments = bed.hosts[on], [model, layout, "2", *OPTIONS, "--placement-strategy", "SPREAD", *more]
        arguments += ["--distributed-executor-backend", "ray"]
        self.pace = Pace(Path(bed.folder))
        env = {**bed.env, "PHALANX_HOST_IP": host.address, "PHALANX_FAULT": self.pace.fault}
        self.serving = Serving(
            arguments,
            Path(bed.folder) / f"serve{time.monotonic_ns()}.log",
            env=env,
            start=host.start,
            network=host.network,
        )
        self.struck = self.moved = 0.0
        """When streams were disturbed last (time.time), and the seconds from then to the next token of the last one."""
        self.serving.ready()
        self.oracle = Oracle(self.serving, NAMES)

    def nodes(self) -> list[str]:
        return [worker["node"] for worker in self.serving.status()["workers"]]

    def streams_through(self, strike: Callable[[], object]) -> float:
        """20 streams, and in their middle this. None is lost; the longest silence of any, in seconds."""
        with self.pace.slow():
            clients = [self.oracle.ask(self.serving, NAMES[i % len(NAMES)]) for i in range(STREAMS)]
            assert wait_for_events(clients, 4 * STREAMS, 60), self.serving.output
            self.struck, struck = time.time(), time.monotonic()
            strike()
        silence = self.finished(clients)
        self.moved = next_event_after([client.saw for client in clients], struck) or 0.0
        return silence

    def noticed(self, host: str) -> float:
        """Seconds from the last strike until the server said that a rank on this host was lost."""
        line = self.serving.says(rf"(?m)^(\S+ \S+) WARNING \[.*\] Rank \d+ on {host} was lost: .*")
        return datetime.strptime(line[1], "%Y-%m-%d %H:%M:%S.%f").timestamp() - self.struck

    def finished(self, clients: list[Client]) -> float:
        for client in clients:
            client.join(120)
        complaints = [c for client in clients for c in check_stream(client.saw, self.oracle.answers[client.saw.ask])]
        assert all(client.saw.accepted for client in clients), [client.saw.body for client in clients]
        assert not complaints, "\n".join([*complaints[:5], self.serving.output])
        return max(longest_gap(client.saw)[1] for client in clients)

    def engines(self) -> list[str]:
        """The state of each replica."""
        return [engine["state"] for engine in self.serving.status()["engines"]]

    def pid_of_rank(self, host: str) -> int:
        return next(worker["pid"] for worker in self.serving.status()["workers"] if worker["node"] == host)

    def close(self) -> None:
        self.serving.kill()


def raylets(host: Host) -> list[int]:
    return [pid for pid in host.pids() if name_of(pid) == "raylet"]


def kill_raylet(host: Host) -> None:
    """Returns when the ranks there are gone too: their actors look for it once a second."""
    os.kill(raylets(host)[0], signal.SIGKILL)
    assert wait_until(lambda: not any(name_of(pid).startswith("phalanx-rank") for pid in host.pids()), 10)


def actor_of(rank: int) -> int:
    """The process of the actor that holds a rank's place."""
    return next(parent.pid for parent in psutil.Process(rank).parents() if name_of(parent.pid).startswith("ray::"))

"""A machine with an engine and one with API servers only, as real processes here or on two hosts of a test bed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.helpers.hosts import Host
from tests.helpers.pace import Pace
from tests.helpers.processes import wait_until
from tests.helpers.serving import Client, Serving, free_port

KEY = {"PHALANX_TRANSPORT_KEY": "a secret"}


class Machines:
    """`near` has the engine, `far` two API servers; both may be started again. `ask` is what streams ask for."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        ask: dict[str, Any],
        *options: str,
        here: Sequence[str] = (),
        hosts: Sequence[Host] = (),
    ):
        """`options` are given to both, `here` where the engine is. It is on the first of two `hosts`, the servers are
        on the other."""
        self.folder, self.model, self.ask, self.hosts = folder, model, ask, hosts
        self._options, self._here = options, here
        self.pace = Pace(folder)
        self.at = f"{hosts[0].address if hosts else '127.0.0.1'}:{free_port()}"
        self._ports = free_port(), free_port()
        self._count = 0
        self.near, self.far = self.start_near(), self.start_far()
        self.near.ready()
        self.far.ready()

    def start_near(self) -> Serving:
        sizes = ["--dtype", "float32", "--kv-cache-memory-bytes", "8M"]
        arguments = [str(self.model), *sizes, "--router-listen", self.at, *self._here]
        return self._start(0, arguments, {"PHALANX_FAULT": self.pace.fault})

    def start_far(self, *options: str, model: Path | None = None, port: int = 0) -> Serving:
        arguments = [str(model or self.model), "--router", self.at, "--api-server-count", "2", *options]
        return self._start(1, arguments, {}, port)

    def _start(self, machine: int, arguments: list[str], env: dict[str, str], port: int = 0) -> Serving:
        self._count += 1
        host: dict[str, Any] = {}
        if self.hosts:
            host = {"start": self.hosts[machine].start, "network": self.hosts[machine].network}
        log = self.folder / f"{self._count}.log"
        port = port or self._ports[machine]
        return Serving([*arguments, *self._options], log, env={**KEY, **env}, port=port, **host)

    def close(self) -> None:
        self.near.kill()
        self.far.kill()

    @property
    def outputs(self) -> str:
        return f"near:\n{self.near.output}\nfar:\n{self.far.output}"

    def running(self) -> int:
        requests = self.near.status()["requests"]
        return int(requests["running"] + requests["waiting"])

    def under_way(self, count: int, at: Serving | None = None) -> list[Client]:
        """Streams that go on slowly until the pace is released."""
        self.pace.hold()
        clients = [Client(at or self.far, f"stream {n}", self.ask) for n in range(count)]
        assert wait_until(lambda: all(len(c.saw.events) > 5 or c.saw.broken for c in clients), 20), self.outputs
        assert all(client.is_alive() for client in clients), self.outputs
        return clients

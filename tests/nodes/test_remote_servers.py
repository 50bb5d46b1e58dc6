"""API servers on one host for the engine on another: only what is asked for listens, and the link between them is cut
and healed in mid-stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.history import Answer, assemble, check_stream
from tests.helpers.hosts import Host
from tests.helpers.pace import Pace
from tests.helpers.processes import wait_until
from tests.helpers.serving import Client, Serving

ASK: dict[str, Any] = {"prompt": "hello", "temperature": 0, "ignore_eos": True, "max_tokens": 150}
KEY = {"PHALANX_TRANSPORT_KEY": "a secret"}
PORT = 8000


class Machines:
    """`near` has the engine, on the first host; `far` only API servers, on the second."""

    def __init__(self, hosts: list[Host], folder: Path, model: Path):
        self.hosts, self.pace, self._folder, self._model = hosts, Pace(folder), folder, model
        at = f"{hosts[0].address}:29600"
        sizes = ("--dtype", "float32", "--kv-cache-memory-bytes", "8M")
        self.near = self._start(0, ("--router-listen", at, *sizes), {"PHALANX_FAULT": self.pace.fault})
        self.far = self._start(1, ("--router", at, "--api-server-count", "2"), {})
        self.near.ready()
        self.far.ready()

    def _start(self, host: int, options: tuple[str, ...], env: dict[str, str]) -> Serving:
        at = self.hosts[host]
        log = self._folder / f"{host}.log"
        return Serving(
            [str(self._model), *options], log, env={**KEY, **env}, start=at.start, network=at.network, port=PORT
        )

    def close(self) -> None:
        self.near.kill()
        self.far.kill()

    @property
    def outputs(self) -> str:
        return f"near:\n{self.near.output}\nfar:\n{self.far.output}"


@pytest.fixture(scope="module")
def machines(lasting_hosts: list[Host], tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    made = Machines(lasting_hosts, tmp_path_factory.mktemp("machines"), tiny)
    yield made
    made.close()


@pytest.fixture(scope="module")
def oracle(machines: Machines) -> Answer:
    client = Client(machines.near, "near", ASK)
    client.join(30)
    return assemble(client.saw)


def test_tokens_are_those_of_the_other_host_and_little_listens(machines: Machines, oracle: Answer) -> None:
    client = Client(machines.far, "far", ASK)
    client.join(30)
    assert check_stream(client.saw, oracle) == []
    near, far = machines.hosts
    assert sorted(near.listening()) == [(near.address, 29600), ("127.0.0.1", PORT)]
    assert far.listening() == [("127.0.0.1", PORT)]
    assert machines.near.status()["servers"][1]["node"] == "host1"


@pytest.mark.recovery
def test_a_link_that_is_cut_and_healed(machines: Machines, oracle: Answer) -> None:
    """Both sides notice within seconds; the engine is free meanwhile, and every stream goes on where it was."""
    near, far = machines.near, machines.far
    machines.pace.hold()
    mine = Client(near, "near", ASK)
    theirs = [Client(far, f"far {n}", ASK) for n in range(3)]
    assert wait_until(lambda: all(len(client.saw.events) > 5 for client in (mine, *theirs)), 20), machines.outputs
    machines.hosts[1].cut()
    assert wait_until(lambda: far.get("/health/ready")[0] == 503, 6), machines.outputs
    assert wait_until(lambda: near.status()["requests"]["running"] == 1, 6), machines.outputs
    why = "The connection to the router at 10.77.0.10:29600 was lost"
    assert wait_until(lambda: why in (far.status()["cause"] or ""), 6), machines.outputs
    assert far.status()["state"] == "recovering", machines.outputs
    assert near.get("/health/ready")[0] == 200 and len(near.status()["servers"]) == 1
    assert all(client.is_alive() for client in (mine, *theirs)), "they were too short"
    machines.hosts[1].heal()
    assert wait_until(lambda: far.get("/health/ready")[0] == 200, 15), machines.outputs
    machines.pace.release()
    for client in (mine, *theirs):
        client.join(60)
        assert check_stream(client.saw, oracle) == [], machines.outputs
    assert near.at_rest(5) and near.status()["servers"][1]["lives"] == 2

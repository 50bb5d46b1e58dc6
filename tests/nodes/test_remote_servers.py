"""API servers on one host for the engine on another: only what is asked for listens, and the link between them is cut
and healed in mid-stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.history import Answer, assemble, check_stream
from tests.helpers.hosts import Host
from tests.helpers.machines import Machines
from tests.helpers.processes import wait_until
from tests.helpers.serving import Client

ASK: dict[str, Any] = {"prompt": "hello", "temperature": 0, "ignore_eos": True, "max_tokens": 150}


@pytest.fixture(scope="module")
def machines(lasting_hosts: list[Host], tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    made = Machines(tmp_path_factory.mktemp("machines"), tiny, ASK, hosts=lasting_hosts)
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
    joins = int(machines.at.rpartition(":")[2])
    assert sorted(near.listening()) == [(near.address, joins), ("127.0.0.1", machines.near.port)]
    assert far.listening() == [("127.0.0.1", machines.far.port)]
    assert machines.near.status()["servers"][1]["node"] == "host1"


@pytest.mark.recovery
def test_a_link_that_is_cut_and_healed(machines: Machines, oracle: Answer) -> None:
    """Both sides notice within seconds; the engine is free meanwhile, and every stream goes on where it was."""
    near, far = machines.near, machines.far
    clients = [*machines.under_way(1, near), *machines.under_way(3)]
    machines.hosts[1].cut()
    assert wait_until(lambda: far.get("/health/ready")[0] == 503, 6), machines.outputs
    assert wait_until(lambda: near.status()["requests"]["running"] == 1, 6), machines.outputs
    why = f"The connection to the router at {machines.at} was lost"
    assert wait_until(lambda: why in (far.status()["cause"] or ""), 6), machines.outputs
    assert far.status()["state"] == "recovering", machines.outputs
    assert near.get("/health/ready")[0] == 200
    assert wait_until(lambda: len(near.status()["servers"]) == 1, 5), "they are told of it four times a second"
    assert all(client.is_alive() for client in clients), "they were too short"
    machines.hosts[1].heal()
    assert wait_until(lambda: far.get("/health/ready")[0] == 200, 15), machines.outputs
    machines.pace.release()
    for client in clients:
        client.join(60)
        assert check_stream(client.saw, oracle) == [], machines.outputs
    assert near.at_rest(5)
    assert wait_until(lambda: [s["lives"] for s in near.status()["servers"]] == [1, 2], 5)

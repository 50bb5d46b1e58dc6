"""API servers without engines (`--router`) beside a machine that has them (`--router-listen`), real processes: both
answer alike, either dies, hangs and drains without harm to the other, and what they say is true of both."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.history import Answer, Log, assemble, check_stream
from tests.helpers.machines import Machines
from tests.helpers.processes import stopped, wait_until
from tests.helpers.scopes import module_or_test
from tests.helpers.serving import Client, Serving, free_port
from tests.helpers.tiny_model import write_tiny_model

ASK: dict[str, Any] = {"prompt": "hello", "temperature": 0, "ignore_eos": True, "max_tokens": 120}
SINGLE = ("--api-server-count", "1")


@pytest.fixture(scope=module_or_test)
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    folder = tmp_path_factory.mktemp("machines")
    made = Machines(folder, write_tiny_model(folder / "tiny"), ASK)
    yield made
    made.close()


@pytest.fixture
def both(machines: Machines) -> Iterator[Machines]:
    yield machines
    machines.pace.release()


def start_far_again(both: Machines) -> None:
    """With a single server: each of them has much to import."""
    both.far = both.start_far(*SINGLE)
    both.far.ready()


@pytest.fixture(scope=module_or_test)
def oracle(machines: Machines) -> Answer:
    """What the machine with the engine answers itself."""
    client = Client(machines.near, "near", ASK)
    client.join(30)
    return assemble(client.saw)


def logs(clients: list[Client]) -> list[Log]:
    for client in clients:
        client.join(60)
    return [client.saw for client in clients]


def takes_no_more(serving: Serving) -> bool:
    """A server that has no requests ends at once, perhaps with our connection in its hands."""
    with contextlib.suppress(OSError):
        return serving.get("/health/ready")[0] == 503
    return False


def test_both_answer_alike_and_tell_of_each_other(both: Machines, oracle: Answer) -> None:
    near, far = both.near, both.far
    before = near.counted("request_success_total")
    clients = both.under_way(3)
    assert wait_until(lambda: both.running() == 3, 5)
    assert wait_until(lambda: far.status()["requests"]["running"] == 3, 3)
    theirs = far.status()
    assert theirs["state"] == "ready"
    assert theirs["engines"][0]["pid"] == near.engine() and len(theirs["servers"]) == 2
    (here, there) = near.status()["servers"]
    assert here["node"] == "" and there["node"] and there["pid"] == far.process.pid
    assert wait_until(lambda: near.status()["servers"][1]["requests"] == 3, 3)
    both.pace.release()
    assert [check_stream(log, oracle) for log in logs(clients)] == [[], [], []]
    for asked in (near, far, far, near):  # whoever is asked
        assert wait_until(lambda asked=asked: asked.counted("request_success_total") == before + 3, 5)
    assert far.get("/health/ready")[0] == 200 and near.at_rest(5)


@pytest.mark.recovery
def test_requests_leave_the_engine_when_the_far_servers_hang_and_go_on_when_they_are_back(
    both: Machines, oracle: Answer
) -> None:
    clients = both.under_way(3)
    with stopped(both.far.process.pid):  # which keeps the servers; they themselves go on
        assert wait_until(lambda: both.running() == 0, 10), both.outputs
        assert all(client.is_alive() for client in clients)
        assert both.near.at_rest(5)
        both.near.says("were lost: it has not answered for", 5)
    assert wait_until(lambda: both.running() == 3, 15), both.outputs
    both.pace.release()
    assert [check_stream(log, oracle) for log in logs(clients)] == [[], [], []]
    assert wait_until(lambda: both.far.get("/health/ready")[0] == 200, 5)


@pytest.mark.recovery
def test_streams_outlive_the_process_with_the_router(both: Machines, oracle: Answer) -> None:
    clients = both.under_way(3)
    both.near.kill()
    assert wait_until(lambda: both.far.get("/health/ready")[0] == 503, 5)
    answer = both.far.get("/health/ready")[1].decode()
    assert "recovering" in answer and "The connection to the router at" in answer
    assert both.far.get("/health/live")[0] == 200 and both.far.status()["state"] == "recovering"
    late = Client(both.far, "late", ASK)
    assert wait_until(lambda: late.saw.status == 200, 5), "it waits like the others"
    both.near = both.start_near()
    assert wait_until(lambda: both.far.get("/health/ready")[0] == 200, 30), both.outputs
    both.pace.release()
    assert [check_stream(log, oracle) for log in logs([*clients, late])] == [[]] * 4
    assert both.near.at_rest(5)


def test_requests_leave_the_engine_at_once_when_the_far_servers_die(both: Machines, oracle: Answer) -> None:
    mine, theirs = both.under_way(1, both.near), both.under_way(3)
    assert wait_until(lambda: both.running() == 4, 5)
    both.far.kill()
    assert wait_until(lambda: both.running() == 1, 2), both.outputs
    both.pace.release()
    assert [check_stream(log, oracle) for log in logs(mine)] == [[]], "the others do not notice"
    assert all("[DONE]" not in [event.data for event in log.events] for log in logs(theirs))
    assert both.near.at_rest(5)
    assert wait_until(lambda: [s["node"] for s in both.near.status()["servers"]] == [""], 5)
    start_far_again(both)


def _refused(serving: Serving, *says: str) -> None:
    code = serving.ends(20)
    output = serving.output
    assert code == 1 and output.count("error: ") == 1 and "Traceback" not in output, output
    assert all(word in output for word in says), output
    assert serving.left() == {}


def test_who_does_not_fit_is_told_why(both: Machines, tmp_path: Path) -> None:
    """Both at the same time. Other reasons: `tests/engine/test_remote_router.py`."""
    other, bare = (shutil.copytree(both.model, tmp_path / name) for name in ("other", "bare"))
    (other / "config.json").write_text((other / "config.json").read_text() + "\n")
    (bare / "tokenizer.json").unlink()
    stranger = both.start_far(*SINGLE, model=other, port=free_port())
    without = both.start_far(*SINGLE, "--router", "127.0.0.1:9", model=bare, port=free_port())
    _refused(stranger, "Nodes differ: config.json", "Here the model is tiny")
    _refused(without, "There is no tokenizer in")
    both.near.says("Turned away API servers on .*Nodes differ: config.json", 5)
    assert both.far.get("/health/ready")[0] == 200


def test_nobody_is_there_yet_and_ctrl_c(both: Machines) -> None:
    far = both.start_far(*SINGLE, "--router", "127.0.0.1:9", port=free_port())
    far.says(r"waiting for the router at 127.0.0.1:9: Connection refused \(0 s; gives up after 600 s\)", 20)
    assert far.get("/health/live")[0] == 200 and far.get("/health/ready")[0] == 503
    far.process.send_signal(signal.SIGINT)
    assert far.ends(5) == 128 + signal.SIGINT
    assert far.left() == {} and "Traceback" not in far.output


def test_sigterm_drains_the_far_servers_alone(both: Machines, oracle: Answer) -> None:
    clients = both.under_way(2)
    both.far.process.send_signal(signal.SIGTERM)
    assert wait_until(lambda: takes_no_more(both.far), 3)
    both.pace.release()
    assert [check_stream(log, oracle) for log in logs(clients)] == [[], []]
    assert both.far.ends(10) == 0 and both.far.left() == {}
    both.near.says("have left", 5)
    assert both.near.get("/health/ready")[0] == 200
    start_far_again(both)


def test_sigterm_where_the_engine_is_drains_all(both: Machines, oracle: Answer) -> None:
    clients = [*both.under_way(2), *both.under_way(1, both.near)]
    both.near.process.send_signal(signal.SIGTERM)
    assert wait_until(lambda: takes_no_more(both.far), 3)
    both.pace.release()
    assert [check_stream(log, oracle) for log in logs(clients)] == [[], [], []]
    assert both.far.ends(10) == 0 and both.near.ends(10) == 0
    assert "the router has ended, and so do these servers" in both.far.output
    for serving in (both.near, both.far):
        assert serving.left() == {} and "Traceback" not in serving.output and serving.output.endswith("Stopped.\n")


@pytest.mark.slow
@pytest.mark.recovery
def test_replicas_and_several_servers_here_and_there_with_everything_sealed(tmp_path: Path) -> None:
    here = ("-dp", "2", "-tp", "2", "--api-server-count", "2")
    made = Machines(tmp_path, write_tiny_model(tmp_path / "tiny"), ASK, "--encrypt-transport", here=here)
    try:
        oracle = assemble(logs([Client(made.near, "near", ASK)])[0])
        clients = [*made.under_way(4), *made.under_way(2, made.near)]
        assert wait_until(lambda: len([s for s in made.near.status()["servers"] if not s["node"]]) == 2, 3)
        assert len(made.far.status()["engines"]) == 2 and len(made.far.status()["workers"]) == 4
        os.kill(made.far.engine(), signal.SIGKILL)
        assert wait_until(lambda: made.far.status()["epoch"] == 1, 5), made.outputs
        made.far.process.send_signal(signal.SIGSTOP)
        assert wait_until(lambda: made.running() == 2, 10), made.outputs
        made.far.process.send_signal(signal.SIGCONT)
        made.pace.release()
        assert [check_stream(log, oracle) for log in logs(clients)] == [[]] * 6, made.outputs
        # The other replica has answered; the one that was killed may still be loading.
        for asked in (made.far, made.near):
            assert wait_until(lambda asked=asked: asked.counted("recoveries_total") == 1, 30), made.outputs
        made.near.process.send_signal(signal.SIGINT)
        assert made.far.ends(10) == 0 and made.near.ends(10) == 0
        assert made.near.left() == {} and made.far.left() == {}
    finally:
        made.close()


@pytest.mark.slow
@pytest.mark.recovery
def test_the_engine_may_have_its_ranks_on_ray(tmp_path: Path) -> None:
    here = ("--distributed-executor-backend", "ray", "-tp", "2")
    made = Machines(tmp_path, write_tiny_model(tmp_path / "tiny"), ASK, here=here)
    try:
        oracle = assemble(logs([Client(made.near, "near", ASK)])[0])
        clients = [*made.under_way(3), *made.under_way(1, made.near)]
        os.kill(made.far.status()["workers"][1]["pid"], signal.SIGKILL)
        assert wait_until(lambda: made.far.status()["epoch"] == 1, 10), made.outputs
        made.pace.release()
        assert [check_stream(log, oracle) for log in logs(clients)] == [[]] * 4, made.outputs
    finally:
        made.close()

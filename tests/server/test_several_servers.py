"""`phalanx serve --api-server-count 2`, real processes: both answer, each dies, hangs and drains without the other, and
what they say is true of both."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.history import Log, assemble, check_stream
from tests.helpers.pace import Pace
from tests.helpers.processes import alive, stopped, wait_until
from tests.helpers.serving import Client, Serving
from tests.helpers.tiny_model import write_tiny_model

TOKENS = 200
ASK: dict[str, Any] = {"prompt": "hello", "temperature": 0, "ignore_eos": True, "max_tokens": TOKENS}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


class Served(Serving):
    """While its `pace` is held, streams go on slowly."""

    def __init__(self, arguments: list[str], log: Path):
        self.pace = Pace(log.parent, step_s=0.1)
        super().__init__(arguments, log, env={"PHALANX_FAULT": self.pace.fault})


@contextlib.contextmanager
def serving(model: Path, log: Path, *options: str) -> Iterator[Served]:
    arguments = [str(model), "--api-server-count", "2", "--dtype", "float32", "--kv-cache-memory-bytes", "8M", *options]
    served = Served(arguments, log)
    try:
        served.ready()
        yield served
    finally:
        served.kill()


@pytest.fixture
def served(model: Path, tmp_path: Path) -> Iterator[Served]:
    with serving(model, tmp_path / "log") as made:
        yield made


def pids(served: Serving) -> list[int]:
    return [server["pid"] for server in served.status()["servers"]]


def ask_at(served: Served, number: int, count: int) -> list[Client]:
    """Slow streams that this server has: the other one cannot take a connection while they are opened."""
    served.pace.hold()
    other = pids(served)[1 - number]
    with stopped(other):
        clients = [Client(served, f"server {number}", ASK) for _ in range(count)]
        begun = wait_until(lambda: all(client.saw.events or client.saw.broken for client in clients), 10)
    assert begun, served.output
    return clients


def whole(served: Served, clients: list[Client]) -> list[Log]:
    """Of those that came to their end, once they may be fast."""
    served.pace.release()
    for client in clients:
        client.join(60)
    return [client.saw for client in clients if client.saw.events and client.saw.events[-1].data == "[DONE]"]


def requests_of(served: Serving) -> list[int]:
    return [server["requests"] for server in served.status()["servers"]]


def lives_of_ready(served: Serving) -> list[int]:
    return [server["lives"] for server in served.status()["servers"] if server["state"] == "ready"]


def test_both_serve_and_either_tells_of_both(served: Served) -> None:
    processes = pids(served)
    assert sorted(served.members()["server"]) == sorted(processes)
    clients = [*ask_at(served, 0, 2), *ask_at(served, 1, 3)]
    assert wait_until(lambda: requests_of(served) == [2, 3], 5), served.status()
    for other in processes:  # whoever answers
        with stopped(other):
            status = served.status()
            assert [server["pid"] for server in status["servers"]] == processes
            assert [server["state"] for server in status["servers"]] == ["ready", "ready"]
            assert status["requests"]["running"] == 5 and status["state"] == "ready"
            assert served.get("/health/ready")[0] == 200
    assert len(whole(served, clients)) == 5
    assert served.counted("request_success_total") == 5
    assert served.counted("generation_tokens_total") == 5 * TOKENS
    assert served.counted("e2e_request_latency_seconds_count") == 5
    assert served.counted("http_requests_total", "/v1/completions", 'status="200"') == 5
    for _ in range(6):  # whichever is asked
        assert served.counted("request_success_total") == 5
    assert served.stop(20) == 0
    assert served.left() == {}
    assert served.output.rstrip().endswith("Stopped.")


def test_one_is_killed_in_mid_stream(served: Served) -> None:
    """Its requests leave the engine; streams of the other do not notice; it is started again, and what it had counted
    stays counted."""
    (undisturbed,) = whole(served, ask_at(served, 0, 1))
    assert served.counted("request_success_total") == 1
    dies, lives = pids(served)
    broken, healthy = ask_at(served, 0, 3), ask_at(served, 1, 3)
    assert wait_until(lambda: served.status()["requests"]["running"] == 6, 5)
    os.kill(dies, signal.SIGKILL)
    assert wait_until(lambda: served.status()["requests"]["running"] == 3, 3), served.status()
    assert any(client.is_alive() for client in healthy), "they were too short"
    assert not whole(served, broken) and all(client.saw.broken or client.saw.events for client in broken)
    assert len(whole(served, healthy)) == 3
    assert [check_stream(client.saw, assemble(undisturbed)) for client in healthy] == [[], [], []]
    assert served.at_rest(10)
    served.says("API server 0 was lost: it was killed by SIGKILL", 5)
    assert wait_until(lambda: lives_of_ready(served) == [2, 1], 30), served.output
    again, same = pids(served)
    assert same == lives and again != dies and alive(again)
    assert served.counted("request_success_total") == 4, "what a server counted is not forgotten with it"
    assert len(whole(served, ask_at(served, 0, 2))) == 2
    assert served.stop(20) == 0 and served.left() == {}


def test_the_lease_of_one_that_hangs_runs_out(model: Path, tmp_path: Path) -> None:
    """Long before its streams would have ended."""
    with serving(model, tmp_path / "log") as served:
        hangs, _ = pids(served)
        ask_at(served, 0, 3)
        healthy = ask_at(served, 1, 2)
        os.kill(hangs, signal.SIGSTOP)
        assert wait_until(lambda: served.status()["requests"]["running"] == 2, 15), served.status()
        assert all(client.is_alive() for client in healthy), "they were too short"
        assert len(whole(served, healthy)) == 2
        served.says("API server 0 was lost: it has not answered for", 5)
        assert wait_until(lambda: lives_of_ready(served) == [2, 1], 30), served.output
        assert served.at_rest(10)


def test_sigterm_drains_both(served: Served) -> None:
    clients = [*ask_at(served, 0, 2), *ask_at(served, 1, 2)]
    os.kill(served.process.pid, signal.SIGTERM)
    assert wait_until(lambda: served.get("/health/ready")[0] == 503, 3)
    late = Client(served, "late", ASK)
    served.says(r"Shutting down: 4 request\(s\) running", 5)
    assert len(whole(served, clients)) == 4, served.output
    late.join(10)
    assert late.saw.status == 503 or late.saw.broken
    assert served.ends(10) == 0
    assert served.left() == {}
    assert "Traceback" not in served.output


def test_sigint_and_a_second_signal_end_streams_with_an_error(model: Path, tmp_path: Path) -> None:
    for signals, code in (((signal.SIGINT,), 0), ((signal.SIGTERM, signal.SIGTERM), 128 + signal.SIGTERM)):
        with serving(model, tmp_path / f"log{code}") as served:
            clients = [*ask_at(served, 0, 2), *ask_at(served, 1, 2)]
            for number in signals:
                os.kill(served.process.pid, number)
                time.sleep(0.3)
            assert served.ends(5) == code, served.output
            for client in clients:
                client.join(5)
                data = [event.data for event in client.saw.events]
                assert '"error"' in data[-2] and data[-1] == "[DONE]", data[-3:]
            assert served.left() == {}


def test_nothing_outlives_the_process_that_started_them(served: Served) -> None:
    below = psutil.Process(served.process.pid).children(recursive=True)
    ask_at(served, 0, 2)
    served.process.kill()
    assert served.left(5) == {} and not [process for process in below if alive(process.pid)]


@pytest.mark.recovery
def test_a_lost_engine_is_made_good_for_both_and_counted_once(served: Served) -> None:
    (undisturbed,) = whole(served, ask_at(served, 0, 1))
    clients = [*ask_at(served, 0, 2), *ask_at(served, 1, 2)]
    os.kill(served.engine(), signal.SIGKILL)
    assert wait_until(lambda: served.get("/health/ready")[0] == 503, 3)
    logs = whole(served, clients)
    assert len(logs) == 4, served.output
    complaints = [each for log in logs for each in check_stream(log, assemble(undisturbed))]
    assert not complaints, "\n".join(complaints)
    assert wait_until(lambda: served.counted("recoveries_total") == 1, 5)
    assert served.counted("requests_resumed_total") == 4
    assert served.status()["epoch"] == 1 and served.at_rest(10)
    assert served.counted("recoveries_total") == 1


def test_keys_are_served_fairly_whichever_server_they_use(model: Path, tmp_path: Path) -> None:
    """One place in the engine, many requests of one key at one server, then one of another key at the other: it need
    not wait for all of them."""
    options = ["--max-num-seqs", "1", "--api-key", "one", "--api-key", "two"]
    with serving(model, tmp_path / "log", *options) as served:
        served.pace.hold()
        first, second = served.members()["server"]
        with stopped(second):
            many = [Client(served, "one", {**ASK, "max_tokens": 40}, key="one") for _ in range(6)]
            assert wait_until(lambda: all(client.saw.status == 200 for client in many), 10)
        with stopped(first):
            single = Client(served, "two", {**ASK, "max_tokens": 40}, key="two")
            assert wait_until(lambda: single.saw.status == 200, 10)
        assert len(whole(served, [*many, single])) == 7
        ends = sorted(client.saw.closed or 0.0 for client in many)
        assert (single.saw.closed or 0.0) < ends[3], (single.saw.closed, ends)


def _refused(arguments: list[str], log: Path) -> str:
    served = Serving([*arguments, "--api-server-count", "2"], log)
    assert served.ends(40) != 0
    assert served.left() == {}
    assert served.output.count("error: ") == 1 and "Traceback" not in served.output, served.output
    return served.output


def test_a_model_that_cannot_be_served_is_said_once_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    assert "nowhere" in _refused([str(tmp_path / "nowhere")], tmp_path / "a")
    (broken := tmp_path / "template.jinja").write_text("{% if %}")
    assert "template" in _refused([str(model), "--chat-template", str(broken)], tmp_path / "b")


def test_a_number_that_makes_no_sense(model: Path, tmp_path: Path) -> None:
    served = Serving([str(model), "--api-server-count", "0"], tmp_path / "log")
    assert served.ends(20) == 1 and "--api-server-count is 0" in served.output

"""Days on which more than one thing is wrong: clocks that are set, full disks, ranks that go different ways, losses in
the midst of a compilation and before a long queue. Every answer is the undisturbed one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.helpers.asks import LETTERS, Oracle, wait_for_events
from tests.helpers.history import assemble, check_stream
from tests.helpers.pace import STEP_S
from tests.helpers.processes import wait_until
from tests.helpers.serving import Client, Serving
from tests.helpers.worlds import World

CLOCK = """
import time
from pathlib import Path

_right = time.time


def _shown():
    try:
        return _right() + float(Path({file!r}).read_text() or 0)
    except OSError:
        return _right()


time.time = _shown
"""
"""As sitecustomize.py: the wall clock of every process of a server is off by what the file says."""


class Day(World):
    """`faults` as PHALANX_FAULT has them, let off by a file `now` of its folder; `env` for the server."""

    def __init__(self, model: str, layout: str = "tp2", faults: str = "", step_s: float = STEP_S, **env: str):
        self._own = faults
        super().__init__("mp", layout, model, step_s=step_s)
        self._env |= env

    def _faults(self) -> str:
        return f"{self._own},file={self.folder / 'now'}" if self._own else ""

    def let_off(self) -> None:
        (self.folder / "now").touch()


@contextlib.contextmanager
def day(
    model: str, layout: str = "tp2", faults: str = "", step_s: float = STEP_S, **env: str
) -> Iterator[tuple[Day, Serving]]:
    made = Day(model, layout, faults, step_s, **env)
    try:
        yield made, made.open(ask=False)
    finally:
        made.close()


def under_way(place: Day, *names: str) -> tuple[Oracle, list[Client]]:
    """Streams that are far from their end, as long as `place.pace` is held."""
    serving = place.open(ask=False)
    oracle = Oracle(serving, names)
    place.pace.hold()
    clients = [oracle.ask(serving, name) for name in names]
    assert wait_for_events(clients, 20 * len(clients)), serving.output
    return oracle, clients


def check(place: Day, oracle: Oracle, clients: list[Client]) -> None:
    serving = place.open(ask=False)
    place.pace.release()
    for client in clients:
        client.join(60)
        assert not client.is_alive(), serving.output
        assert check_stream(client.saw, oracle.answers[client.saw.ask]) == [], serving.output
    assert serving.at_rest(30), serving.status()


def recovering(serving: Serving) -> bool:
    return serving.status()["state"] == "recovering"


@pytest.mark.slow
def test_a_clock_that_is_set(tiny_model: str, tmp_path: Path) -> None:
    """An hour ahead while a rank is replaced and before the engine is lost too, then two hours back."""
    offset = tmp_path / "offset"
    (tmp_path / "sitecustomize.py").write_text(CLOCK.format(file=str(offset)))
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    with day(tiny_model, faults="at=load,rank=1,do=sleep=3", PYTHONPATH=path) as (place, serving):
        oracle, clients = under_way(place, "greedy", "seeded")
        place.let_off()
        os.kill(place.pid("rank1"), signal.SIGKILL)
        assert wait_until(lambda: recovering(serving), 30)
        offset.write_text("3600")
        time.sleep(0.5)
        os.kill(place.pid("engine"), signal.SIGKILL)
        time.sleep(0.5)
        offset.write_text("-3600")
        check(place, oracle, clients)
        recovery = serving.status()["recoveries"][-1]
        assert recovery["since"] > time.time() + 3000, "its clock was not set"
        assert 0 < recovery["first_token_s"] == recovery["lasted"] < 60


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk_and_full_shared_memory(tiny_model: str, tmp_path: Path) -> None:
    """Under the log and the temporary folder too."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)], check=True)
    try:
        made = Day(tiny_model, TMPDIR=str(tmp_path))
        made.folder = tmp_path
        (tmp_path / "faults").mkdir()
        with contextlib.closing(made) as place:
            serving = place.open(ask=False)
            oracle, clients = under_way(place, "greedy", "seeded")
            fill(tmp_path)
            fill(serving.shm)
            os.kill(place.pid("rank1"), signal.SIGKILL)
            assert wait_until(lambda: len(serving.status()["recoveries"]) == 1, 30)
            os.kill(place.pid("engine"), signal.SIGKILL)
            check(place, oracle, clients)
            assert os.statvfs(tmp_path).f_bavail == 0, "there was room on the disk"
            check(place, oracle, [oracle.ask(serving, name) for name in oracle.bodies])
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.parametrize("victim", [pytest.param("rank1", marks=pytest.mark.slow), "engine"])
def test_a_loss_while_a_grammar_is_compiled(tiny_model: str, victim: str) -> None:
    body = {"prompt": "ä", "max_tokens": 40, "temperature": 0}
    body["structured_outputs"] = {"regex": f"([{LETTERS}]{{2,9}}a){{6,9}}"}
    with day(tiny_model, faults="at=compile,do=sleep=10") as (place, serving):
        oracle, clients = under_way(place, "greedy")
        pid = place.pid(victim)
        place.let_off()
        constrained = Client(serving, "constrained", body)
        assert wait_until(lambda: serving.status()["requests"]["waiting"] == 1, 8)
        os.kill(pid, signal.SIGKILL)
        check(place, oracle, clients)
        constrained.join(60)
        undisturbed = Client(serving, "undisturbed", body)
        undisturbed.join(60)
        assert check_stream(constrained.saw, assemble(undisturbed.saw)) == []
        assert serving.status()["failures"]["killed"] == 1


@pytest.mark.slow
def test_a_long_queue_over_a_recovery(tiny_model: str) -> None:
    """As many as may wait; all are answered, and right."""
    with day(tiny_model, step_s=0.2) as (place, serving):
        bodies = [{"prompt": f"hello {n}", "max_tokens": 20, "temperature": 0, "ignore_eos": True} for n in range(1024)]
        pid = place.pid("rank1")

        async def answers() -> list[httpx.Response]:
            async with httpx.AsyncClient(timeout=250, limits=httpx.Limits(max_connections=1024)) as client:
                url = f"http://127.0.0.1:{serving.port}/v1/completions"
                return await asyncio.gather(*(client.post(url, json=body) for body in bodies))

        struck: list[int] = []
        """How many waited then."""

        def strike() -> None:
            if wait_until(lambda: serving.status()["requests"]["waiting"] > 300, 100):
                os.kill(pid, signal.SIGKILL)
                struck.append(serving.status()["requests"]["waiting"])
            place.pace.release()

        undisturbed = asyncio.run(answers())
        place.pace.hold()
        nemesis = threading.Thread(target=strike)
        nemesis.start()
        disturbed = asyncio.run(answers())
        nemesis.join()
        for before, after in zip(undisturbed, disturbed, strict=True):
            assert (before.status_code, after.status_code) == (200, 200), after.text
            assert before.json()["choices"] == after.json()["choices"]
        assert serving.at_rest(10), serving.status()
        assert struck and struck[0] > 300
        assert any(recovery["resumed"] for recovery in serving.status()["recoveries"])


@pytest.mark.parametrize(
    ("layout", "fault", "kind", "words"),
    [
        ("tp2", "at=step,rank=1,do=skip", "hung", r"rank 0 for rank 1, rank 1 for a plan"),
        pytest.param(
            "tp2", "at=exchange,rank=1,do=skip", "failed",
            r"Ranks disagree in exchange \d+: rank [01] is in \w+ of .*, rank [01] in \w+ of ", marks=pytest.mark.slow,
        ),
        pytest.param(
            "tp2pp2", "at=exchange,rank=3,do=skip", "failed",
            r"Ranks disagree in exchange \d+: rank [23] is in \w+ of .*, rank [23] in \w+ of ", marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_ranks_that_go_different_ways(tiny_model: str, layout: str, fault: str, kind: str, words: str) -> None:
    """One leaves out a step, or an exchange, so that others wait for what never comes. It is named, and no result of
    it is used."""
    with day(tiny_model, layout, fault) as (place, serving):
        oracle, clients = under_way(place, "greedy", "seeded")
        place.let_off()
        check(place, oracle, clients)
        (recovery,) = serving.status()["recoveries"]
        assert recovery["kind"] == kind and re.search(words, recovery["cause"]), recovery

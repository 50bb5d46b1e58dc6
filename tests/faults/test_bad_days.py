"""Days on which more than one thing is wrong: clocks that are set, full disks, losses in the midst of a compilation and
before a long queue. Every answer is the undisturbed one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.helpers.asks import LETTERS
from tests.helpers.days import Day, check, day, recovering, under_way
from tests.helpers.history import assemble, check_stream
from tests.helpers.processes import wait_until
from tests.helpers.serving import Client

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


@pytest.mark.recovery
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
        assert wait_until(lambda: recovering(serving), 30), serving.status()["cause"]
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


@pytest.mark.recovery
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
            assert wait_until(lambda: len(serving.status()["recoveries"]) == 1, 30), serving.status()["cause"]
            os.kill(place.pid("engine"), signal.SIGKILL)
            check(place, oracle, clients)
            assert os.statvfs(tmp_path).f_bavail == 0, "there was room on the disk"
            check(place, oracle, [oracle.ask(serving, name) for name in oracle.bodies])
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.recovery
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


@pytest.mark.recovery
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

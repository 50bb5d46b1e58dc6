"""`phalanx bench comm`: what it prints and writes, that it ends, and how fast the exchanges are beside gloo's."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.bench import comm
from phalanx.cli.main import main
from phalanx.distributed.speed import OPERATIONS, Speed, Timing
from phalanx.errors import PhalanxError
from phalanx.planner.hardware import detect
from tests.helpers.processes import alive, descendants, gone_within, wait_until

SHORT = ["--seconds", "1", "--sizes", "1K,4M"]


@pytest.mark.parametrize("transport", comm.TRANSPORTS)
def test_every_transport(transport, tmp_path, capsys):
    others = descendants()  # of other tests in this process
    target = tmp_path / "result.json"
    assert main(["bench", "comm", "--transport", transport, *SHORT, "--json", str(target)]) == 0
    printed = capsys.readouterr().out
    result = json.loads(target.read_text())
    assert (result["ranks"], result["transport"]) == (2, transport)
    rows = {(row["operation"], row["bytes"]): row for row in result["results"]}
    own = {"barrier": (0,), "message": (1024,)}
    assert set(rows) == {(o, n) for o in OPERATIONS for n in own.get(o, (1024, 1 << 22))}
    for row in rows.values():
        assert 0 < row["median_us"] <= row["p90_us"] and row["count"] >= 2
        assert ("gloo" in row) is (transport != "gloo")
        if row["bytes"]:
            assert row["gb_s"] == pytest.approx(row["bytes"] / row["median_us"] / 1e3, rel=0.05, abs=0.001)
    assert 0 < rows["all_reduce", 1 << 22]["of_copy_speed"] < 30  # about 1, where both are measured in peace
    thresholds = {"shm": "sliced from 262,145 bytes", "tcp-packed": "compressed from 65,536 bytes"}
    messages = "A message, of at most 65,536 bytes, goes through a socket of its own"
    assert (messages in printed) is (result["how"].get("message_limit") == 65536) is (transport != "gloo")
    assert thresholds.get(transport, "") in printed and result["how"]["transport"] in ("shared memory", "tcp", "gloo")
    for word in (*OPERATIONS, "1 KB", "4 MB", "median", "p90", "bandwidth", "gloo", "of what copying allows"):
        assert word in printed
    assert descendants() <= others


def test_json_to_standard_output_with_three_ranks(capsys):
    assert main(["bench", "comm", "--ranks", "3", "--seconds", "1", "--sizes", "64", "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ranks"] == 3 and result["machine"]["cores"] >= 1


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--ranks", "1"], "at least 2"),
        (["--ranks", "1000"], "at most 64"),
        (["--sizes", "x"], "not a size"),
        (["--sizes", "1,2G"], "between 4 bytes and 1G"),
        (["--cores", "a"], "numbers separated by commas"),
        (["--cores", "4096"], "may use"),
        (["--transport", "mpi"], "invalid choice"),
        (["--json", "/nowhere/x.json"], "Cannot write"),
        (["--model", "x"], "Unknown flag --model"),
    ],
)
def test_wrong_flags(flags, says, capsys):
    assert main(["bench", "comm", *flags]) in (1, 2)
    assert says in capsys.readouterr().err


def test_help(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "comm", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "gloo" in text and "1K,16K,64K,1M,4M" in text
    assert main(["bench", "--help"]) == 0 and "comm" in capsys.readouterr().out


def speeds(medians: list[float], copied: float) -> list[Speed]:
    def timings(scale: float) -> list[Timing]:
        return [
            Timing("all_reduce", 1 << 22, group, scale * times, 2 * scale * times, 9)
            for group, times in (("shm", 1.0), ("gloo", 10.0))
        ]

    return [Speed(timings(median), {1 << 22: copied}) for median in medians]


def test_figures_are_the_slowest_ranks():
    (row,) = comm.report(speeds([0.001, 0.002], 4e9), "shm", detect())["results"]
    assert (row["median_us"], row["p90_us"], row["speedup"]) == (2000, 4000, 10.0)
    assert row["gb_s"] == pytest.approx((1 << 22) / 0.002 / 1e9, rel=1e-3)
    # two ranks: half out, half in, and an addition of two halves, worth 0.75 of a copy: 1.75 n in all
    assert row["of_copy_speed"] == pytest.approx(1.75 * (1 << 22) / 4e9 / 0.002, rel=1e-2)


def test_a_rank_that_fails_is_named(monkeypatch):
    import phalanx.distributed.speed

    others = descendants()

    def broken(*_):
        raise ValueError("no such luck")

    monkeypatch.setattr(phalanx.distributed.speed, "measure", broken)
    with pytest.raises(PhalanxError, match=r"Rank [01] of the measurement failed: ValueError: no such luck"):
        comm.measure(2, "shm", [1024], seconds=0.5)
    monkeypatch.setattr(phalanx.distributed.speed, "measure", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(PhalanxError, match=r"Rank [01] of the measurement died"):
        comm.measure(2, "shm", [1024], seconds=0.5)
    assert descendants() <= others


def test_messages_go_through_the_mailbox(monkeypatch):
    """And not the way of tensors: without it there is no measurement."""
    import phalanx.distributed.mailbox

    def broken(*_):
        raise ValueError("the box is shut")

    monkeypatch.setattr(phalanx.distributed.mailbox.Mailbox, "send", broken)
    with pytest.raises(PhalanxError, match=r"Rank 0 of the measurement failed: ValueError: the box is shut"):
        comm.measure(2, "shm", [1024], seconds=0.5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_command(number, tmp_path):
    import psutil

    command = [sys.executable, "-m", "phalanx.cli.main", "bench", "comm", "--seconds", "60"]
    root = Path(__file__).resolve().parents[2]
    own = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=root, env=own) as process:
        try:
            assert wait_until(lambda: len(psutil.Process(process.pid).children()) == 2, 30)
            ranks = [child.pid for child in psutil.Process(process.pid).children()]
            time.sleep(0.5)
            process.send_signal(number)
            process.wait(10)
            assert all(gone_within(pid, 5) for pid in ranks)
            assert b"Traceback" not in process.stderr.read()
        finally:
            process.kill()
    assert not alive(process.pid) and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_small_sums_are_thirty_times_as_fast_as_gloo():
    """Medians on the same two processes; the best of three, since the machine may have other work."""
    sizes = [1 << n for n in (10, 12, 14, 16)]
    best = dict.fromkeys(sizes, 0.0)
    for _ in range(3):
        result = comm.report(comm.measure(2, "shm", sizes, seconds=6), "shm", detect())
        for row in result["results"]:
            if row["operation"] == "all_reduce":
                best[row["bytes"]] = max(best[row["bytes"]], row["speedup"])
    assert min(best.values()) >= 30, best

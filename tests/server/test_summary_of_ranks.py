"""What a server of several ranks says of itself: right by a calculation here, and the same as its plan."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.server import demo_checkpoint

OPTIONS = ("--dtype", "float32", "--kv-cache-memory-bytes", "64M", "--max-model-len", "512")


def started(folder: Path, *arguments: str) -> str:
    """What `phalanx serve` prints until it is ready; it is ended then."""
    demo_checkpoint()
    log = folder / "log"
    command = [sys.executable, "-m", "phalanx.cli.main", "serve", "--port", "0", *arguments]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        deadline = time.monotonic() + 90
        while "Ready: http" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    return log.read_text()


@pytest.mark.parametrize(
    ("layout", "line", "kv_bytes", "heads", "binding"),
    [
        # Bytes of one token's keys and values on the rank that decides: 2 · layers · KV heads · 64 numbers of 4 bytes.
        (("-tp", "2", "--tensor-split", "7,2"), "2 workers (tp 2)", 2 * 30 * 3 * 64 * 4, ["7", "2"], 0),
        (("-pp", "2", "--pipeline-split", "11,19"), "2 workers (pp 2)", 2 * 19 * 3 * 64 * 4, ["9", "9"], 1),
    ],
)
def test_a_server_of_two_ranks(layout, line, kv_bytes, heads, binding, tmp_path):
    text = started(tmp_path, *OPTIONS, *layout)
    blocks = 64 * 2**20 // (16 * kv_bytes)
    assert f"CPU KV cache size: {blocks * 16:,} tokens" in text
    assert f"Maximum concurrency for 512 tokens per request: {blocks * 16 / 512:.2f}x" in text
    assert f"Layout: {line}, executor mp" in text
    table = re.findall(r"^(?:Memory: )? +\d +\S+ +cpu +\d+-\d+ +(\d) ", text, re.MULTILINE)
    assert table == heads
    stages = re.findall(
        r"^Stages, measured: a token takes (.+) ms in layers 0-11, (.+) ms in layers 11-30\.$", text, re.M
    )
    assert len(stages) == (layout[0] == "-pp")  # of two, where there are stages
    assert all(float(seconds) > 0 for times in stages for seconds in times)
    assert re.search(rf"^Binding device: rank {binding} \(cpu\)", text, re.MULTILINE)
    plan = subprocess.run(
        [sys.executable, "-m", "phalanx.cli.main", "plan", *OPTIONS, *layout],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    for wanted in (
        r"^CPU KV cache size: .*$",
        r"^Maximum concurrency .*$",
        r"^\w+ split: .*$",
        r"^Binding device: .*$",
    ):
        assert re.findall(wanted, plan, re.MULTILINE) == re.findall(wanted, text, re.MULTILINE) != []

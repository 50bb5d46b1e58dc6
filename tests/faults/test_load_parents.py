"""Whatever ends, and whenever: nothing of it is left after five seconds."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator

import pytest

from tests.helpers.runs import LONG_LOAD, Run, be_busy, bring_to

OPTIONS = ["--dtype", "float32", "--kv-cache-memory-bytes", "8M", "--port", "0", "-tp", "2"]


@pytest.fixture
def run_of() -> Iterator[type]:
    runs: list[Run] = []

    def start(*command: str, fault: str = "") -> Run:
        runs.append(Run(*command, fault=fault))
        return runs[-1]

    yield start
    for run in runs:
        run.clear_up()


QUICK = {
    ("load", "front", "SIGKILL"),
    ("busy", "front", "SIGKILL"),
    ("busy", "engine", "SIGKILL"),
    ("load", "front", "SIGINT"),
}
CASES = [
    pytest.param(phase, who, name, marks=() if (phase, who, name) in QUICK else pytest.mark.slow)
    for phase in ("import", "load", "idle", "busy")
    for who, name in (
        ("front", "SIGINT"), ("front", "SIGTERM"), ("front", "SIGKILL"), ("engine", "SIGKILL"),
        ("supervisor", "SIGKILL"), ("rank", "SIGKILL"),
    )
    if not (phase == "import" and who == "rank")
]  # fmt: skip


@pytest.mark.parametrize(("phase", "who", "name"), CASES)
def test_serve(run_of, tiny_model, phase, who, name):
    run = run_of("-m", "phalanx", "serve", tiny_model, *OPTIONS, fault=LONG_LOAD.get(phase, ""))
    bring_to(run, phase)
    os.kill(run.one(who), getattr(signal, name))
    survives = (who, phase) == ("supervisor", "import") or (
        who in ("supervisor", "rank", "engine") and phase in ("idle", "busy")
    )
    if survives:
        be_busy(run)
        os.kill(run.process.pid, signal.SIGTERM)
    run.nothing_left(5 if not survives and (phase != "busy" or name != "SIGTERM") else 15)  # a drain takes its time
    run.process.wait()
    run._reader.join(5)
    if who != "front" and phase in ("import", "load") and not survives:
        assert run.process.returncode == 1
        last = run.text.strip().splitlines()[-1]
        assert "SIGKILL" in last and last.startswith("error: "), run.text
    assert "Traceback" not in run.text


PROGRAM = """
import sys
from phalanx import LLM, SamplingParams
with LLM(sys.argv[1], tensor_parallel_size=2, dtype="float32", kv_cache_memory_bytes="8M") as llm:
    print("loaded", flush=True)
    while sys.argv[2] == "busy":
        llm.generate("hello", SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)
        print("answered", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        pytest.param("load", signal.SIGINT),
        pytest.param("busy", signal.SIGKILL),
        pytest.param("load", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("busy", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("busy", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_program_of_ones_own(run_of, tiny_model, phase, number):
    run = run_of("-c", PROGRAM, tiny_model, phase, fault=LONG_LOAD.get(phase, ""))
    run.one("rank") if phase == "load" else run.says("answered")
    run.members()
    os.kill(run.process.pid, number)
    run.nothing_left()
    assert run.process.wait() != 0


def test_an_llm_outlives_the_thread_that_made_it(run_of, tiny_model):
    """Linux ties "end with my parent" to the thread that forked; a thread that ends must not take the ranks along."""
    program = """
import sys, threading
from phalanx import LLM, SamplingParams
made = []
thread = threading.Thread(target=lambda: made.append(
    LLM(sys.argv[1], tensor_parallel_size=2, dtype="float32", kv_cache_memory_bytes="8M")))
thread.start()
thread.join()
import time; time.sleep(0.5)
print("tokens", len(made[0].generate("hello", SamplingParams(max_tokens=9, ignore_eos=True))[0].outputs[0].token_ids))
print("epoch", made[0]._engine.status().epoch)
made[0].close()
"""
    run = run_of("-c", program, tiny_model)
    run.says("tokens 9")
    run.says("epoch 0")
    assert run.process.wait(60) == 0
    run.nothing_left()


@pytest.mark.slow
def test_four_servers_at_once(run_of, tiny_model):
    runs = [run_of("-m", "phalanx", "serve", tiny_model, *OPTIONS) for _ in range(4)]
    urls = {run.says(r"Ready: (http://\S+)", 120)[1] for run in runs}
    assert len(urls) == 4
    answers = set()
    for url in urls:
        body = json.dumps({"prompt": "hello", "max_tokens": 8, "temperature": 0}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        answers.add(json.load(urllib.request.urlopen(request, timeout=30))["choices"][0]["text"])
    assert len(answers) == 1
    for run in runs:
        run.process.terminate()
    for run in runs:
        run.nothing_left(10)
        assert run.process.wait() == 0

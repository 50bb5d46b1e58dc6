"""`phalanx serve` as a process whose engine is killed or stopped: what clients and probes see, and how it ends."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from phalanx.loading.image import slower
from tests.helpers.pace import Pace
from tests.helpers.processes import alive, gone_within, images, wait_until
from tests.helpers.serve_process import Serve
from tests.helpers.tiny_model import write_tiny_model
from tests.helpers.worker_model import retrain

BODY: dict[str, Any] = {
    "prompt": "Once upon", "max_tokens": 240, "ignore_eos": True, "stream": True, "temperature": 0
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def pace(tmp_path_factory: pytest.TempPathFactory) -> Pace:
    """Of all servers here: an answer takes its time until something is done to it."""
    return Pace(tmp_path_factory.mktemp("pace"))


@contextmanager
def serving(model: Path, pace: Pace, *options: str) -> Iterator[tuple[Serve, str]]:
    flags = ("--port", "0", "--dtype", "float32", "--kv-cache-memory-bytes", "8M", *options)
    serve = Serve(str(model), *flags, environment={"PHALANX_FAULT": pace.fault})
    try:
        yield serve, serve.base()
    finally:
        serve.kill()


def engine_of(base: str) -> psutil.Process:
    return psutil.Process(httpx.get(f"{base}/status").json()["engine"]["pid"])


def turns(base: str, path: str, status: int, seconds: float) -> httpx.Response:
    answers: list[httpx.Response] = []

    def turned() -> bool:
        answers.append(httpx.get(base + path))
        return answers[-1].status_code == status

    assert wait_until(turned, seconds), answers[-1].text
    return answers[-1]


def text_of(lines: list[str]) -> str:
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    chunks = [json.loads(each) for each in data[:-1]]
    assert all("error" not in chunk for chunk in chunks), chunks[-1]["error"]["message"]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def streamed(base: str) -> list[str]:
    """The lines of an answer."""
    return _streamed(base, 0, lambda: None)


def struck(base: str, pace: Pace, strike: Callable[[], object]) -> list[str]:
    """The same; after 20 of them something is done, long before the engine has computed the last."""
    with pace.slow():
        return _streamed(base, 20, lambda: (strike(), pace.release()))


def _streamed(base: str, before: int, then: Callable[[], object]) -> list[str]:
    lines: list[str] = []
    with httpx.stream("POST", f"{base}/v1/completions", json=BODY, timeout=60) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if not line:
                continue
            lines.append(line)
            if len(lines) == before:
                then()
    return lines


@pytest.mark.recovery
def test_streams_go_on_when_the_engine_is_killed_or_hangs(model: Path, pace: Pace) -> None:
    with serving(model, pace) as (serve, base):
        whole = text_of(streamed(base))
        killed = engine_of(base)
        assert text_of(struck(base, pace, killed.kill)) == whole
        assert not alive(killed.pid)
        stopped = engine_of(base)
        assert text_of(struck(base, pace, stopped.suspend)) == whole
        assert not alive(stopped.pid)
        assert httpx.get(f"{base}/health").status_code == 200
        assert httpx.get(f"{base}/status").json()["epoch"] == 2
        for line in (
            "Recovery: on; a worker without progress for 10 s counts as hung",
            r"The engine process on \S+ was lost: it was killed by SIGKILL \(noticed after 0\.\d+ s\)\. "
            r"Recovering: 1 request waits\.",
            r"Recovered in [\d.]+ s: the engine process was started again in [\d.]+ s, next token after [\d.]+ s; "
            r"1 request goes on, \d+ tokens were computed again\.",
            r"was lost: it has not answered for \d\.\d s, so it was ended",
        ):
            serve.until(line, 30)

        idle = engine_of(base)  # and now SIGTERM in the middle of a recovery
        lines = struck(base, pace, lambda: (idle.kill(), serve.process.send_signal(signal.SIGTERM)))
        assert text_of(lines) == whole
        assert serve.ends(60) == 0
        assert "Shutting down: 1 request(s) running, at most 30 s more." in serve.output
        assert "Traceback" not in serve.output


@pytest.mark.skipif(slower(), reason="the kernel has huge pages for private memory only")
@pytest.mark.recovery
def test_the_next_engine_process_reads_no_weights(model: Path, pace: Pace, tmp_path: Path) -> None:
    """It has those that the lost one has left. Others are in the checkpoint by then: with one number of them the text
    would be another."""
    own = Path(shutil.copytree(model, tmp_path / "own"))
    with serving(own, pace) as (serve, base):
        whole = text_of(streamed(base))
        retrain(own)
        for _ in range(2):
            assert text_of(struck(base, pace, engine_of(base).kill)) == whole
        assert len(images(serve.process.pid)) == 1


@pytest.mark.recovery
def test_the_loss_of_a_rank_is_two_lines_of_the_log(model: Path, pace: Pace) -> None:
    with serving(model, pace, "-tp", "2") as (serve, base):
        whole = text_of(streamed(base))
        worker = psutil.Process(httpx.get(f"{base}/status").json()["workers"][1]["pid"])
        assert text_of(struck(base, pace, worker.kill)) == whole
        serve.until(r"Recovered in .*: rank 1 was started again", 30)
        log = re.findall(r"^\d{4}-\d\d-\d\d \S+ ([A-Z]+) \[engine\] (\w+)", serve.output, re.MULTILINE)
        assert log == [("WARNING", "Rank"), ("WARNING", "Recovered")]
        (recovery,) = httpx.get(f"{base}/status").json()["recoveries"]
        metrics = httpx.get(f"{base}/metrics").text
        (measured,) = re.findall(r"^phalanx:failure_detection_seconds_sum\{.*\} (\S+)$", metrics, re.MULTILINE)
        assert float(measured) == pytest.approx(recovery["detection_s"])
        assert recovery["detection_s"] > 0


def test_without_recovery_a_loss_ends_all_streams_and_health_says_so(model: Path, pace: Pace) -> None:
    with serving(model, pace, "--no-enable-recovery") as (serve, base):
        engine = engine_of(base)
        engine.suspend()
        turns(base, "/health", 503, 10)
        engine.resume()
        turns(base, "/health", 200, 30)
        lines = struck(base, pace, engine.kill)
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["type"] == "server_error"
        assert lines[-1] == "data: [DONE]"
        turns(base, "/health", 503, 1)
        turns(base, "/health/live", 503, 1)
        refused = httpx.post(f"{base}/v1/completions", json=BODY)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert httpx.get(f"{base}/status").json()["state"] == "failed"
        assert httpx.get(f"{base}/metrics").status_code == 200
        said = "The engine process is gone: it was killed by SIGKILL. Recovery is off: requests end with errors"
        serve.until(re.escape(said), 5)
        assert serve.output.count(said) == 1
        serve.process.send_signal(signal.SIGTERM)
        assert serve.ends(10) == 0
        assert "Traceback" not in serve.output


def test_when_nothing_helps_the_server_ends_with_one_line(model: Path, pace: Pace, tmp_path: Path) -> None:
    """The model's files are gone."""
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    with serving(copy, pace, "--recovery-timeout", "2") as (serve, base):
        engine = engine_of(base)

        def ruin() -> None:
            (copy / "model.safetensors").unlink()
            engine.kill()

        lines = struck(base, pace, ruin)
        assert lines[-1] == "data: [DONE]"
        assert sum('"error"' in line for line in lines) == 1
        assert serve.ends(10) == 1
        assert "safetensors" in serve.lines[-1]
        assert serve.lines[-1].startswith("error: The engine process is gone: it was killed by SIGKILL.")
        assert "Traceback" not in serve.output


@pytest.mark.recovery
@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_outlives_a_killed_front_end(model: Path, pace: Pace, ranks: int) -> None:
    """Also not the engine that replaced another one."""
    with serving(model, pace, "--tensor-parallel-size", str(ranks)) as (serve, base):
        text_of(struck(base, pace, engine_of(base).kill))
        turns(base, "/health", 200, 60)
        below = psutil.Process(serve.process.pid).children(recursive=True)
        assert len(below) >= ranks
        serve.process.kill()
        serve.process.wait()
        for process in below:
            assert gone_within(process.pid, 5.0), process

"""`phalanx serve` as a process with the demo model: what it prints, how it answers, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.helpers.certificates import Authority
from tests.helpers.pace import Pace
from tests.helpers.processes import wait_until
from tests.helpers.serve_process import SMALL, Serve, all_gone, descendants
from tests.helpers.server import demo_checkpoint


@pytest.fixture(scope="module", autouse=True)
def fetched() -> None:
    demo_checkpoint()


@pytest.fixture(scope="module")
def pace(tmp_path_factory: pytest.TempPathFactory) -> Pace:
    return Pace(tmp_path_factory.mktemp("pace"))


@pytest.fixture(scope="module")
def running(pace: Pace) -> Iterator[Serve]:
    serve = Serve("--port", "0", *SMALL, environment={"PHALANX_FAULT": pace.fault})
    try:
        serve.until(r"Ready: http")
        yield serve
    finally:
        serve.kill()


@pytest.fixture(scope="module")
def base(running: Serve) -> str:
    return running.until(r"Ready: (http://127\.0\.0\.1:\d+)")[1]


def test_the_summary(running: Serve) -> None:
    text = running.output
    assert "loading: weights 100%" in text
    (tokens,) = re.findall(r"^CPU KV cache size: ([\d,]+) tokens", text, re.MULTILINE)
    (concurrency,) = re.findall(r"^Maximum concurrency for 2,048 tokens per request: (\d+\.\d\d)x", text, re.MULTILINE)
    assert int(tokens.replace(",", "")) / 2048 == pytest.approx(float(concurrency), abs=0.006)
    assert re.search(r"^Layout: 1 worker", text, re.MULTILINE)
    assert re.search(r"^ +0 +\S+ +cpu +0-30 ", text, re.MULTILINE)
    assert "API key: none (only this machine can connect)" in text


def test_the_curl_line_works_as_printed(running: Serve) -> None:
    command = running.until(r"(?m)^  (curl .*)$")[1]
    answer = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(answer.stdout)["choices"][0]["message"]["content"]


async def test_openai_client_with_a_real_model(base: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none") as api:
        (model,) = [model.id async for model in api.models.list()]
        messages = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
        options = {"model": model, "messages": messages, "max_tokens": 24, "temperature": 0}
        whole = await api.chat.completions.create(**options, logprobs=True, top_logprobs=3)  # type: ignore[call-overload]
        text = whole.choices[0].message.content
        assert "Paris" in text
        content = whole.choices[0].logprobs.content
        assert "".join(entry.token for entry in content).startswith(text)
        assert all(entry.logprob == max(top.logprob for top in entry.top_logprobs) for entry in content)
        stream = await api.chat.completions.create(**options, stream=True)  # type: ignore[call-overload]
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(pieces) == text
        together = await asyncio.gather(*(api.chat.completions.create(**options) for _ in range(3)))  # type: ignore[call-overload]
        assert all(answer.choices[0].message.content for answer in together)


def test_status_names_the_real_processes(base: str, running: Serve) -> None:
    status = httpx.get(f"{base}/status").json()
    assert status["state"] == "ready"
    pids = {process.pid for process in descendants(running.process)}
    assert status["engine"]["pid"] in pids
    assert status["workers"][0]["pid"] in pids
    assert status["workers"][0]["layers"] == "0-30"
    assert status["workers"][0]["environment"]["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "256"
    assert status["kv"]["free"] <= status["kv"]["blocks"]


def test_only_loopback_is_listened_on(running: Serve) -> None:
    processes = [psutil.Process(running.process.pid), *descendants(running.process)]
    listening = [c.laddr for p in processes for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listening] == ["127.0.0.1"]


def test_structured_output(base: str) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer"}},
        "required": ["age"],
        "additionalProperties": False,
    }
    body = {
        "messages": [{"role": "user", "content": "How old is Ann? She is 7."}], "max_tokens": 40, "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "age", "schema": schema}},
    }  # fmt: skip
    answer = httpx.post(f"{base}/v1/chat/completions", json=body, timeout=120).json()
    choice = answer["choices"][0]
    if choice["finish_reason"] == "stop":
        assert set(json.loads(choice["message"]["content"])) == {"age"}
    else:
        assert re.match(r'\s*\{\s*"age"', choice["message"]["content"])


def test_a_dropped_stream_frees_its_blocks(base: str) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{base}/v1/completions", json=body, timeout=60) as answer:
        next(answer.iter_text())

    def at_rest() -> bool:
        status = httpx.get(f"{base}/status").json()
        return not status["requests"]["running"] and status["kv"]["free"] == status["kv"]["blocks"]

    assert wait_until(at_rest, 10), httpx.get(f"{base}/status").text


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (b"GET /health HTTP/1.1\r\nX: " + b"a" * 300_000, b"431"),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 900000000\r\n", b"413"),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\n", b"415"),
    ],
)
def test_a_refusal_reaches_a_client_that_is_still_sending(base: str, request_head: bytes, status: bytes) -> None:
    host, _, port = base.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(
            request_head + b"Host: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            if status == b"415"
            else request_head + b"Host: localhost\r\n\r\n"
        )
        body = b"x" * 200_000
        connection.sendall(b"%x\r\n%s\r\n" % (len(body), body) if status == b"415" else body)
        assert connection.recv(1000).startswith(b"HTTP/1.1 " + status)


def test_a_port_in_use(base: str) -> None:
    port = base.rpartition(":")[2]
    serve = Serve("--port", port, *SMALL)
    assert serve.ends(30) == 1
    (line,) = serve.lines
    assert line.startswith(f"error: Port {port} on 127.0.0.1 is in use by another program. Choose another with --port")


def test_sigterm_drains_and_exits_with_0(running: Serve, base: str, pace: Pace) -> None:
    """The last one: it ends the shared server."""
    body = {"prompt": "Once upon a time", "max_tokens": 100, "ignore_eos": True, "stream": True}
    children = descendants(running.process)
    with pace.slow(), httpx.stream("POST", f"{base}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        running.process.send_signal(signal.SIGTERM)
        running.until(r"Shutting down: 1 request\(s\) running", 30)
        assert httpx.get(f"{base}/health").status_code == 503
        assert httpx.get(f"{base}/health/live").status_code == 200
        refused = httpx.post(f"{base}/v1/completions", json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        pace.release()
        rest = list(lines)
    assert rest[-2:] == ["data: [DONE]", ""] or rest[-1] == "data: [DONE]"
    assert '"error"' not in "".join(rest)
    assert running.ends(60) == 0
    assert running.lines[-1] == "Stopped."
    assert all_gone(children)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_while_loading(number: signal.Signals, code: int) -> None:
    serve = Serve("--port", "0", *SMALL)
    try:
        deadline = time.monotonic() + 30
        while not descendants(serve.process) and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.3)
        children = descendants(serve.process)
        began = time.monotonic()
        serve.process.send_signal(number)
        assert serve.ends(10) == code, serve.output
        assert time.monotonic() - began < 2.5
        assert "Traceback" not in serve.output
        assert all_gone(children)
    finally:
        serve.kill()


def test_ctrl_c_ends_running_requests_at_once_and_a_key_is_asked_for() -> None:
    serve = Serve("--port", "0", "--api-key", "k1", *SMALL)
    try:
        base = serve.until(r"Ready: (http://\S+)")[1]
        assert "API key: required" in serve.output
        assert "k1" not in serve.output
        children = descendants(serve.process)
        body = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        assert httpx.post(f"{base}/v1/completions", json=body).status_code == 401
        headers = {"Authorization": "Bearer k1"}
        with httpx.stream("POST", f"{base}/v1/completions", json=body, headers=headers, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            began = time.monotonic()
            serve.process.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "service_unavailable"
        assert rest[-1] == "data: [DONE]"
        assert serve.ends(10) == 0
        assert time.monotonic() - began < 2.5
        assert all_gone(children)
    finally:
        serve.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_process_and_each_stream_with_an_error(number: signal.Signals) -> None:
    serve = Serve("--port", "0", *SMALL)
    try:
        base = serve.until(r"Ready: (http://\S+)")[1]
        children = descendants(serve.process)
        body = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{base}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            serve.process.send_signal(signal.SIGTERM)
            serve.until("Shutting down: 1", 30)
            serve.process.send_signal(number)
            rest = [line for line in lines if line]
            assert serve.ends(2) == 128 + number
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "service_unavailable"
        assert rest[-1] == "data: [DONE]"
        assert all_gone(children)
    finally:
        serve.kill()


def test_output_that_nobody_reads_costs_lines_and_nothing_else() -> None:
    serve = Serve("--port", "0", "--access-log", *SMALL)
    try:
        base = serve.base()
        engine = httpx.get(f"{base}/status").json()["engine"]["pid"]
        serve.stop_reading()
        body = {"prompt": "Once upon a time", "max_tokens": 4, "ignore_eos": True}
        with httpx.Client(base_url=base, timeout=60) as client:
            for _ in range(3):
                assert client.get("/v1/models").status_code == 200
            os.kill(engine, signal.SIGKILL)  # of which there is much to say, and another process to say it
            assert client.post("/v1/completions", json=body).status_code == 200
            serve.read_on()

            def told() -> bool:
                assert client.get("/v1/models").status_code == 200
                return any(int(count) > 3 for count in re.findall(r"(\d+) line\(s\) of output were lost", serve.output))

            assert wait_until(told, 30), serve.output
            serve.stop_reading()
            serve.process.send_signal(signal.SIGTERM)
            assert serve.process.wait(30) == 0
    finally:
        serve.kill()
        serve.read_on()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("/nowhere/model",), ("/nowhere/model",)),
        (("--host", "256.1.1.1"), ("256.1.1.1", "--host")),
        (("--port", "70000"), ("70000", "--port")),
        (("--ssl-keyfile", "/nowhere"), ("--ssl-keyfile", "--ssl-certfile")),
        (("--ssl-keyfile", "/nowhere", "--ssl-certfile", "/nowhere"), ("TLS", "--ssl")),
        (("--max-model-len", "999999"), ("999999", "8192")),
    ],
)
def test_what_cannot_work_says_so_once(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    serve = Serve("--port", "0", *arguments) if "--port" not in arguments else Serve(*arguments)
    try:
        assert serve.ends(60) != 0
        errors = [line for line in serve.lines if line.startswith("error: ")]
        assert len(errors) == 1, serve.output
        assert all(word in errors[0] for word in words), errors
        assert "Traceback" not in serve.output
    finally:
        serve.kill()


def test_tls_from_the_first_moment_on(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    certificate, key = authority.issue("server")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve = Serve("--port", str(port), "--ssl-keyfile", str(key), "--ssl-certfile", str(certificate), *SMALL)
    try:
        import ssl

        trusted = ssl.create_default_context(cafile=str(authority.certificate))
        deadline = time.monotonic() + 60
        with httpx.Client(verify=trusted, base_url=f"https://localhost:{port}") as client:
            while True:
                loading = descendants(serve.process)
                for process in loading:  # it shall not be ready before it has been asked
                    process.suspend()
                try:
                    answer = client.get("/health")
                    break
                except httpx.ConnectError:
                    assert time.monotonic() < deadline, serve.output
                    time.sleep(0.05)
            assert answer.status_code == 503  # HTTP is up while the model loads
            assert "loading" in answer.text
            assert client.get("/health/live").status_code == 200
        for process in loading:
            process.resume()
        with socket.create_connection(("127.0.0.1", port)) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200" not in plain.recv(100)
        serve.process.send_signal(signal.SIGTERM)
        assert serve.ends(30) == 0
    finally:
        serve.kill()

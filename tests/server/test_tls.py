"""`phalanx serve` over TLS: generation, streams, client certificates, and files that cannot be used."""

from __future__ import annotations

import json
import signal
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from tests.helpers.certificates import Authority
from tests.helpers.pace import Pace
from tests.helpers.serve_process import Serve
from tests.helpers.tiny_model import write_tiny_model

PROMPT = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@dataclass
class Files:
    model: Path
    authority: Authority
    certificate: Path
    key: Path
    pace: Pace

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--ssl-certfile", str(self.certificate), "--ssl-keyfile", str(self.key))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority(folder, "authority")
    return Files(write_tiny_model(folder / "tiny"), authority, *authority.issue("server"), Pace(folder))


@contextmanager
def serving(files: Files, *flags: str) -> Iterator[Serve]:
    options = ("--port", "0", "--kv-cache-memory-bytes", "2M", *files.flags, *flags)
    serve = Serve(str(files.model), *options, environment={"PHALANX_FAULT": files.pace.fault})
    try:
        assert serve.base().startswith("https://")
        yield serve
    finally:
        serve.kill()


@pytest.fixture(scope="module")
def plain(files: Files) -> Iterator[Serve]:
    with serving(files) as serve:
        yield serve


@pytest.fixture(scope="module")
def mutual(files: Files) -> Iterator[Serve]:
    with serving(files, "--ssl-ca-certs", str(files.authority.certificate)) as serve:
        yield serve


def context(files: Files, client: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=str(files.authority.certificate))
    if client is not None:
        made.load_cert_chain(*client)
    return made


def client(serve: Serve, tls: ssl.SSLContext) -> httpx.Client:
    return httpx.Client(base_url=serve.base(), verify=tls, timeout=60)


def test_answers_and_streams(files: Files, plain: Serve) -> None:
    long = {**PROMPT, "max_tokens": 100}
    with client(plain, context(files)) as api:
        whole = api.post("/v1/completions", json=long).json()["choices"][0]["text"]
        pieces = []
        with files.pace.slow(), api.stream("POST", "/v1/completions", json={**long, "stream": True}) as answer:
            for line in answer.iter_lines():
                files.pace.release()
                if line.startswith("data: {"):
                    pieces.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
        assert len(pieces) > 1
        assert "".join(pieces) == whole
        assert api.get("/health").status_code == 200


def test_the_openai_client(files: Files, plain: Serve) -> None:
    with openai.OpenAI(
        base_url=f"{plain.base()}/v1", api_key="none", max_retries=0, http_client=client(plain, context(files))
    ) as api:
        model = api.models.list().data[0].id
        messages = [{"role": "user", "content": "Hello"}]
        options = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0}
        whole = api.chat.completions.create(**options)  # type: ignore[call-overload]
        stream = api.chat.completions.create(**options, stream=True)  # type: ignore[call-overload]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == whole.choices[0].message.content


def test_a_server_nobody_vouches_for_is_not_talked_to(plain: Serve) -> None:
    with client(plain, ssl.create_default_context()) as api, pytest.raises(httpx.ConnectError, match="CERTIFICATE"):
        api.get("/health")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
def test_old_versions_are_refused(files: Files, plain: Serve, version: ssl.TLSVersion) -> None:
    old = context(files)
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version = old.maximum_version = version
    with client(plain, old) as api, pytest.raises(httpx.ConnectError):
        api.get("/health")
    with client(plain, context(files)) as api:
        assert api.get("/health").status_code == 200


def test_plain_http_is_answered_with_nothing(files: Files, plain: Serve) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(plain.base().replace("https", "http") + "/health")
    with client(plain, context(files)) as api:
        assert api.get("/health").status_code == 200


def test_the_printed_curl_line_uses_https(plain: Serve, files: Files) -> None:
    command = plain.until(r"(?m)^  (curl .*)$")[1]
    assert "https://" in command
    command = command.replace("curl ", f"curl --cacert {files.authority.certificate} ", 1)
    answer = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert "choices" in json.loads(answer.stdout)


def test_clients_with_a_certificate(files: Files, mutual: Serve) -> None:
    with client(mutual, context(files, files.authority.issue("client"))) as api:
        answer = api.post("/v1/completions", json=PROMPT)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 12
        with api.stream("POST", "/v1/completions", json={**PROMPT, "stream": True}) as stream:
            assert list(stream.iter_lines())[-2] == "data: [DONE]"


@pytest.mark.parametrize("who", ["nobody", "another authority's", "expired"])
def test_clients_without_a_good_one(files: Files, mutual: Serve, who: str, tmp_path: Path) -> None:
    given = {
        "nobody": lambda: None,
        "another authority's": lambda: Authority(tmp_path, "stranger").issue("client"),
        "expired": lambda: files.authority.issue("late", days=-1),
    }[who]()
    with client(mutual, context(files, given)) as api, pytest.raises(httpx.TransportError):
        api.post("/v1/completions", json=PROMPT)
    with client(mutual, context(files, files.authority.issue("good"))) as api:
        assert api.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda files, folder: ("--ssl-certfile", files.certificate), ("--ssl-keyfile",)),
        (lambda files, folder: ("--ssl-ca-certs", files.authority.certificate), ("--ssl-keyfile", "--ssl-certfile")),
        (lambda files, folder: (*files.flags[:2], "--ssl-keyfile", files.authority.issue("x")[1]), ("fit",)),
        (lambda files, folder: (*files.flags[:2], "--ssl-keyfile", folder / "missing"), ("read", "--ssl")),
        (lambda files, folder: (*files.flags, "--ssl-ca-certs", files.model / "config.json"), ("PEM",)),
    ],
)
def test_files_that_cannot_be_used(files: Files, tmp_path: Path, change, words: tuple[str, ...]) -> None:
    serve = Serve(str(files.model), "--port", "0", *map(str, change(files, tmp_path)))
    try:
        assert serve.ends(60) == 1
        (line,) = serve.lines
        assert line.startswith("error: ")
        assert all(word in line for word in words), line
    finally:
        serve.kill()


def test_a_stream_is_drained_over_tls(files: Files) -> None:
    with serving(files) as serve, client(serve, context(files)) as api:
        body = {**PROMPT, "max_tokens": 200, "stream": True}
        with files.pace.slow(), api.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            serve.process.send_signal(signal.SIGTERM)
            serve.until(r"Shutting down: 1 request\(s\) running", 30)
            files.pace.release()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"error"' not in "".join(rest)
        assert serve.ends(30) == 0

"""What a started server says, and the sums in it; what loading shows; which addresses count as safe."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from phalanx.config import EngineConfig
from phalanx.engine.client import EngineInfo, EngineState, EngineStatus
from phalanx.executor.base import WorkerStatus
from phalanx.server.middleware import allowed_hosts
from phalanx.server.progress import LoadingLine
from phalanx.server.summary import base_url, curl, summary

INFO = EngineInfo(
    model="m", dtype="bfloat16", device="cuda:0", max_model_len=40_960, vocab_size=10, block_size=16, blocks=40_202,
    kv_bytes=3 * 2**30, pid=1, executor="inprocess", mesh={"dp": 1, "pp": 2, "cp": 1, "tp": 2}, load_s=1.25,
)  # fmt: skip
WORKER = WorkerStatus(0, 1, "here", "cuda:0", "ready", "0-30", 9, {"weights": 2**29, "kv_cache": 3 * 2**30, "free": 0})


def config(**options: object) -> EngineConfig:
    return EngineConfig.from_options(**options)


def test_words_that_users_look_for() -> None:
    text = summary(config(), INFO, EngineStatus("ready", workers=[WORKER]), ("m",), has_chat=True)
    assert "GPU KV cache size: 643,232 tokens" in text
    assert "Maximum concurrency for 40,960 tokens per request: 15.70x" in text
    assert "Layout: 4 workers (pp 2, tp 2), executor inprocess" in text
    assert "512.0 MiB" in text
    assert "activations" in text


def test_replicas_are_named_and_their_caches_added_up() -> None:
    engines = [EngineState(pid, "ready", 0, 0, 0, 0) for pid in (71, 72)]
    mesh = {"dp": 2, "pp": 1, "cp": 1, "tp": 1}
    text = summary(
        config(data_parallel_size=2), replace_info(mesh=mesh), EngineStatus("ready", engines=engines), ("m",),
        has_chat=True,
    )  # fmt: skip
    assert "GPU KV cache size: 1,286,464 tokens (6.0 GiB" in text
    assert "Replicas: 2 (engine processes 71, 72), each with 643,232 tokens of KV cache" in text
    assert "Layout: 2 workers (dp 2), executor inprocess" in text
    assert "Replicas" not in summary(config(), INFO, EngineStatus("ready"), ("m",), has_chat=True)


def test_proposed_tokens_are_named() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 3}
    text = summary(config(speculative_config=given), INFO, EngineStatus("ready"), ("m",), has_chat=True)
    assert "Proposed tokens: up to 3 at a time, by ngram" in text
    assert "Proposed" not in summary(config(), INFO, EngineStatus("ready"), ("m",), has_chat=True)


def test_measured_times_of_stages() -> None:
    stages = [replace_worker(0, layers="0-16", step_s=0.008), replace_worker(1, layers="16-30", step_s=0.0091)]
    text = summary(config(), INFO, EngineStatus("ready", workers=stages), ("m",), has_chat=False)
    assert "a token takes 8.0 ms in layers 0-16, 9.1 ms in layers 16-30." in text
    assert "Stages" not in summary(config(), INFO, EngineStatus("ready", workers=stages[:1]), ("m",), has_chat=False)


def replace_worker(rank: int, **changes: object) -> WorkerStatus:
    import msgspec

    return msgspec.structs.replace(WORKER, rank=rank, **changes)


def test_cpu_is_called_cpu() -> None:
    assert "CPU KV cache size: 643,232 tokens" in summary(
        config(), replace_info(device="cpu"), EngineStatus("ready"), ("m",), has_chat=False
    )


def replace_info(**changes: object) -> EngineInfo:
    import msgspec

    return msgspec.structs.replace(INFO, **changes)


def test_keys_are_never_shown_and_open_servers_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PHALANX_API_KEY", raising=False)
    open_text = summary(config(host="0.0.0.0"), INFO, EngineStatus("ready"), ("m",), has_chat=True)
    assert "WARNING" in open_text
    locked = summary(config(host="0.0.0.0", api_key=("secret",)), INFO, EngineStatus("ready"), ("m",), has_chat=True)
    assert "secret" not in locked
    assert "WARNING" not in locked
    assert "Bearer YOUR_API_KEY" in locked


def test_the_first_call_takes_the_key_from_the_variable_where_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    server = config(api_key=("one", "two")).server
    for variable, shown in (("one", "$PHALANX_API_KEY"), ("one,two", "YOUR_API_KEY"), ("other", "YOUR_API_KEY")):
        monkeypatch.setenv("PHALANX_API_KEY", variable)
        assert f'-H "Authorization: Bearer {shown}"' in curl(server, has_chat=True)


def test_addresses_for_a_client_on_this_machine() -> None:
    server = config(port=81).server
    assert base_url(server) == "http://127.0.0.1:81"
    assert base_url(replace(server, host="0.0.0.0")) == "http://127.0.0.1:81"
    assert base_url(replace(server, host="::")) == "http://[::1]:81"
    assert base_url(replace(server, ssl_certfile="x")) == "https://127.0.0.1:81"
    assert "/v1/completions" in curl(server, has_chat=False)
    assert "/v1/chat/completions" in curl(server, has_chat=True)


def test_default_hosts() -> None:
    assert allowed_hosts((), bind_host="127.0.0.1", has_key=False) is None
    assert allowed_hosts((), bind_host="127.0.0.1", has_key=True) == ("*",)
    assert allowed_hosts((), bind_host="0.0.0.0", has_key=False) == ("*",)
    assert allowed_hosts(("a",), bind_host="127.0.0.1", has_key=True) == ("a",)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_without_a_terminal_is_a_few_lines() -> None:
    stream = io.StringIO()
    line = LoadingLine(stream)
    for step in range(1001):
        line("weights", step / 1000)
    line("kv cache", 1.0)
    line.finish()
    assert stream.getvalue().splitlines() == [
        "loading: weights 0%", "loading: weights 25%", "loading: weights 50%", "loading: weights 75%",
        "loading: weights 100%", "loading: kv cache 100%",
    ]  # fmt: skip


def test_progress_says_which_ranks_are_how_far() -> None:
    stream, terminal = io.StringIO(), Terminal()
    for each in (stream, terminal):
        line = LoadingLine(each)
        line("weights", 0.63, "rank 0 80%, rank 1 46%")
        line.finish()
    assert stream.getvalue() == "loading: weights 63% (rank 0 80%, rank 1 46%)\n"
    assert "63% (rank 0 80%, rank 1 46%)" in terminal.getvalue()
    assert len(terminal.getvalue().partition("\x1b")[0]) < 80


def test_progress_on_a_terminal_is_one_line_a_phase() -> None:
    stream = Terminal()
    line = LoadingLine(stream)
    for step in range(1001):
        line("weights", step / 1000)
    line("kv cache", 1.0)
    line.finish()
    assert stream.getvalue().count("\n") == 2
    assert stream.getvalue().count("\r") < 50

"""Hub ids, against a hub of our own over real HTTP. Each call is its own process, since huggingface_hub reads its
settings (end point, cache, offline mode) once, when imported."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import save

from tests.helpers.mock_hub import MockHub

CONFIG = json.dumps({"model_type": "llama", "auto_map": {"AutoModel": "modeling_evil.Model"}}).encode()
MODEL = {
    "config.json": CONFIG,
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "merges.txt": b"#version\n",
    "qwen.tiktoken": b"",
    "chat_template.jinja": b"{{ messages }}",
    "README.md": b"# a model",
    "modeling_evil.py": b"raise SystemExit('repository code ran')",
    "pytorch_model.bin": b"\x80\x04cos\nsystem\n",
    "training_args.bin": b"\x80\x04",
    "consolidated.safetensors": save({"a": torch.ones(2)}),
    "onnx/model.onnx": b"x",
    "onnx/config.json": b"{}",
    "model.safetensors": save({"a": torch.ones(2)}),
}
REPOS = {
    "owner/tiny": {"main": MODEL, "v2": MODEL | {"model.safetensors": save({"b": torch.ones(300000)})}},
    "owner/pickled": {"main": {"config.json": CONFIG, "pytorch_model.bin": b"\x80"}},
    "owner/gguf": {"main": {"tiny-Q4.gguf": b"GGUF", "README.md": b""}},
    "owner/gated": {"main": {"config.json": CONFIG, "model.safetensors": MODEL["model.safetensors"]}},
    "owner/nothing": {"main": {"README.md": b""}},
    "owner/half": {"main": {"config.json": CONFIG}},
    "oldname": {"main": MODEL},
}

SCRIPT = """
import json, sys
from phalanx.checkpoint.locate import locate, locate_tokenizer
from phalanx.errors import CheckpointError
call, name, revision = json.loads(sys.argv[1])
try:
    found = {"locate": locate, "locate_tokenizer": locate_tokenizer}[call](name, revision=revision)
except CheckpointError as error:
    print(json.dumps({"error": str(error), "kind": type(error).__name__}))
else:
    folder = found if call == "locate_tokenizer" else found.folder
    print(json.dumps({"files": sorted(p.name for p in folder.iterdir()), "folder": str(folder),
                      "name": getattr(found, "name", None),
                      "tensors": sorted(found.tensors()) if call == "locate" else None}))
"""


@pytest.fixture(scope="module")
def hub():
    with MockHub(REPOS, gated=("owner/gated",)) as running:
        yield running


@pytest.fixture
def call(hub, tmp_path):
    def run(name, revision=None, function="locate", **environment):
        settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*"}
        clean = {key: item for key, item in os.environ.items() if not key.startswith("HF_")}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, json.dumps([function, name, revision])],
            env=clean | settings | environment, capture_output=True, text=True, timeout=100, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout) | {"stderr": done.stderr}

    hub.requests.clear()
    return run


def test_only_data_files_are_fetched_and_then_kept(hub, call):
    """SEC-19: no Python file and no pickle is even asked for."""
    found = call("owner/tiny")
    assert (found["name"], found["tensors"]) == ("owner/tiny", ["a"])
    wanted = {"config.json", "generation_config.json", "tokenizer.json", "merges.txt", "qwen.tiktoken",
              "chat_template.jinja", "model.safetensors"}  # fmt: skip
    assert set(found["files"]) == hub.fetched == wanted
    hub.requests.clear()
    assert call("owner/tiny")["files"] == found["files"]
    assert hub.fetched == set()
    hub.requests.clear()
    offline = call("owner/tiny", HF_HUB_OFFLINE="1")
    assert (offline["folder"], hub.requests) == (found["folder"], [])
    unreachable = call("owner/tiny", HF_ENDPOINT="http://127.0.0.1:9")
    assert unreachable["folder"] == found["folder"]


def test_the_revision_is_honoured_and_progress_shown(hub, call):
    found = call("owner/tiny", "v2")
    assert found["tensors"] == ["b"]
    assert found["folder"].endswith(hub.revision_id("owner/tiny", "v2"))
    assert all("/resolve/" not in path or hub.revision_id("owner/tiny", "v2") in path for path in hub.requests)
    assert "Fetching owner/tiny: 100 % of 1 MB" in found["stderr"]


def test_a_name_without_owner(call):
    assert call("oldname")["name"] == "oldname"


def test_a_tokenizer_comes_without_weights(hub, call):
    found = call("owner/pickled", function="locate_tokenizer")
    assert found["files"] == ["config.json"]
    found = call("owner/tiny", function="locate_tokenizer")
    assert "model.safetensors" not in hub.fetched


@pytest.mark.parametrize(
    ("name", "revision", "words"),
    [
        ("owner/unknown", None, "no such model on the hub"),
        ("unknown", None, "There is no folder or file 'unknown' here"),
        ("owner/tiny", "v9", "has no revision 'v9'"),
        ("owner/pickled", None, "only pickled weights"),
        ("owner/gguf", None, "hf download owner/gguf FILE.gguf"),
        ("owner/gated", None, "Accept them on https://huggingface.co/owner/gated"),
        ("owner/nothing", None, "has no weights"),
        ("owner/half", None, "has no weights"),
        ("a--b/c..d", None, "could not be fetched"),
    ],
)
def test_what_goes_wrong_is_said_in_one_line(call, name, revision, words):
    result = call(name, revision)
    assert words in result["error"]
    assert "Traceback" not in result["stderr"]
    assert "\n" not in result["error"]


def test_offline_and_not_there(hub, call):
    result = call("owner/tiny", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE forbids" in result["error"]
    assert hub.requests == []


def test_no_network_is_said_within_seconds(call):
    begin = time.monotonic()
    result = call("owner/tiny", HF_ENDPOINT="http://127.0.0.1:9")
    assert "Check the name and the network" in result["error"]
    assert time.monotonic() - begin < 10


def test_a_silent_network_is_given_up(call):
    """A server that takes the connection and never answers."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        begin = time.monotonic()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        result = call("owner/tiny", HF_ENDPOINT=address, HF_HUB_ETAG_TIMEOUT="2")
    assert "could not be fetched" in result["error"]
    assert time.monotonic() - begin < 8


def test_the_cache_cannot_be_written(call, tmp_path):
    (tmp_path / "file").write_text("")
    result = call("owner/tiny", HF_HOME=str(tmp_path / "file" / "hf"))
    assert "could not be written to the hub's cache" in result["error"]

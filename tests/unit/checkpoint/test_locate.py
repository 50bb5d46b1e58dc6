"""From a model's name to its files: folders and files here; the hub in test_hub.py, the demo model in test_demo.py."""

import json

import pytest
import torch
from safetensors.torch import save_file

from phalanx.checkpoint.locate import locate, locate_text, locate_tokenizer
from phalanx.errors import CheckpointError, FormatError, UnsupportedModel
from tests.helpers.gguf_files import decoder_metadata, decoder_tensors, random_blocks, write_gguf

CONFIG = {"model_type": "llama", "auto_map": {"AutoModel": "modeling_evil.Model"}}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def shards(folder, count=2, of=None):
    names = [f"model-{i + 1:05d}-of-{of or count:05d}.safetensors" for i in range(count)]
    for i, name in enumerate(names):
        save_file({f"t{i}": torch.ones(2)}, folder / name)
    return names


def index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_single_file(folder):
    save_file({"a": torch.ones(2, 3)}, folder / "model.safetensors")
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    found = locate(str(folder))
    assert (found.name, found.folder, found.format) == ("tiny", folder, "safetensors")
    assert found.weight_files == (folder / "model.safetensors",)
    assert (found.config, found.generation_config, found.gguf) == (CONFIG, {"temperature": 0.5}, None)
    assert found.tensors()["a"].shape == (2, 3)
    assert found.file("config.json") == folder / "config.json"
    assert found.file("tokenizer.json") is None


def test_single_file_of_another_name(folder):
    save_file({"a": torch.ones(2)}, folder / "weights.safetensors")
    save_file({"b": torch.ones(2)}, folder / "consolidated.safetensors")
    assert locate(str(folder)).weight_files == (folder / "weights.safetensors",)


def test_shards_by_index(folder):
    names = shards(folder)
    save_file({"x": torch.ones(1)}, folder / "unrelated.safetensors")
    index(folder, {"t0": names[0], "t1": names[1], "t2": names[1]})
    found = locate(str(folder))
    assert [path.name for path in found.weight_files] == names
    assert set(found.tensors()) == {"t0", "t1"}


def test_shards_without_index(folder):
    names = shards(folder)
    assert [path.name for path in locate(str(folder)).weight_files] == names
    (folder / names[0]).unlink()
    with pytest.raises(CheckpointError, match="1 of the 2 files"):
        locate(str(folder))
    shards(folder, 1, of=3)
    with pytest.raises(CheckpointError, match=r"several safetensors files and no model.*index"):
        locate(str(folder))


def test_gguf_file_and_folder_with_one(tmp_path):
    path = write_gguf(tmp_path / "tiny-Q4.gguf", decoder_metadata("llama"), decoder_tensors())
    found = locate(str(path))
    assert (found.name, found.format, found.weight_files) == ("tiny-Q4", "gguf", (path,))
    assert found.config["model_type"] == "llama"
    assert found.generation_config["eos_token_id"] == [2]
    assert found.tensors()["blk.1.attn_q.weight"].dtype == "Q4_1"
    assert found.file("config.json") is None
    assert locate(str(tmp_path)).weight_files == (path,)
    write_gguf(tmp_path / "other.gguf", decoder_metadata("llama"), decoder_tensors())
    with pytest.raises(CheckpointError, match=r"2 \.gguf files.*Name one of them"):
        locate(str(tmp_path))


def test_text_needs_no_weights(folder, tmp_path):
    index(folder, {"t0": "model-00001-of-00001.safetensors"})
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    with pytest.raises(CheckpointError):
        locate(str(folder))
    found = locate_text(str(folder))
    assert (found.name, found.format, found.weight_files) == ("tiny", "safetensors", ())
    assert (found.config, found.generation_config) == (CONFIG, {"temperature": 0.5})
    (name,) = shards(folder, 1)
    assert locate_text(str(folder)).weight_files == (folder / name,), "those that are there are known"
    gguf = tmp_path / "gguf"
    gguf.mkdir()
    (gguf / "config.json").write_text(json.dumps(CONFIG))
    path = write_gguf(gguf / "a.gguf", decoder_metadata("llama"), decoder_tensors())
    assert locate_text(str(gguf)).weight_files == (path,), "one file may have the text too"
    with pytest.raises(CheckpointError, match="no file or folder"):
        locate_text(str(tmp_path / "nowhere"))


def test_relative_and_home_paths(folder, monkeypatch):
    save_file({"a": torch.ones(2)}, folder / "model.safetensors")
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HOME", str(folder.parent))
    assert locate("tiny").name == locate("./tiny").name == locate("~/tiny").name == "tiny"
    monkeypatch.chdir(folder)
    assert locate(".").name == "tiny"


def test_a_snapshot_of_the_hubs_cache_by_its_path(tmp_path):
    """Its files are links to blobs beside it, which is fine; its name is the hub id."""
    repo = tmp_path / "models--owner--tiny"
    snapshot = repo / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "blobs" / "1").write_text(json.dumps(CONFIG))
    save_file({"a": torch.ones(2)}, repo / "blobs" / "2")
    (snapshot / "config.json").symlink_to("../../blobs/1")
    (snapshot / "model.safetensors").symlink_to("../../blobs/2")
    found = locate(str(snapshot))
    assert (found.name, set(found.tensors())) == ("owner/tiny", {"a"})
    (tmp_path / "secret.json").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../../secret.json")
    with pytest.raises(FormatError, match="outside the model's folder"):
        locate(str(snapshot))


def test_tokenizer_folder(folder):
    assert locate_tokenizer(str(folder)) == folder
    with pytest.raises(CheckpointError, match="is not a folder"):
        locate_tokenizer(str(folder / "config.json"))


# -- errors ----------------------------------------------------------------------------------------------------------


NOWHERE = ["/no/such/model", "./none", "../none/x", "no/such/path", "model.gguf", "a b", "x\\y", "-flag", "~none/x"]


@pytest.mark.parametrize("name", NOWHERE)
def test_a_path_that_does_not_exist_is_not_taken_for_a_hub_id(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"no file or folder|cannot be read") as caught:
        locate(name)
    assert "hub is named OWNER/NAME" in str(caught.value) or "~" in name


@pytest.mark.parametrize("name", ["", "  ", "a\0b"])
def test_no_name_at_all(name):
    with pytest.raises(CheckpointError, match="not a name"):
        locate(name)


def test_very_long_name():
    with pytest.raises(CheckpointError) as caught:
        locate("/" + "x" * 10000)
    assert len(str(caught.value)) < 500


def test_a_revision_of_a_folder(folder):
    with pytest.raises(CheckpointError, match=r"has none.*Leave out --revision"):
        locate(str(folder), revision="main")
    with pytest.raises(
        CheckpointError, match=r"^A revision \('main'\) was given, but this is the demo model, which has none"
    ):
        locate(None, revision="main")


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "consolidated.00.pth"]
)
def test_pickles_are_refused_with_the_remedy(folder, name):
    (folder / name).write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(CheckpointError, match=r"pickled weights.*run code.*safetensors"):
        locate(str(folder))
    with pytest.raises(CheckpointError, match="pickled weights"):
        locate(str(folder / name))


def test_incomplete_folders(folder, tmp_path):
    with pytest.raises(CheckpointError, match="holds no model"):
        locate(str(folder))
    names = shards(folder)
    index(folder, {"t0": names[0], "t1": names[1]})
    (folder / names[1]).unlink()
    with pytest.raises(CheckpointError, match=f"incomplete: {names[1]} is missing"):
        locate(str(folder))
    (folder / "config.json").unlink()
    shards(folder)
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        locate(str(folder))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    save_file({"a": torch.ones(1)}, adapter / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="adapter"):
        locate(str(adapter))


def test_files_that_are_no_model(folder):
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"one file of a model.*Name its folder"):
        locate(str(folder / "model.safetensors"))
    with pytest.raises(CheckpointError, match=r"neither a folder nor a \.gguf file"):
        locate(str(folder / "config.json"))


@pytest.mark.parametrize("text", ["", "{", "[1]", "7", '{"a": ' + "[" * 100000, "\xff", '{"a": ' + "9" * 5000 + "}"])
def test_broken_config(folder, text):
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")
    (folder / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(FormatError, match=r"config\.json (is not valid JSON|does not hold a JSON object)"):
        locate(str(folder))


def test_types_that_cannot_be_read_are_named(folder, tmp_path):
    save_file({"a": torch.ones(4).to(torch.float8_e5m2)}, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="type F8_E5M2"):
        locate(str(folder)).tensors()
    tensors = decoder_tensors(blk__0__ffn_up__weight=random_blocks("IQ4_NL", (96, 64)))
    path = write_gguf(tmp_path / "m.gguf", decoder_metadata("llama"), tensors)
    with pytest.raises(UnsupportedModel, match=r"type IQ4_NL.*Supported: BF16"):
        locate(str(path))


def test_a_gguf_without_tensors(tmp_path):
    path = write_gguf(tmp_path / "vocab.gguf", decoder_metadata("llama"), {})
    with pytest.raises(CheckpointError, match="holds no tensors"):
        locate(str(path))


def test_no_python_of_a_model_runs(folder):
    """A config that names code, and the code beside it, change nothing."""
    trap = folder / "modeling_evil.py"
    trap.write_text("raise SystemExit('repository code ran')")
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")
    found = locate(str(folder))
    assert found.config["auto_map"]
    assert not (folder / "__pycache__").exists()


def test_the_demo_model_is_asked_as_its_card_says():
    """Its file has no sampling defaults, and at temperature 1 it wanders off."""
    assert locate(None).generation_config.items() >= {"temperature": 0.2, "top_p": 0.9}.items()

"""Filling a decoder: what is read, what is refused, and dummy weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.attention.registry import choose
from phalanx.checkpoint.locate import locate
from phalanx.distributed.collectives import Groups
from phalanx.distributed.mesh import Mesh
from phalanx.errors import CheckpointError
from phalanx.loading import loader
from phalanx.loading.tensors import TensorReader
from phalanx.models.registry import read_spec
from tests.helpers.decoders import decoder_of, random_ids
from tests.helpers.stepping import Driver
from tests.helpers.tiny_models import tiny_checkpoint


def changed(path: Path, target: Path, tensors: dict[str, torch.Tensor | None], **config: object) -> Path:
    """A copy of a checkpoint with other tensors (None removes one) and config values."""
    shutil.copytree(path, target, dirs_exist_ok=True)
    weights = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        weights.pop(name, None)
        if tensor is not None:
            weights[name] = tensor
    save_file(weights, target / "model.safetensors")
    settings = json.loads((path / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(settings))
    return target


def test_a_rank_reads_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of other ranks are not asked for: two ranks together ask for little more than the file holds."""
    readers: list[TensorReader] = []

    class Counting(TensorReader):
        def __init__(self) -> None:
            super().__init__()
            readers.append(self)

    monkeypatch.setattr(loader, "TensorReader", Counting)
    path = tiny_checkpoint("llama", tie_word_embeddings=False)
    decoder_of(path)
    whole = readers[0].bytes_read
    assert whole == read_spec(locate(str(path)).config).weight_bytes("float32")

    class Pair:
        size, rank = 2, 0

    for rank in range(2):
        decoder_of(path, mesh=Mesh(tp=2), rank=rank, groups=Groups(tp=Pair()))  # type: ignore[arg-type]
    shares = [reader.bytes_read for reader in readers[1:]]
    assert max(shares) < 0.75 * whole
    for stage in range(2):
        decoder_of(path, mesh=Mesh(pp=2), rank=stage)
    assert sum(reader.bytes_read for reader in readers[3:]) == whole


def test_progress_ends_at_one() -> None:
    seen: list[float] = []
    decoder_of(tiny_checkpoint("gpt2"), progress=seen.append)
    assert seen == sorted(seen) and seen[-1] == pytest.approx(1.0) and len(seen) > 10


def test_contradictions(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama")
    cases = {
        "too narrow": (
            {}, {"intermediate_size": 66},
            r"'model.layers.0.mlp.gate_proj.weight' has shape \[67, 45\].*\[66, 45\].*`intermediate_size`",
        ),
        "too many layers": ({}, {"num_hidden_layers": 3}, "not in the checkpoint: 'layers.2"),
        "too few layers": ({}, {"num_hidden_layers": 1}, "no weight 'layers.1.*model.layers.1"),
        "untied": ({}, {"tie_word_embeddings": False}, "no tensor 'lm_head.weight'"),
        "stranger": ({"model.visual.weight": torch.ones(2)}, {}, "no place in the model: 'visual.weight'"),
        "missing": ({"model.norm.weight": None}, {}, "no tensor 'norm.weight'"),
        "not a copy": (
            {"lm_head.weight": torch.ones(307, 45)}, {},
            "'lm_head.weight' is 'model.embed_tokens.weight'.*tie_word_embeddings",
        ),
    }  # fmt: skip
    for name, (tensors, config, message) in cases.items():
        broken = changed(path, tmp_path / name, tensors, **config)
        with pytest.raises(CheckpointError, match=message) as caught:
            decoder_of(broken)
        assert "\n" not in str(caught.value)


def test_harmless_extras(tmp_path: Path) -> None:
    """A true copy of a tied head, old rotary buffers and GPT-2's causal masks change nothing."""
    path = tiny_checkpoint("llama")
    table = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    extras = {"lm_head.weight": table.clone(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5)}
    assert decoder_of(changed(path, tmp_path / "llama", extras)).nbytes == decoder_of(path).nbytes
    gpt2 = tiny_checkpoint("gpt2")
    masks = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4),
        "transformer.h.1.attn.masked_bias": torch.tensor(-1e4),
    }
    decoder_of(changed(gpt2, tmp_path / "gpt2", masks))


def test_names_without_their_prefix(tmp_path: Path) -> None:
    """Published GPT-2 checkpoints have no `transformer.` in front."""
    path = tiny_checkpoint("gpt2")
    shutil.copytree(path, tmp_path / "bare")
    weights = {name.removeprefix("transformer."): t for name, t in load_file(path / "model.safetensors").items()}
    save_file(weights, tmp_path / "bare" / "model.safetensors")
    ids = random_ids(9)
    first, second = (Driver(decoder_of(p)) for p in (path, tmp_path / "bare"))
    assert torch.equal(first.prefill(first.stream(ids)), second.prefill(second.stream(ids)))


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt"])
def test_dummy_weights(family: str) -> None:
    """No checkpoint is touched, the same numbers come every time, and the model runs."""
    spec = read_spec(locate(str(tiny_checkpoint(family))).config)
    logits = []
    for _ in range(2):
        decoder = loader.load_decoder(
            None, spec, mesh=Mesh(), rank=0, groups=Groups(), dtype=torch.float32, device=torch.device("cpu"),
            backend=choose("cpu"), load_format="dummy",
        )  # fmt: skip
        driver = Driver(decoder)
        logits.append(driver.prefill(driver.stream(random_ids(7))))
    assert torch.equal(logits[0], logits[1]) and bool(logits[0].isfinite().all()) and logits[0].std() > 0

"""GPTQ, AWQ and compressed-tensors checkpoints in their published layouts, against the same weights as plain numbers:
what they compute, what each rank reads and holds, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.checkpoint.locate import locate, locate_config
from phalanx.checkpoint.quantized import QuantizedInfo
from phalanx.config import EngineConfig, ModelConfig
from phalanx.distributed.mesh import Mesh
from phalanx.errors import CheckpointError, ConfigError, FormatError
from phalanx.kernels.library import native
from phalanx.layers.linear import Linear
from phalanx.loading import loader
from phalanx.loading.image import NewImage, open_image
from phalanx.loading.tensors import TensorReader
from phalanx.models.decoder import Decoder
from phalanx.models.registry import read_spec
from phalanx.models.shares import weight_bytes
from phalanx.models.split import Split
from phalanx.models.stored import with_stored
from phalanx.planner.hardware import detect
from phalanx.planner.resolution import resolved
from phalanx.quantization.base import Unquantized, choose_scheme
from phalanx.worker.capacity import Gpu
from phalanx.worker.limits import Memory
from tests.helpers.decoders import decoder_of, random_ids
from tests.helpers.server import demo_checkpoint
from tests.helpers.split_decoders import split_outcomes
from tests.helpers.stepping import Driver
from tests.helpers.tiny_models import tiny_checkpoint
from tests.helpers.tiny_quantized import Quantised, quantised

CPU = torch.device("cpu")
IDS = random_ids(61, seed=2)
# Heads of 24, whose rows in the output matrix cut blocks and groups on two ranks and on three.
_CUT = {"hidden_size": 256, "head_dim": 24, "num_attention_heads": 8, "num_key_value_heads": 4,
        "intermediate_size": 512}  # fmt: skip
_WHOLE = _CUT | {"head_dim": 32}
_QWEN2 = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 512,
          "use_sliding_window": False}  # fmt: skip
_PHI3 = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 512}
_GPT2 = {"n_embd": 256, "n_head": 8, "n_inner": 512}

needs_native = pytest.mark.skipif(native() is None, reason="the native library was not built")


@dataclass(frozen=True)
class Case:
    family: str
    shape: dict[str, Any]
    how: Quantised


CASES = {
    "gptq": Case("llama", _CUT, Quantised("gptq", 128)),
    "gptq, groups of 32, zeros": Case("qwen2", _QWEN2, Quantised("gptq", 32, symmetric=False)),
    "gptq, whole rows": Case("mistral", _CUT, Quantised("gptq", -1, symmetric=False)),
    "gptq, of GPT-2": Case("gpt2", _GPT2, Quantised("gptq", 64)),
    "gptq_v2, fused matrices": Case("phi3", _PHI3, Quantised("gptq_v2", 64, symmetric=False)),
    "gptq, desc_act": Case("llama", _WHOLE, Quantised("gptq", 64, symmetric=False, ordered=True)),
    "gptq, desc_act, heads of 24": Case("qwen3", _CUT, Quantised("gptq", 32, ordered=True)),
    "awq": Case("llama", _CUT, Quantised("awq", 64, symmetric=False)),
    "w4a16": Case("qwen3", _WHOLE, Quantised("w4a16", 128)),
    "w4a16, channels, zeros": Case("llama-biased", _CUT, Quantised("w4a16", -1, symmetric=False)),
    "w4a16, actorder": Case("llama", _CUT, Quantised("w4a16", 64, symmetric=False, ordered=True)),
    "w8a8": Case("llama-biased", _CUT, Quantised("w8a8")),
}


@dataclass(frozen=True)
class Made:
    path: Path
    plain: Path
    how: Quantised


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    found: dict[str, Made] = {}

    def make(name: str) -> Made:
        if name not in found:
            case = CASES[name]
            path, plain = quantised(tiny_checkpoint(case.family, **case.shape), tmp_path_factory.mktemp("q"), case.how)
            found[name] = Made(path, plain, case.how)
        return found[name]

    return make


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, made: Callable[[str], Made]) -> Made:
    return made(request.param)


def packed(case: Made, dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    return decoder_of(case.path, dtype=dtype, scheme=choose_scheme(case.how.name, dtype, CPU), **options)


def logits_of(decoder: Decoder, ids: list[int] = IDS) -> torch.Tensor:
    driver = Driver(decoder, blocks=-(-len(ids) // 4) + 2)
    return driver.prefill(driver.stream(ids)).float()


def linears(decoder: Decoder) -> list[Linear]:
    return [layer for layer in decoder.loadables() if isinstance(layer, Linear)]


def test_expanded_it_is_the_plain_model(case: Made) -> None:
    """To the bit: the same weights, multiplied by the same code."""
    for scheme in (None, Unquantized()):
        expected = logits_of(decoder_of(case.plain, scheme=scheme))
        assert torch.equal(logits_of(decoder_of(case.path, scheme=scheme)), expected)


@needs_native
def test_each_product_is_within_its_bound(case: Made) -> None:
    """A half of the 254 steps that a block of 32 activations is rounded to, times the weights, and no more."""
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        whole = linears(decoder_of(case.plain, scheme=Unquantized()))
        for own, plain in zip(linears(packed(case, dtype)), whole, strict=True):
            weight, bias = plain.storage["weight"], plain.bias
            x = torch.randn(7, weight.shape[1]).to(dtype)
            found = own.context.scheme.apply(own.storage, x, own.bias, wide=True)
            exact = x.double() @ weight.double().T + (0 if bias is None else bias.to(dtype).double())
            bound = x.abs().amax(1, keepdim=True).double() / 254 * weight.abs().sum(1).double()
            assert ((found - exact).abs() <= bound * 1.001 + 1e-5 * bound.max()).all()
            assert not torch.equal(found.double(), exact), "it was not multiplied as integers"


@needs_native
def test_near_the_plain_model(case: Made) -> None:
    expected = logits_of(decoder_of(case.plain))
    for dtype, tolerance in ((torch.float32, 0.04), (torch.float16, 0.04), (torch.bfloat16, 0.06)):
        assert (logits_of(packed(case, dtype)) - expected).std() < tolerance * expected.std(), dtype


@needs_native
def test_what_is_held_is_little_more_than_the_file(case: Made) -> None:
    infos = [info for info in locate(str(case.path)).tensors().values() if isinstance(info, QuantizedInfo)]
    held = sum(layer.nbytes - (0 if layer.bias is None else layer.bias.nbytes) for layer in linears(packed(case)))
    assert held < (1.15 if case.how.group in (-1, 64, 128) else 1.25) * sum(info.nbytes for info in infos)


MESHES = {"1": (Mesh(), ()), "2": (Mesh(tp=2), ()), "3": (Mesh(tp=3), ()), "3:1": (Mesh(tp=2), ((3.0, 1.0),)),
          "2+1": (Mesh.of_widths((2, 1)), ())}  # fmt: skip


@needs_native
@pytest.mark.parametrize("mesh", MESHES)
def test_ranks_hold_their_shares_and_agree_with_one(case: Made, mesh: str) -> None:
    layout, weights = MESHES[mesh]
    checkpoint = locate(str(case.path))
    spec = with_stored(read_spec(checkpoint.config), checkpoint, case.how.name)
    scheme = choose_scheme(case.how.name, torch.float32, CPU)
    outcomes = split_outcomes(case.path, layout, IDS, scheme=scheme, tensor_weights=weights)
    whole = logits_of(packed(case))
    for rank, outcome in enumerate(outcomes):
        place = layout.place(rank)
        expected = weight_bytes(
            spec, layout, Split.of(spec, layout, place.pp, tensor_weights=weights), place, "float32"
        )  # fmt: skip
        if case.how.ordered and layout.widths[place.pp] > 1:  # how many blocks a rank needs, only its groups tell
            assert 0.5 * expected < outcome.decoder.nbytes <= expected
        else:
            assert outcome.decoder.nbytes == expected
        if outcome.logits is not None:  # where a last bit decides how an activation is rounded, layers let that grow
            assert (outcome.logits - whole).std() < 0.04 * whole.std()


@needs_native
@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 1.0, 1.0), (3.0, 1.0)])
def test_parts_of_a_product_are_the_product(case: Made, weights: tuple[float, ...]) -> None:
    """Rows of a column layer to the bit. Columns of a row layer to the order of the sum, where a rank begins and ends
    with a block of 32 activations; and else within the bound."""
    torch.manual_seed(1)
    scheme, mesh = choose_scheme(case.how.name, torch.float32, CPU), Mesh(tp=len(weights))
    outcomes = split_outcomes(case.path, mesh, IDS[:2], scheme=scheme, tensor_weights=[weights])
    plain = linears(decoder_of(case.plain, scheme=Unquantized()))
    for whole, numbers, *parts in zip(
        linears(packed(case)), plain, *(linears(outcome.decoder) for outcome in outcomes), strict=True
    ):
        weight = numbers.storage["weight"]
        x = torch.randn(5, weight.shape[1])
        expected = scheme.apply(whole.storage, x, None)
        total = torch.zeros_like(expected)
        for rank, part in enumerate(parts):
            start, stop = part.inputs.ranges[rank]
            found = scheme.apply(part.storage, x[:, start:stop].contiguous(), None)
            if part.inputs.is_whole:
                taken, first = [], 0
                for output in part.outputs:
                    taken += range(*(first + row for row in output.partition.ranges[rank]))
                    first += output.partition.size
                assert torch.equal(found, expected[:, taken])
            else:
                total += found
        if not parts[0].inputs.is_whole:
            cut = case.how.ordered or any(edge % 32 for edges in parts[0].inputs.ranges for edge in edges)
            bound = x.abs().amax(1, keepdim=True) / 127 * weight.abs().sum(1)
            assert ((total - expected).abs() <= (bound if cut else 1e-5 * bound.max())).all()


@pytest.mark.parametrize("name", ["gptq", "awq", "w4a16", "w8a8"])
def test_a_rank_reads_its_share(made: Callable[[str], Made], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[int, int] = {}
    original = TensorReader.close

    def close(reader: TensorReader) -> None:
        counts[id(reader)] = reader.bytes_read
        original(reader)

    kept: list[TensorReader] = []

    class Kept(TensorReader):
        def __init__(self) -> None:
            super().__init__()
            kept.append(self)

    monkeypatch.setattr(loader, "TensorReader", Kept)
    case = made(name)
    total = sum(info.nbytes for info in locate(str(case.path)).tensors().values())
    split_outcomes(case.path, Mesh(tp=2), IDS[:3], scheme=choose_scheme(case.how.name, torch.float32, CPU))
    shares = [reader.bytes_read / total for reader in kept]
    assert len(shares) == 2 and all(0.4 < share < 0.6 for share in shares), shares


@needs_native
@pytest.mark.parametrize("name", ["gptq", "gptq, desc_act", "w8a8"])
def test_a_request_depends_on_no_other(made: Callable[[str], Made], name: str) -> None:
    decoder = packed(made(name), torch.bfloat16)
    alone = logits_of(decoder)
    driver = Driver(decoder, blocks=64)
    streams = [driver.stream(ids) for ids in (random_ids(9, seed=5), IDS, random_ids(17, seed=6))]
    found = [driver.step(streams, counts)[1] for counts in ((4, 20, 1), (1, 1, 8), (1, 1, 1), (3, 39, 7))]
    assert torch.equal(torch.cat(found).float(), alone)


@needs_native
def test_who_replaces_a_rank_finds_the_same_weights(case: Made) -> None:
    """In the image that the rank has left: the integers, their places and the order of their inputs."""
    new = NewImage(1 << 22)
    first = packed(case, memory=new.memory)
    expected, fd = logits_of(first), new.seal("key", "", first.nbytes)
    assert fd is not None
    try:
        image = open_image(fd, "key")
        assert image is not None
        second = packed(case, memory=image.memory())
        assert second.nbytes == first.nbytes
        assert torch.equal(logits_of(second), expected)
    finally:
        os.close(fd)


@needs_native
def test_layers_that_were_left_out_stay_plain(tmp_path: Path) -> None:
    def left_out(name: str) -> bool:
        return "k_proj" in name or "layers.1.mlp" in name

    folder = tiny_checkpoint("llama", **_CUT)
    path, plain = quantised(folder, tmp_path, Quantised("awq", 64), left_out)
    made = Made(path, plain, Quantised("awq", 64))
    expected = logits_of(decoder_of(plain))
    assert torch.equal(logits_of(decoder_of(path)), expected)
    decoder = packed(made)
    assert (logits_of(decoder) - expected).std() < 0.04 * expected.std()
    plain_down, packed_down = linears(decoder)[-1], linears(decoder)[3]
    assert plain_down.nbytes == 256 * 512 * 4 > 5 * packed_down.nbytes


def _resolved(path: Path, device: str = "cpu", **model: Any) -> ModelConfig:
    config = EngineConfig(model=ModelConfig(model=str(path), device=device, **model))
    return resolved(config, locate(str(path))).model


def test_what_a_start_makes_of_it(made: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch) -> None:
    path = made("gptq").path
    if native() is not None:
        assert _resolved(path).quantization == "gptq"
        assert _resolved(path, quantization="GPTQ").quantization == "gptq"
        assert _resolved(made("w8a8").path).quantization == "compressed-tensors"
    assert _resolved(path, dtype="float32").quantization == "none"
    assert _resolved(path, load_format="dummy").quantization == "none"
    assert locate_config(str(path))[2] is not None and locate_config(str(made("gptq").plain))[2] is None
    for wrong in ("int8", "awq", "gguf"):
        with pytest.raises(ConfigError, match="none or gptq"):
            _resolved(path, quantization=wrong)
    monkeypatch.setattr("phalanx.planner.resolution.native", lambda: None)
    assert _resolved(path).quantization == "none"


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_gpu_that_is_not_there_is_not_said_to_compute(
    made: Callable[[str], Made], gpus: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine = dataclasses.replace(detect(), device="cpu")
    monkeypatch.setattr("phalanx.planner.resolution.detect", lambda: machine)
    monkeypatch.setattr("phalanx.worker.capacity.gpus", lambda: [Gpu("x", Memory(2**30, 2**30))] * gpus)
    assert _resolved(made("gptq").path, device="cuda").quantization == "none"
    assert ("not as gptq, on a GPU" in caplog.text) == bool(gpus)


def test_a_format_that_the_files_do_not_have_is_refused(made: Callable[[str], Made]) -> None:
    assert _resolved(made("gptq").plain, load_format="safetensors").quantization == "none"
    with pytest.raises(ConfigError, match=r"--load-format is safetensors, but .* is a GGUF file"):
        _resolved(demo_checkpoint().weight_files[0], load_format="safetensors")


# -- what is wrong with a checkpoint ----------------------------------------------------------------------------------


def changed(made: Made, out: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    shutil.copytree(made.path, out / "changed")
    tensors = load_file(made.path / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "changed" / "model.safetensors")
    return out / "changed"


def test_spare_biases_are_zero(made: Callable[[str], Made], tmp_path: Path) -> None:
    """Tools have written biases of zeros beside every GPTQ matrix."""
    case, name = made("gptq"), "model.layers.0.mlp.up_proj.bias"

    def add(value: float) -> Callable[[dict[str, torch.Tensor]], None]:
        return lambda tensors: tensors.__setitem__(name, torch.full((512,), value, dtype=torch.float16))

    expected = logits_of(decoder_of(case.path))
    assert torch.equal(logits_of(decoder_of(changed(case, tmp_path / "zero", add(0.0)))), expected)
    with pytest.raises(CheckpointError, match=r"up_proj\.bias', for which the model has no place"):
        decoder_of(changed(case, tmp_path / "one", add(1.0)))


def test_numbers_that_contradict_each_other(made: Callable[[str], Made], tmp_path: Path) -> None:
    def group(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.down_proj.g_idx"][5] = 8

    def shape(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.down_proj.weight_shape"][1] = 500

    with pytest.raises(FormatError, match=r"down_proj\.g_idx' names a group that there is not"):
        decoder_of(changed(made("gptq, desc_act"), tmp_path / "group", group))
    with pytest.raises(FormatError, match=r"weight_shape' is \[256, 500\], but the matrix is \[256, 512\]"):
        decoder_of(changed(made("w4a16"), tmp_path / "shape", shape))


def test_scales_of_other_types(made: Callable[[str], Made], tmp_path: Path) -> None:
    """bfloat16 is what compressed-tensors mostly has."""

    def rounded(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if name.endswith("weight_scale"):
                tensors[name] = tensors[name].bfloat16()

    case = made("w4a16")
    path = changed(case, tmp_path, rounded)
    twin = linears(decoder_of(path, scheme=Unquantized()))
    if native() is not None:
        for own, plain in zip(linears(packed(Made(path, case.plain, case.how))), twin, strict=True):
            ids = torch.arange(len(plain.storage["weight"]))
            assert torch.equal(own.context.scheme.look_up(own.storage, ids, None), plain.storage["weight"])
    config = json.loads((path / "config.json").read_text())
    assert config["quantization_config"]["format"] == "pack-quantized"

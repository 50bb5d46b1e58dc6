"""Models whose weights stay quantised, against the same weights as plain numbers in float32: what they compute, what
each rank holds, and that a request's numbers depend on no other request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from phalanx.checkpoint.locate import locate
from phalanx.distributed.mesh import Mesh
from phalanx.kernels.library import native
from phalanx.models.decoder import Decoder
from phalanx.models.registry import read_spec
from phalanx.models.shares import weight_bytes
from phalanx.models.split import Split
from phalanx.models.stored import with_stored
from phalanx.quantization.base import choose_scheme
from phalanx.text.tokenizer import load_tokenizer
from tests.helpers.decoders import decoder_of, random_ids
from tests.helpers.split_decoders import split_outcomes
from tests.helpers.stepping import Driver
from tests.helpers.tiny_gguf import to_gguf
from tests.helpers.tiny_models import tiny_checkpoint

if native() is None:
    pytest.skip("the native library was not built", allow_module_level=True)

CPU = torch.device("cpu")
IDS = random_ids(61, seed=2)
# Rows of whole blocks of 256 for K-quants; heads of 24, whose rows in the output matrix cut blocks on two ranks.
_WIDE = {"hidden_size": 256, "head_dim": 24, "num_attention_heads": 8, "num_key_value_heads": 4,
         "intermediate_size": 512}  # fmt: skip


def _demo_like(name: str) -> str:
    return "Q8_0" if name.startswith("token_embd") else "Q4_1"


def _each_different(name: str) -> str:
    """Query, key and value, gate and up of different types, some of them plain."""
    parts = {"attn_q": "Q4_K", "attn_k": "Q5_K", "attn_v": "Q6_K", "ffn_gate": "F16", "ffn_up": "Q4_0",
             "ffn_down": "Q6_K", "attn_output": "Q5_0", "token_embd": "Q6_K", "output": "Q5_1"}  # fmt: skip
    return next(kind for part, kind in parts.items() if part + "." in name)


CHECKPOINTS: dict[str, tuple[str, Callable[[str], str]]] = {
    "as the demo model": ("llama", _demo_like),
    "each different": ("mistral", _each_different),
    "Q5_0": ("qwen2", lambda name: "Q5_0"),
    "Q4_K": ("qwen3", lambda name: "Q4_K" if "token" not in name else "Q8_0"),
}


@pytest.fixture(scope="module", params=CHECKPOINTS)
def gguf(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, kinds = CHECKPOINTS[request.param]
    wide = _WIDE | ({"use_sliding_window": False} if family == "qwen2" else {})
    if request.param in ("each different", "Q4_K"):
        wide["head_dim"] = 32  # rows of the output matrix are whole blocks of 256
    folder = tiny_checkpoint(family, **wide)
    return to_gguf(folder, "F32", tmp_path_factory.mktemp("gguf"), kinds)[0]


def quantized(path: Path, name: str = "gguf", dtype: torch.dtype = torch.float32, **options: object) -> Decoder:
    return decoder_of(path, dtype=dtype, scheme=choose_scheme(name, dtype, CPU), **options)  # type: ignore[arg-type]


def logits_of(decoder: Decoder, ids: list[int] = IDS) -> torch.Tensor:
    driver = Driver(decoder, blocks=-(-len(ids) // 4) + 2)
    return driver.prefill(driver.stream(ids)).float()


def test_near_the_plain_model(gguf: Path) -> None:
    """Activations have 254 steps in each block of 32, and random layers let what that costs grow: about two hundredths
    of the logits' spread."""
    expected = logits_of(decoder_of(gguf))
    spread = expected.std()
    for dtype, tolerance in ((torch.float32, 0.04), (torch.float16, 0.04), (torch.bfloat16, 0.06)):
        error = (logits_of(quantized(gguf, dtype=dtype)) - expected).std()
        assert error < tolerance * spread, dtype
        assert error > 0, "it is the plain model"


def cross_entropy(logits: torch.Tensor, ids: list[int]) -> float:
    return float(F.cross_entropy(logits[:-1].double(), torch.tensor(ids[1:])))


def test_perplexity(gguf: Path) -> None:
    plain, packed = logits_of(decoder_of(gguf)), logits_of(quantized(gguf, dtype=torch.bfloat16))
    expected, found = (cross_entropy(logits / plain.std(), IDS) for logits in (plain, packed))
    assert abs(found - expected) < 0.01


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(tp=2), Mesh(tp=3), Mesh.of_widths((2, 1))], ids=["1", "2", "3", "2+1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_rank_holds_what_its_share_says(gguf: Path, mesh: Mesh, dtype: torch.dtype) -> None:
    checkpoint = locate(str(gguf))
    spec = with_stored(read_spec(checkpoint.config), checkpoint, "gguf")
    name = str(dtype).removeprefix("torch.")
    outcomes = split_outcomes(gguf, mesh, IDS[:5], scheme=choose_scheme("gguf", dtype, CPU), dtype=dtype)
    for rank, outcome in enumerate(outcomes):
        place = mesh.place(rank)
        split = Split.even(spec, mesh, place.pp)
        assert outcome.decoder.nbytes == weight_bytes(spec, mesh, split, place, name), rank
    if mesh.world_size == 1:
        plain = weight_bytes(read_spec(checkpoint.config), mesh, Split.even(spec, mesh), mesh.place(0), name)
        assert outcomes[0].decoder.nbytes < 0.75 * plain


@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(tp=3), Mesh.of_widths((2, 1))], ids=["2", "3", "2+1"])
def test_ranks_agree_with_one(gguf: Path, mesh: Mesh) -> None:
    """A block of activations that is cut by a head has a scale on each rank, so its rounding differs."""
    whole = logits_of(quantized(gguf))
    outcomes = split_outcomes(gguf, mesh, IDS, scheme=choose_scheme("gguf", torch.float32, CPU))
    for outcome in outcomes:
        if outcome.logits is not None:
            assert (outcome.logits - whole).std() < 0.04 * whole.std()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_request_depends_on_no_other(gguf: Path, dtype: torch.dtype) -> None:
    """The same logits to the last bit: alone, in pieces, and beside others."""
    decoder = quantized(gguf, dtype=dtype)
    alone = logits_of(decoder)
    driver = Driver(decoder, blocks=64)
    streams = [driver.stream(ids) for ids in (random_ids(9, seed=5), IDS, random_ids(17, seed=6))]
    found = [driver.step(streams, counts)[1] for counts in ((4, 20, 1), (1, 1, 8), (1, 1, 1), (3, 39, 7))]
    assert torch.equal(torch.cat(found).float(), alone)


@pytest.mark.parametrize("family", ["llama", "llama-biased", "gpt2", "opt", "gemma2", "phi3"])
def test_int8_made_while_loading(family: str) -> None:
    path = tiny_checkpoint(family)
    expected = logits_of(decoder_of(path))
    checkpoint, mesh = locate(str(path)), Mesh()
    spec = with_stored(read_spec(checkpoint.config), checkpoint, "int8")
    for dtype in (torch.float32, torch.bfloat16):
        decoder = quantized(path, "int8", dtype)
        name = str(dtype).removeprefix("torch.")
        assert decoder.nbytes == weight_bytes(spec, mesh, Split.even(spec, mesh), mesh.place(0), name)
        assert (logits_of(decoder) - expected).std() < 0.08 * expected.std(), dtype


def test_int8_over_ranks() -> None:
    path = tiny_checkpoint("llama")
    whole = logits_of(quantized(path, "int8"))
    checkpoint = locate(str(path))
    spec = with_stored(read_spec(checkpoint.config), checkpoint, "int8")
    for mesh in (Mesh(tp=2), Mesh(tp=3), Mesh(pp=2)):
        outcomes = split_outcomes(path, mesh, IDS, scheme=choose_scheme("int8", torch.float32, CPU))
        for rank, outcome in enumerate(outcomes):
            split, place = Split.even(spec, mesh, mesh.place(rank).pp), mesh.place(rank)
            assert outcome.decoder.nbytes == weight_bytes(spec, mesh, split, place, "float32")
            if outcome.logits is not None:
                assert (outcome.logits - whole).std() < 0.08 * whole.std()


TEXTS = Path(__file__).parents[1] / "fixtures/texts"


@pytest.mark.slow
def test_perplexity_of_the_demo_model() -> None:
    """Within 1 % of the same weights as plain numbers in float32, over prose, a letter, a dialogue, tables, code."""
    checkpoint = locate(None)
    path, tokenizer = checkpoint.weight_files[0], load_tokenizer(checkpoint)
    texts = [tokenizer.encode(file.read_text()) for file in sorted(TEXTS.glob("*.txt"))]
    count = sum(len(ids) - 1 for ids in texts)
    assert count > 2000

    def entropy(decoder: Decoder) -> float:
        return sum(cross_entropy(logits_of(decoder, ids), ids) * (len(ids) - 1) for ids in texts) / count

    expected = entropy(decoder_of(path))
    assert 1.5 < expected < 4.0, "the texts are not what the model is good at"
    for dtype in (torch.float32, torch.bfloat16):
        found = entropy(quantized(path, dtype=dtype))
        assert abs(found - expected) < 0.01, (dtype, expected, found)

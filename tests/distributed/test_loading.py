"""A rank asks for its share of a checkpoint only, counted in bytes over all ranks; and what it gets is right."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from phalanx.attention.registry import choose
from phalanx.checkpoint.gguf_header import read_gguf
from phalanx.checkpoint.locate import Checkpoint, locate
from phalanx.checkpoint.safetensors_header import read_headers
from phalanx.distributed.collectives import Groups, SingleGroup
from phalanx.distributed.mesh import Mesh
from phalanx.loading import loader
from phalanx.loading.gguf_blocks import FORMATS, dequantize
from phalanx.loading.tensors import TensorReader
from phalanx.models.registry import read_spec
from phalanx.models.split import Split
from tests.helpers.gguf_files import random_blocks, write_gguf
from tests.helpers.tiny_models import tiny_checkpoint


class Silent(SingleGroup):
    """For building shards that never talk."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> list[TensorReader]:
    opened: list[TensorReader] = []

    class Kept(TensorReader):
        def __init__(self) -> None:
            super().__init__()
            opened.append(self)

    monkeypatch.setattr(loader, "TensorReader", Kept)
    return opened


def shares(checkpoint: Checkpoint, mesh: Mesh, readers: list[TensorReader], **split) -> list[float]:
    """Per rank, the bytes asked for as a part of the checkpoint's tensors."""
    spec, total = read_spec(checkpoint.config), sum(info.nbytes for info in checkpoint.tensors().values())
    readers.clear()
    for rank in range(mesh.world_size):
        place = mesh.place(rank)
        width = mesh.widths[place.pp]
        loader.load_decoder(
            checkpoint, spec, mesh=mesh, rank=rank, dtype=torch.bfloat16, device=torch.device("cpu"),
            groups=Groups(tp=Silent(place.tp, width)) if width > 1 else Groups(), backend=choose("cpu"),
            split=Split.of(spec, mesh, place.pp, **split),
        )  # fmt: skip
    return [reader.bytes_read / total for reader in readers]


DEMO = {"tp2": Mesh(tp=2), "tp3": Mesh(tp=3), "tp7": Mesh(tp=7), "pp2": Mesh(pp=2)}


@pytest.mark.parametrize("mesh", DEMO.values(), ids=DEMO)
def test_the_demo_model(mesh: Mesh, readers: list[TensorReader]) -> None:
    """Its Q4_1 blocks of 32 lie along rows, and heads of 64 cut none. The tied table is on two stages."""
    checkpoint = locate(None)
    tensors = checkpoint.tensors()
    table = tensors["token_embd.weight"].nbytes / sum(info.nbytes for info in tensors.values())
    parts = shares(checkpoint, mesh, readers)
    twice = table if mesh.pp > 1 else 0.0
    assert 1 <= sum(parts) - twice < 1.1
    if mesh.pp == 1:
        assert max(parts) < 1.1 / mesh.tp + 0.02


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in safetensors with enough width for shares to be shares; untied, 9 heads on 3."""
    return tiny_checkpoint(
        "llama", hidden_size=180, num_attention_heads=9, num_key_value_heads=3, head_dim=20, intermediate_size=480,
        tie_word_embeddings=False,
    )  # fmt: skip


@pytest.mark.parametrize("mesh", [*DEMO.values(), Mesh(tp=3, pp=2), Mesh.of_widths((2, 1))], ids=[*DEMO, "3x2", "2+1"])
def test_safetensors(wide: Path, mesh: Mesh, readers: list[TensorReader]) -> None:
    assert 1 <= sum(shares(locate(str(wide)), mesh, readers)) < 1.1


def test_unequal_shares_are_read_unequally(wide: Path, readers: list[TensorReader]) -> None:
    first, second = shares(locate(str(wide)), Mesh(tp=2), readers, tensor_weights=[(3.0, 1.0)])
    assert first + second < 1.1 and first == pytest.approx(0.75, abs=0.03)


def test_matrices_that_are_stored_turned(readers: list[TensorReader]) -> None:
    """GPT-2's are [inputs, outputs]: our rows are columns of the file, and our columns its rows."""
    path = tiny_checkpoint("gpt2", n_embd=120, n_head=6, n_inner=480, n_positions=16)
    for mesh in (Mesh(tp=2), Mesh(tp=3)):
        assert sum(shares(locate(str(path)), mesh, readers)) < 1.1


# -- the reader


COLUMNS = [(0, 256), (256, 512), (37, 300), (511, 512), (0, 512), (100, 100)]


@pytest.mark.parametrize("kind", [*FORMATS, "F16", "BF16", "F32"])
def test_columns_of_gguf_tensors(tmp_path: Path, kind: str) -> None:
    """Exactly the whole's columns; bytes are those of the blocks that they lie in."""
    raw = random_blocks(kind, (6, 512))
    info = read_gguf(write_gguf(tmp_path / "m.gguf", {}, {"x": raw})).tensors["x"]
    whole = dequantize(torch.frombuffer(bytearray(raw.data), dtype=torch.uint8), kind, raw.shape)
    block = FORMATS.get(kind)
    elements = 1 if block is None else block.elements
    with TensorReader() as reader:
        for start, stop in COLUMNS:
            reader.bytes_read = 0
            part = reader.read(info, (2, 5), torch.float32, columns=(start, stop))
            torch.testing.assert_close(part, whole[2:5, start:stop], rtol=0, atol=0, equal_nan=True)
            blocks = -(-stop // elements) - start // elements if stop > start else 0
            assert reader.bytes_read == 3 * blocks * info.nbytes * elements // (6 * 512)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return tmp_path / "m.safetensors"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64])
def test_columns_of_plain_tensors(stored: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(70).view(7, 10).to(dtype)
    save_file({"x": tensor}, stored)
    info = read_headers([stored])["x"]
    with TensorReader() as reader:
        for rows, columns in (((0, 7), (0, 3)), ((2, 5), (4, 10)), ((3, 3), (1, 2)), ((1, 2), (5, 5))):
            reader.bytes_read = 0
            part = reader.read(info, rows, columns=columns)
            assert torch.equal(part, tensor[slice(*rows), slice(*columns)]) and part.dtype == dtype
            assert reader.bytes_read == part.numel() * dtype.itemsize
        assert torch.equal(reader.read(info, columns=(2, 4)), tensor[:, 2:4])


def test_columns_of_a_tensor_that_is_not_aligned(stored: Path) -> None:
    """The format promises no alignment of the tensors among themselves."""
    header = {
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F32", "shape": [2, 3], "data_offsets": [3, 27]},
    }
    values = np.arange(6, dtype=np.float32)
    head = json.dumps(header).encode()
    stored.write_bytes(len(head).to_bytes(8, "little") + head + b"abc" + values.tobytes())
    with TensorReader() as reader:
        assert reader.read(read_headers([stored])["b"], columns=(1, 3)).tolist() == [[1, 2], [4, 5]]


@pytest.mark.parametrize("columns", [(-1, 2), (0, 11), (3, 2)])
def test_columns_that_do_not_exist(stored: Path, columns: tuple[int, int]) -> None:
    save_file({"x": torch.ones(5, 10), "v": torch.ones(10)}, stored)
    infos = read_headers([stored])
    with TensorReader() as reader:
        with pytest.raises(ValueError, match="has no columns"):
            reader.read(infos["x"], columns=columns)
        with pytest.raises(ValueError, match="has no columns"):
            reader.read(infos["v"], columns=(0, 3))


def test_readers_on_a_node_share_the_files_pages(stored: Path) -> None:
    """What is read stays the page cache's: mapped, not copied into each rank's own memory."""
    if not Path("/proc/self/smaps").exists():
        pytest.skip("needs /proc")
    save_file({"x": torch.ones(2048, 1024)}, stored)
    with TensorReader() as reader:
        x = reader.read(read_headers([stored])["x"], (0, 1024), columns=(0, 512))
        assert float(x.sum()) == 1024 * 512
        text = Path("/proc/self/smaps").read_text()
        entry = text[text.index(str(stored)) :].split("\n", 30)
        own = {line.split(":")[0]: int(line.split()[1]) for line in entry[1:24] if line.endswith("kB")}
    assert own["Rss"] >= 2048 and own["Anonymous"] == 0

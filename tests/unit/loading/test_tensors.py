"""Tensors come out of files whole or by rows, and only the bytes asked for are read."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from phalanx.checkpoint.gguf_header import read_gguf
from phalanx.checkpoint.safetensors_header import read_headers
from phalanx.checkpoint.tensor_info import PLAIN_TYPES, TensorInfo
from phalanx.errors import CheckpointError, FormatError, UnsupportedModel
from phalanx.loading.gguf_blocks import FORMATS, dequantize
from phalanx.loading.tensors import DTYPES, TensorReader
from tests.helpers.gguf_files import random_blocks, write_gguf

PLAIN = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
         torch.uint8, torch.bool]  # fmt: skip


@pytest.fixture
def reader():
    with TensorReader() as opened:
        yield opened


@pytest.fixture
def stored(tmp_path):
    def save(**tensors):
        save_file(tensors, tmp_path / "m.safetensors")
        return read_headers([tmp_path / "m.safetensors"])

    return save


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_plain_types_whole_and_by_rows(stored, reader, dtype):
    tensor = torch.arange(60).view(5, 4, 3).to(dtype)
    info = stored(x=tensor)["x"]
    assert torch.equal(reader.read(info), tensor)
    assert reader.bytes_read == info.nbytes
    for start, stop in [(0, 5), (1, 3), (4, 5), (2, 2), (5, 5)]:
        reader.bytes_read = 0
        assert torch.equal(reader.read(info, rows=(start, stop)), tensor[start:stop])
        assert reader.bytes_read == (stop - start) * info.nbytes // 5
    assert reader.read(info, dtype=torch.float32).dtype == torch.float32
    assert torch.equal(reader.read(info, dtype=torch.float32), tensor.float())


@pytest.mark.parametrize("kind", [*FORMATS, "F16", "BF16", "F32"])
def test_gguf_types_whole_and_by_rows(tmp_path, reader, kind):
    raw = random_blocks(kind, (6, 3, 256))
    info = read_gguf(write_gguf(tmp_path / "m.gguf", {}, {"x": raw})).tensors["x"]
    whole = dequantize(torch.frombuffer(bytearray(raw.data), dtype=torch.uint8), kind, raw.shape)
    same = {"equal_nan": True, "rtol": 0, "atol": 0}
    assert torch.allclose(reader.read(info).float(), whole, **same)
    reader.bytes_read = 0
    assert torch.allclose(reader.read(info, rows=(2, 5)).float(), whole[2:5], **same)
    assert reader.bytes_read == info.nbytes // 2
    part = reader.read(info, rows=(1, 2), dtype=torch.bfloat16)
    assert part.dtype == torch.bfloat16
    assert torch.allclose(part, whole[1:2].bfloat16(), **same)


def test_scalars_and_empty_tensors(stored, reader):
    infos = stored(scalar=torch.tensor(3.5), empty=torch.ones(0, 4), none=torch.ones(3, 0, dtype=torch.bfloat16))
    assert reader.read(infos["scalar"]).item() == 3.5
    assert reader.read(infos["empty"]).shape == (0, 4)
    assert reader.read(infos["empty"], rows=(0, 0)).shape == (0, 4)
    assert reader.read(infos["none"]).shape == (3, 0)
    assert reader.read(infos["none"]).dtype == torch.bfloat16


def test_a_tensor_that_is_not_aligned(tmp_path, reader):
    """The format promises no alignment of the tensors among themselves."""
    header = (
        b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"F32","shape":[2],"data_offsets":[3,11]}}'
    )
    values = np.array([1.5, -2.5], np.float32)
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"abc" + values.tobytes())
    assert reader.read(read_headers([path])["b"]).tolist() == [1.5, -2.5]


@pytest.mark.parametrize("rows", [(-1, 2), (0, 6), (3, 2), (6, 6)])
def test_rows_that_do_not_exist(stored, reader, rows):
    with pytest.raises(ValueError, match="has no rows"):
        reader.read(stored(x=torch.ones(5, 2))["x"], rows=rows)


def test_one_row_of_blocks_cannot_be_cut(tmp_path, reader):
    info = read_gguf(write_gguf(tmp_path / "m.gguf", {}, {"x": random_blocks("Q8_0", (64,))})).tensors["x"]
    with pytest.raises(ValueError, match="cannot be cut"):
        reader.read(info, rows=(0, 32))


def test_tensors_outlive_the_reader_and_files_stay_unchanged(stored):
    """In a process of its own: a mistake here would be a crash, not a failed check."""
    info = stored(x=torch.arange(4096, dtype=torch.float32))["x"]
    before = info.file.read_bytes()
    code = f"""
import gc, torch
from pathlib import Path
from phalanx.checkpoint.safetensors_header import read_headers
from phalanx.loading.tensors import TensorReader
path = Path({str(info.file)!r})
with TensorReader() as reader:
    x = reader.read(read_headers([path])["x"])
del reader
gc.collect()
assert torch.equal(x, torch.arange(4096, dtype=torch.float32))
x.zero_()
assert path.name in open("/proc/self/maps").read()
del x
gc.collect()
assert path.name not in open("/proc/self/maps").read()
"""
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc")
    subprocess.run([sys.executable, "-c", code], check=True)
    assert info.file.read_bytes() == before


def test_no_warning_is_printed(stored, reader, recwarn):
    reader.read(stored(x=torch.ones(5))["x"])
    assert not recwarn.list


def test_files_that_changed_or_went_away(stored, reader):
    info = stored(x=torch.ones(1000))["x"]
    info.file.write_bytes(info.file.read_bytes()[:-4])
    with pytest.raises(FormatError, match="has become shorter"):
        reader.read(info)
    info.file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot be read"):
        TensorReader().read(info)
    info.file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        TensorReader().read(info)


def test_types_that_cannot_be_read(reader):
    with pytest.raises(UnsupportedModel, match="IQ4_NL"):
        reader.read(TensorInfo("x", "IQ4_NL", (32,), Path("m.gguf"), 0, 18))


def test_types_are_those_that_the_checkpoint_layer_lets_through():
    assert set(DTYPES) == PLAIN_TYPES


MEMORY = """
import sys, torch
from pathlib import Path
from phalanx.checkpoint.gguf_header import read_gguf
from phalanx.checkpoint.safetensors_header import read_headers
from phalanx.loading.tensors import TensorReader
torch.set_num_threads(1)
path = Path(sys.argv[1])
info = (read_gguf(path).tensors if path.suffix == ".gguf" else read_headers([path]))["x"]
rows = (int(sys.argv[2]), int(sys.argv[3])) if len(sys.argv) > 2 else None
def peak():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before = peak()
with TensorReader() as reader:
    x = reader.read(info, rows=rows, dtype=torch.bfloat16)
print(peak() - before)
"""


def peak_growth(path, rows):
    """Most memory beyond what a process had before it read those rows as bfloat16, file pages included."""
    command = [sys.executable, "-c", MEMORY, str(path), *map(str, rows or ())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measures as Linux counts")
def test_memory_follows_what_is_asked_for(tmp_path):
    """64 MB of float32 and 34 MB of Q8_0 on disk, each 32 MB as bfloat16 (and 64 MB if a float32 copy were made)."""
    plain = tmp_path / "m.safetensors"
    save_file({"x": torch.zeros(16384, 1024)}, plain)
    blocks = write_gguf(tmp_path / "m.gguf", {}, {"x": random_blocks("Q8_0", (16384, 1024))})
    assert peak_growth(plain, (100, 164)) < 10e6
    assert peak_growth(blocks, (100, 164)) < 10e6
    assert peak_growth(blocks, None) < 34e6 + 32e6 + 15e6

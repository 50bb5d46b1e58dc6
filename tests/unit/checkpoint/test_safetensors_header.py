"""Valid safetensors files, written by the safetensors library. Broken ones: tests/security/test_files.py."""

import pytest
import torch
from safetensors.torch import save_file

from phalanx.checkpoint.safetensors_header import read_headers
from phalanx.errors import CheckpointError, FormatError

TENSORS = {
    "f32": torch.arange(6, dtype=torch.float32).view(2, 3),
    "bf16": torch.ones(3, 1, 5, dtype=torch.bfloat16),
    "f16": torch.ones(7, dtype=torch.float16),
    "f64": torch.ones(1, dtype=torch.float64),
    "i64": torch.tensor(5),
    "bool": torch.tensor([True, False, True]),
    "f8": torch.ones(4).to(torch.float8_e4m3fn),
    "empty": torch.ones(0, 4),
}
NAMES = {"f32": "F32", "bf16": "BF16", "f16": "F16", "f64": "F64", "i64": "I64", "bool": "BOOL", "f8": "F8_E4M3",
         "empty": "F32"}  # fmt: skip


def test_names_types_shapes_and_bytes(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    infos = read_headers([path])
    assert set(infos) == set(TENSORS)
    raw = path.read_bytes()
    for name, tensor in TENSORS.items():
        info = infos[name]
        assert (info.dtype, info.shape, info.file) == (NAMES[name], tuple(tensor.shape), path)
        stored = raw[info.offset : info.offset + info.nbytes]
        assert stored == tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_several_files_are_one_checkpoint(tmp_path):
    one, two = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    save_file({"a": torch.ones(2)}, one)
    save_file({"b": torch.ones(3)}, two)
    infos = read_headers([one, two])
    assert {name: info.file for name, info in infos.items()} == {"a": one, "b": two}
    save_file({"a": torch.ones(3)}, two)
    with pytest.raises(FormatError, match="'a' is in both"):
        read_headers([one, two])


def test_file_problems_have_one_clear_line(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        read_headers([tmp_path / "nothing.safetensors"])
    (tmp_path / "lfs.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(FormatError, match="Git LFS pointer"):
        read_headers([tmp_path / "lfs.safetensors"])

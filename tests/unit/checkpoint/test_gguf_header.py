"""Valid GGUF files, read by us and by the `gguf` library. Broken ones: tests/security/test_files.py."""

import os
import time

import gguf
import numpy as np
import pytest

from phalanx.checkpoint.gguf_header import GGML_TYPES, read_gguf
from phalanx.checkpoint.locate import locate
from phalanx.errors import CheckpointError, FormatError, UnsupportedModel
from tests.helpers.gguf_files import (
    F64,
    I8,
    I64,
    U64,
    Typed,
    decoder_metadata,
    decoder_tensors,
    random_blocks,
    start,
    write_gguf,
)

EVERY_KIND = {
    "general.architecture": "llama",
    "a.bool": True,
    "a.int": 7,
    "a.i8": Typed(I8, -5),
    "a.i64": Typed(I64, -(2**40)),
    "a.u64": Typed(U64, 2**63 + 1),
    "a.f64": Typed(F64, 0.1),
    "a.float": 0.5,
    "a.text": "Straße 中文 🙂",
    "a.empty": "",
    "list.text": ["a", "", "中文"],
    "list.int": [3, 1, 2],
    "list.i8": Typed(I8, [-1, 0, 1]),
    "list.bool": [True, False],
    "list.float": [0.25, -1.5],
    "list.none": [],
    "list.lists": [[1, 2], [3]],
}


def library(path):
    reader = gguf.GGUFReader(path)
    tensors = {
        t.name: (t.tensor_type.name, tuple(t.shape.tolist())[::-1], int(t.data_offset), int(t.n_bytes))
        for t in reader.tensors
    }
    metadata = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return metadata, tensors


def ours(path):
    file = read_gguf(path)
    return file.metadata, {t.name: (t.dtype, t.shape, t.offset, t.nbytes) for t in file.tensors.values()}


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [None, 8, 32, 256])
def test_reads_what_the_gguf_library_reads(tmp_path, version, alignment):
    tensors = {"a": np.ones(3, np.float32), "b": random_blocks("Q6_K", (5, 2, 256)), "c": np.zeros((2, 3, 4, 5))}
    metadata = {key: item for key, item in EVERY_KIND.items() if key not in ("list.none", "list.lists")}
    path = write_gguf(tmp_path / "m.gguf", metadata, tensors, version=version, alignment=alignment)
    assert ours(path) == library(path)
    assert ours(path)[1]["c"][1] == (2, 3, 4, 5)


def test_every_kind_of_value_arrives(tmp_path):
    metadata = read_gguf(write_gguf(tmp_path / "m.gguf", EVERY_KIND, {})).metadata
    expected = {key: item.value if isinstance(item, Typed) else item for key, item in EVERY_KIND.items()}
    assert metadata == expected
    assert [type(item) for item in metadata["list.bool"]] == [bool, bool]


def test_demo_model_equals_the_library_and_is_quick():
    path = locate(None).gguf.path
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        read_gguf(path)
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.3
    assert ours(path) == library(path)


def test_the_types_are_the_librarys():
    known = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert known == GGML_TYPES


def test_file_problems_have_one_clear_line(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        read_gguf(tmp_path / "nothing.gguf")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_gguf(tmp_path)
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_gguf(tmp_path / "pipe.gguf")
    (tmp_path / "lfs.gguf").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 98362432\n")
    with pytest.raises(FormatError, match="Git LFS pointer"):
        read_gguf(tmp_path / "lfs.gguf")
    (tmp_path / "zip.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(FormatError, match="not begin with the letters GGUF"):
        read_gguf(tmp_path / "zip.gguf")


def test_other_kinds_of_gguf_are_refused_in_clear_words(tmp_path):
    big = tmp_path / "big.gguf"
    big.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(16))
    with pytest.raises(FormatError, match="big-endian"):
        read_gguf(big)
    old = tmp_path / "old.gguf"
    old.write_bytes(start(0, 0, version=1))
    with pytest.raises(FormatError, match="version 1"):
        read_gguf(old)
    tensors = decoder_tensors()
    with pytest.raises(UnsupportedModel, match="one of 3 parts"):
        read_gguf(write_gguf(tmp_path / "m-00001-of-00003.gguf", decoder_metadata("llama"), tensors))
    with pytest.raises(UnsupportedModel, match="one of 2 parts"):
        read_gguf(write_gguf(tmp_path / "m.gguf", decoder_metadata("llama") | {"split.count": 2}, tensors))
    read_gguf(write_gguf(tmp_path / "m-00001-of-00001.gguf", decoder_metadata("llama"), tensors))

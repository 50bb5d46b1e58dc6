"""Model files that lie or are broken: GGUF (SEC-21), safetensors and their index (SEC-22), cache files (SEC-25; more in
tests/unit/checkpoint/test_demo.py). Only our own errors may come out, and memory stays in proportion to the file."""

import json
import math
import struct
import tracemalloc

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from phalanx.checkpoint.gguf_config import generation_config, hf_config
from phalanx.checkpoint.gguf_header import read_gguf
from phalanx.checkpoint.locate import locate
from phalanx.checkpoint.safetensors_header import read_headers
from phalanx.errors import CheckpointError, FormatError, UnsupportedModel
from phalanx.loading.tensors import TensorReader
from tests.helpers.gguf_files import (
    ARRAY,
    F32,
    STRING,
    U8,
    U32,
    decoder_metadata,
    decoder_tensors,
    gguf_bytes,
    padded,
    pair,
    start,
    string,
    tensor_record,
)

HUGE = [2**31, 2**32 - 1, 2**40, 2**61, 2**63 - 1, 2**63, 2**64 - 1]
BYTES_PER_BYTE = 16
"""How much memory a header may take for each byte of its file."""


def array(kind, count, body=b""):
    return string("list") + struct.pack("<IIQ", ARRAY, kind, count) + body


def one_tensor(*, name="x", kind=0, extents=(8,), offset=0, data=bytes(32)):
    return padded(start(1, 0) + tensor_record(name, kind, extents, offset)) + data


def two_tensors(second_offset):
    head = start(2, 0) + tensor_record("a", 0, (8,), 0) + tensor_record("b", 0, (8,), second_offset)
    return padded(head) + bytes(64)


def with_alignment(value, kind=U32):
    body = struct.pack("<I", kind) + (struct.pack("<I", value) if kind == U32 else string("32"))
    return padded(start(1, 1) + string("general.alignment") + body + tensor_record("x", 0, (8,), 0)) + bytes(64)


def nested(depth):
    body = struct.pack("<IQ", U32, 0)
    for _ in range(depth):
        body = struct.pack("<IQ", ARRAY, 1) + body
    return start(0, 1) + string("list") + struct.pack("<I", ARRAY) + body


BROKEN_GGUF = {
    "nothing": b"",
    "magic alone": b"GGUF",
    "another format": b"\x80\x04" + bytes(64),
    "version 0": start(0, 0, version=0),
    "version 4": start(0, 0, version=4),
    "ends in the counts": start(0, 0)[:20],
    "ends in a key": start(0, 1) + struct.pack("<Q", 5) + b"ab",
    "ends in a value": start(0, 1) + string("a") + struct.pack("<I", U32) + b"\0\0",
    "ends in a string array": start(0, 1) + array(STRING, 2, string("abc") + b"\1\0\0\0"),
    "key that is not UTF-8": start(0, 1) + pair(b"\xff\xfe", 1),
    "value that is not UTF-8": start(0, 1) + pair("a", b"\xff\xfe"),
    "array string that is not UTF-8": start(0, 1) + array(STRING, 1, string(b"\xff\xfe")),
    "key of 70000 bytes": start(0, 1) + pair("a" * 70000, 1),
    "key twice": start(0, 2) + pair("a", 1) + pair("a", 2),
    "unknown value type": start(0, 1) + string("a") + struct.pack("<I", 99) + bytes(8),
    "unknown element type": start(0, 1) + array(99, 1, bytes(8)),
    "array nested 5 deep": nested(4),
    "array nested 100000 deep": nested(100000),
    "alignment 0": with_alignment(0),
    "alignment 3": with_alignment(3),
    "alignment 2^31": with_alignment(2**31),
    "alignment that is text": with_alignment(0, STRING),
    "no dimensions": one_tensor(extents=()),
    "5 dimensions": one_tensor(extents=(1, 1, 1, 1, 8)),
    "empty dimension": one_tensor(extents=(8, 0)),
    "product above 2^64": one_tensor(extents=(2**32, 2**32, 2, 1)),
    "product that wraps to 8": one_tensor(extents=(2**63, 2, 1, 8)),
    "product that wraps to 0": one_tensor(extents=(2**32, 2**32)),
    "row that is no multiple of a block": one_tensor(kind=2, extents=(33,)),
    "row that is no multiple, product is": one_tensor(kind=2, extents=(8, 4)),
    "unknown tensor type": one_tensor(kind=77),
    "removed tensor type": one_tensor(kind=4),
    "offset that is not aligned": one_tensor(offset=8, data=bytes(64)),
    "offset past the end": one_tensor(offset=64),
    "end past the end": one_tensor(extents=(9,)),
    "offset that wraps": one_tensor(offset=2**64 - 32),
    "same tensor name twice": padded(start(2, 0) + 2 * tensor_record("x", 0, (8,), 0)) + bytes(32),
    "tensors at one place": two_tensors(0),
    "tensor name that is not UTF-8": one_tensor(name=b"\xff"),
    "no data": start(1, 0) + tensor_record("x", 0, (8,), 0),
    **{f"{n} metadata entries": start(0, n) + pair("a", 1) for n in HUGE},
    **{f"{n} tensors": start(n, 0) + bytes(64) for n in HUGE},
    **{f"key of {n} bytes": start(0, 1) + struct.pack("<Q", n) + b"a" for n in HUGE},
    **{f"string of {n} bytes": start(0, 1) + string("a") + struct.pack("<IQ", STRING, n) + b"a" for n in HUGE},
    **{f"array of {n} bytes": start(0, 1) + array(U8, n, b"a") for n in HUGE},
    **{f"array of {n} strings": start(0, 1) + array(STRING, n, string("a")) for n in HUGE},
    **{f"array of {n} arrays": start(0, 1) + array(ARRAY, n, struct.pack("<IQ", U8, 0)) for n in HUGE},
    **{f"string of {n} bytes in an array": start(0, 1) + array(STRING, 1, struct.pack("<Q", n)) for n in HUGE},
    **{f"dimension of {n}": one_tensor(extents=(n,)) for n in HUGE},
    **{f"offset of {n}": one_tensor(offset=n) for n in HUGE},
}


def measured(call, *arguments):
    """The error that comes out, if any, and the most memory Python held meanwhile."""
    tracemalloc.start()
    try:
        call(*arguments)
        error = None
    except Exception as caught:
        error = caught
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return error, peak


def assert_in_proportion(peak, size):
    assert peak < 200_000 + BYTES_PER_BYTE * size


@pytest.mark.parametrize("case", BROKEN_GGUF)
def test_broken_gguf(tmp_path, case):
    path = tmp_path / "m.gguf"
    path.write_bytes(BROKEN_GGUF[case])
    error, peak = measured(read_gguf, path)
    assert type(error) is FormatError
    assert str(path) in error.message
    assert len(str(error)) < 500
    assert_in_proportion(peak, len(BROKEN_GGUF[case]))


def test_the_cases_above_break_only_what_they_say(tmp_path):
    """The builders are right: without their lie the same files are read."""
    for number, content in enumerate([one_tensor(), two_tensors(32), with_alignment(32), nested(3), array_file()]):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(content)
        read_gguf(path)


def array_file():
    return start(0, 1) + array(STRING, 2, string("abc") + string("é"))


GREEDY = {
    "many empty strings": lambda n: start(0, 1) + array(STRING, n // 8, bytes(8) * (n // 8)),
    "many short strings": lambda n: start(0, 1) + array(STRING, n // 10, string("ab") * (n // 10)),
    "many bytes": lambda n: start(0, 1) + array(U8, n, bytes(range(256)) * (n // 256)),
    "many floats": lambda n: start(0, 1) + array(F32, n // 4, struct.pack("<f", 0.1) * (n // 4)),
    "many arrays": lambda n: start(0, 1) + array(ARRAY, n // 12, struct.pack("<IQ", U8, 0) * (n // 12)),
    "many keys": lambda n: start(0, n // 20) + b"".join(pair(f"{i:04x}", 1) for i in range(n // 20)),
    "many tensors": lambda n: (
        start(n // 36, 0) + b"".join(tensor_record(f"{i:04x}", 0, (8,), 32 * i) for i in range(n // 36))
    ),
}


@pytest.mark.parametrize("case", GREEDY)
def test_memory_is_in_proportion_to_the_file(tmp_path, case):
    """Honest files that are all header: the most memory that each byte of a file can ask for."""
    content = GREEDY[case](1 << 20)
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    error, peak = measured(read_gguf, path)
    assert error is None or "reaches to byte" in str(error)
    assert_in_proportion(peak, len(content))


# -- safetensors -----------------------------------------------------------------------------------------------------


def safetensors(header, data=bytes(8), length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


BROKEN_SAFETENSORS = {
    "nothing": b"",
    "7 bytes": bytes(7),
    "no header": struct.pack("<Q", 0),
    "header longer than the file": safetensors({"a": entry()}, length=10**6),
    "header above the limit": safetensors({"a": entry()}, length=100_000_001),
    **{f"header of {n} bytes": safetensors({"a": entry()}, length=n) for n in HUGE},
    "no JSON": safetensors(b"{]"),
    "JSON that is no object": safetensors([1, 2]),
    "blanks before the object": safetensors(b'  {"a": 1}'),
    "not UTF-8": safetensors(b'{"\xff": 1}'),
    "nested 100000 deep": safetensors(b'{"a": ' + b"[" * 100_000),
    "nested 900 deep": safetensors(b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}"),
    "number of 5000 digits": safetensors(b'{"a": ' + b"9" * 5000 + b"}"),
    "not a number": safetensors(b'{"a": NaN}'),
    "name twice": safetensors(b'{"a":' + json.dumps(entry()).encode() + b',"a":' + json.dumps(entry()).encode() + b"}"),
    "key twice": safetensors(b'{"a":{"dtype":"F32","dtype":"I32","shape":[2],"data_offsets":[0,8]}}'),
    "entry that is no object": safetensors({"a": [1]}),
    "no type": safetensors({"a": {"shape": [2], "data_offsets": [0, 8]}}),
    "unknown type": safetensors({"a": entry("Q9")}),
    "type that is no text": safetensors({"a": entry(["F32"])}),
    "shape that is no list": safetensors({"a": entry() | {"shape": 2}}),
    "negative shape": safetensors({"a": entry(shape=(-1, -2))}),
    "shape of a float": safetensors({"a": entry(shape=(2.0,))}),
    "shape of a bool": safetensors({"a": entry(shape=(True, 2))}),
    "shape too large": safetensors({"a": entry(shape=(2**62, 2**62))}),
    "shape of huge product": safetensors({"a": entry(shape=(10**9,) * 1000)}),
    "shape that wraps": safetensors({"a": entry(shape=(2**62 + 1, 4), offsets=(0, 16))}, bytes(16)),
    "shape with a zero that hides an overflow": safetensors({"a": entry(shape=(2**40, 2**40, 0), offsets=(0, 0))}, b""),
    "span that is not the shape": safetensors({"a": entry(shape=(3,))}),
    "span of half elements": safetensors({"a": entry("F4", shape=(3,), offsets=(0, 1))}, bytes(1)),
    "no offsets": safetensors({"a": {"dtype": "F32", "shape": [2]}}),
    "three offsets": safetensors({"a": entry(offsets=(0, 4, 8))}),
    "negative offset": safetensors({"a": entry(offsets=(-8, 0))}),
    "reversed offsets": safetensors({"a": entry(offsets=(8, 0))}),
    "offsets past the end": safetensors({"a": entry(offsets=(8, 16))}),
    **{f"offset of {n}": safetensors({"a": entry(offsets=(n, n + 8))}) for n in HUGE},
    "overlap": safetensors({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
    "tensors at one place": safetensors({"a": entry(), "b": entry()}),
    "hole": safetensors({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20)),
    "hole at the start": safetensors({"a": entry(offsets=(8, 16))}, bytes(16)),
    "bytes that belong to nobody": safetensors({"a": entry()}, bytes(9)),
    "cut off": safetensors({"a": entry()}, bytes(7)),
    "pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
}


@pytest.mark.parametrize("case", BROKEN_SAFETENSORS)
def test_broken_safetensors(tmp_path, case):
    path = tmp_path / "model.safetensors"
    path.write_bytes(BROKEN_SAFETENSORS[case])
    error, peak = measured(read_headers, [path])
    assert type(error) is FormatError
    assert str(path) in error.message
    assert len(str(error)) < 500
    assert_in_proportion(peak, len(BROKEN_SAFETENSORS[case]))


def test_the_safetensors_cases_break_only_what_they_say(tmp_path):
    good = [{"a": entry()}, {"a": entry(shape=(0,), offsets=(0, 0)), "b": entry()}, {"__metadata__": {}, "b": entry()}]
    for number, header in enumerate(good):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(safetensors(header))
        assert len(read_headers([path])) == len(header) - ("__metadata__" in header)


# -- folders ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A model's folder beside a safetensors file that is none of its business."""
    save_file({"secret": torch.ones(1)}, tmp_path / "secret.safetensors")
    (tmp_path / "secret.json").write_text('{"model_type": "llama", "secret": 1}')
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    return path


@pytest.mark.parametrize(
    "name",
    ["../secret.safetensors", "sub/../../secret.safetensors", "ABSOLUTE", "..\\secret.safetensors", "a\0b.safetensors"],
)
def test_an_index_that_points_outside(folder, name):
    name = name.replace("ABSOLUTE", str(folder.parent / "secret.safetensors"))
    (folder / "sub").mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"secret": name}}))
    with pytest.raises(FormatError, match="outside the model's folder"):
        locate(str(folder))


@pytest.mark.parametrize(
    "weight_map", [None, [], {}, "x", {"a": 1}, {"a": None}, {"a": "config.json"}, {"a": "x.bin"}, {"a": ""}]
)
def test_an_index_that_makes_no_sense(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(FormatError, match=r"weight_map|not a safetensors file"):
        locate(str(folder))


@pytest.mark.parametrize("link", ["model.safetensors", "config.json", "generation_config.json", "tokenizer.json"])
@pytest.mark.parametrize("through", ["file", "folder"])
def test_links_out_of_the_folder(folder, link, through):
    """Also a link to a folder on the way."""
    if link != "model.safetensors":
        save_file({"a": torch.ones(1)}, folder / "model.safetensors")
    (folder / link).unlink(missing_ok=True)
    secret = "secret.safetensors" if link.endswith("safetensors") else "secret.json"
    if through == "file":
        (folder / link).symlink_to(folder.parent / secret)
    else:
        (folder / "way").symlink_to(folder.parent)
        (folder / link).symlink_to(f"way/{secret}")
    with pytest.raises(FormatError, match="outside the model's folder"):
        locate(str(folder))


def test_an_index_through_a_linked_folder(folder):
    (folder / "way").symlink_to(folder.parent)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"secret": "way/secret.safetensors"}}')
    with pytest.raises(FormatError, match="outside the model's folder"):
        locate(str(folder))


def test_links_that_lead_nowhere_or_in_a_circle(folder):
    (folder / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(CheckpointError, match=r"incomplete: model\.safetensors is missing"):
        locate(str(folder))


def test_a_link_to_the_whole_folder_is_fine(folder):
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")
    (folder.parent / "link").symlink_to(folder)
    assert locate(str(folder.parent / "link")).name == "model"


# -- fuzz ------------------------------------------------------------------------------------------------------------

GGUF = gguf_bytes(
    decoder_metadata("llama") | {"list": [[1, 2], [3]], "scores": [0.5, 1.5]},
    decoder_tensors(rope_freqs__weight=torch.ones(8).numpy()),
)
SAFETENSORS = save({"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.tensor([True])})
GGUF_HEADER = GGUF.index(b"blk.1.ffn_gate") + 64

FUZZ = settings(
    max_examples=1500, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)  # fmt: skip


@st.composite
def mutations(draw, content, header):
    """`content` with some bytes of its header changed, numbers of eight bytes put in, pieces cut or doubled."""
    raw = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        if not raw:
            break
        at = draw(st.integers(0, min(header, len(raw)) - 1))
        match draw(st.sampled_from(["byte", "bit", "number", "small", "cut", "drop", "double", "insert"])):
            case "byte":
                raw[at] = draw(st.integers(0, 255))
            case "bit":
                raw[at] ^= 1 << draw(st.integers(0, 7))
            case "number":
                raw[at : at + 8] = struct.pack("<Q", draw(st.sampled_from([0, 1, *HUGE])))
            case "small":
                raw[at : at + 4] = struct.pack("<I", draw(st.integers(0, 48)))
            case "cut":
                del raw[at:]
            case "drop":
                del raw[at : at + draw(st.integers(1, 16))]
            case "double":
                raw[at:at] = raw[at : at + draw(st.integers(1, 64))]
            case "insert":
                raw[at:at] = draw(st.binary(min_size=1, max_size=8))
    return bytes(raw)


def use_gguf(path):
    """Everything that is done with a GGUF file before the model is built."""
    gguf = read_gguf(path)
    config = hf_config(gguf)
    generation_config(gguf)
    json.dumps(config)
    with TensorReader() as reader:
        for info in gguf.tensors.values():
            assert reader.read(info).numel() == math.prod(info.shape)


def use_safetensors(path):
    infos = read_headers([path])
    with TensorReader() as reader:
        for info in infos.values():
            assert reader.read(info).numel() == math.prod(info.shape)


@FUZZ
@given(mutations(GGUF, GGUF_HEADER))
@example(GGUF)
def test_fuzz_gguf(tmp_path, content):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    error, peak = measured(use_gguf, path)
    assert error is None or isinstance(error, FormatError | UnsupportedModel), repr(error)
    assert (error is None) or (str(path) in str(error) or isinstance(error, UnsupportedModel))
    assert_in_proportion(peak, len(content))
    path.unlink()  # the next example must not write into pages that are still mapped


@FUZZ
@given(mutations(SAFETENSORS, len(SAFETENSORS)))
@example(SAFETENSORS)
def test_fuzz_safetensors(tmp_path, content):
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    error, peak = measured(use_safetensors, path)
    assert error is None or isinstance(error, FormatError | UnsupportedModel), repr(error)
    assert_in_proportion(peak, len(content))
    path.unlink()


@FUZZ
@given(
    st.binary(max_size=300), st.sampled_from(["config.json", "model.safetensors.index.json", "generation_config.json"])
)
def test_fuzz_json_files(tmp_path_factory, content, name):
    folder = tmp_path_factory.getbasetemp() / "json"
    if not folder.exists():
        folder.mkdir()
        save_file({"a": torch.ones(1)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / name).write_bytes(content)
    error, _ = measured(locate, str(folder))
    assert error is None or type(error) is FormatError, repr(error)
    (folder / name).unlink()

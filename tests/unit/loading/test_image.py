"""A rank's weights as a file in memory: found again bit by bit, by the right one only, and by nobody half-written."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import mmap
import os
import signal
from pathlib import Path

import msgspec
import pytest
import torch

from phalanx.kernels import matmul
from phalanx.kernels.library import native
from phalanx.kernels.weight_memory import HUGE_PAGE, WeightMemory
from phalanx.loading import image as images
from phalanx.loading.image import Image, NewImage, image_key, open_image
from phalanx.models.decoder import Decoder
from phalanx.quantization import base
from phalanx.quantization.base import choose_scheme
from tests.helpers.decoders import decoder_of, random_ids
from tests.helpers.stepping import Driver
from tests.helpers.tiny_gguf import to_gguf
from tests.helpers.tiny_models import FAMILIES, tiny_checkpoint
from tests.helpers.tiny_quantized import Quantised, quantised

CPU = torch.device("cpu")
IDS = random_ids(21)


@pytest.fixture
def descriptors():
    """Are closed at the end."""
    with contextlib.ExitStack() as held:
        yield lambda fd: held.callback(os.close, fd) and fd


def made(path: Path, descriptors, *, key: str = "k", room: int = 1 << 20, **options: object) -> tuple[Decoder, int]:
    """What was read, and the image that it left."""
    with contextlib.closing(NewImage(room)) as fresh:
        decoder = decoder_of(path, memory=fresh.memory, **options)
        fd = fresh.seal(key, "print", decoder.nbytes)
    assert fd is not None
    return decoder, descriptors(fd)


def found(path: Path, fd: int, *, key: str = "k", **options: object) -> Decoder:
    opened = open_image(fd, key)
    assert opened is not None
    memory = opened.memory()
    decoder = decoder_of(path, memory=memory, **options)
    assert memory.asked == opened.header.asked
    return decoder


def logits_of(decoder: Decoder) -> torch.Tensor:
    driver = Driver(decoder, blocks=-(-len(IDS) // 4) + 2)
    return driver.prefill(driver.stream(IDS)).float()


@pytest.fixture
def nothing_is_read(monkeypatch):
    """From now on, when it is called."""

    def forbid() -> None:
        def refuse(*_: object, **__: object) -> None:
            raise AssertionError("the checkpoint is read")

        monkeypatch.setattr("phalanx.loading.loader.TensorReader", refuse)
        monkeypatch.setattr(matmul.PackedMatrix, "fill", refuse)

    return forbid


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_model_is_found(family, dtype, descriptors, nothing_is_read) -> None:
    path = tiny_checkpoint(family)
    first, fd = made(path, descriptors, dtype=dtype)
    expected = logits_of(first)
    nothing_is_read()
    second = found(path, fd, dtype=dtype)
    assert second.nbytes == first.nbytes
    assert torch.equal(logits_of(second), expected)
    assert torch.equal(logits_of(first), expected), "who left it goes on with it"


@pytest.mark.parametrize("family", ["llama-biased", "gpt2"])
def test_without_the_native_library(family, descriptors, nothing_is_read, monkeypatch) -> None:
    monkeypatch.setattr(base, "packs", lambda *_: False)
    path = tiny_checkpoint(family)
    first, fd = made(path, descriptors)
    expected = logits_of(first)
    nothing_is_read()
    assert torch.equal(logits_of(found(path, fd)), expected)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Query, key and value are of different kinds, one of them plain."""
    kinds = {"attn_q": "Q8_0", "attn_k": "F16", "attn_v": "Q8_0"}
    wide = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32}
    folder = tiny_checkpoint("llama", intermediate_size=128, **wide)
    to = tmp_path_factory.mktemp("gguf")
    return to_gguf(folder, "F32", to, lambda name: kinds.get(name.split(".")[-2], "Q8_0"))[0]


_WHOLE = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 512}
MADE = {"gptq": Quantised("gptq", 64, symmetric=False, ordered=True), "awq": Quantised("awq", 64, symmetric=False)}


@pytest.mark.skipif(native() is None, reason="needs the native library")
@pytest.mark.parametrize("name", ["gguf", "int8", *MADE])
def test_quantised_weights_are_found(name, gguf, descriptors, nothing_is_read, tmp_path) -> None:
    path = gguf if name == "gguf" else tiny_checkpoint("gpt2")
    if name in MADE:
        path = quantised(tiny_checkpoint("llama", head_dim=32, **_WHOLE), tmp_path, MADE[name])[0]
    scheme = choose_scheme(name, torch.bfloat16, CPU)
    first, fd = made(path, descriptors, room=16 << 20, dtype=torch.bfloat16, scheme=scheme)
    expected = logits_of(first)
    nothing_is_read()
    second = found(path, fd, dtype=torch.bfloat16, scheme=scheme)
    assert second.nbytes == first.nbytes and torch.equal(logits_of(second), expected)


def test_only_its_own_key_opens_it(descriptors) -> None:
    _, fd = made(tiny_checkpoint("llama"), descriptors, key=image_key("share", 1))
    assert open_image(fd, image_key("share", 1)) is not None
    assert open_image(fd, image_key("share", 2)) is None
    assert open_image(fd, "") is None


def test_what_is_not_sealed_is_none(descriptors) -> None:
    """A rank may die at any moment until it has sealed."""
    fresh = NewImage(1 << 20)
    path = tiny_checkpoint("llama")
    seen = []

    def look(_: float) -> None:
        seen.append(open_image(fresh._fd, "k"))

    decoder = decoder_of(path, memory=fresh.memory, progress=look)
    header = msgspec.msgpack.encode(images.Header("k", "", fresh.memory.asked, decoder.nbytes, []))
    end = os.fstat(fresh._fd).st_size
    os.pwrite(fresh._fd, header + images._LENGTH.pack(len(header)), end)
    assert open_image(fresh._fd, "k") is None, "all is there, and somebody could still write to it"
    assert set(seen) == {None}
    fresh.close()


@pytest.mark.parametrize("content", [b"", b"x", b"\xff" * 64, bytes(64), b"\x81\xa3key" + images._LENGTH.pack(5)])
def test_what_is_something_else_is_none(content, descriptors) -> None:
    fd = descriptors(os.memfd_create("x", os.MFD_ALLOW_SEALING))
    os.write(fd, content)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, images._SEALS)
    assert open_image(fd, "k") is None


def test_a_file_is_none(tmp_path, descriptors) -> None:
    (tmp_path / "x").write_bytes(b"x" * 100)
    assert open_image(descriptors(os.open(tmp_path / "x", os.O_RDWR)), "k") is None


def test_nobody_can_change_it(descriptors) -> None:
    decoder, fd = made(tiny_checkpoint("llama"), descriptors)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 4096)
    assert os.fstat(fd).st_mode & 0o077 == 0
    for weights in (decoder, found(tiny_checkpoint("llama"), fd)):
        norm = weights.final_norm
        assert norm is not None and norm.weight is not None
        pid = os.fork()
        if not pid:
            faulthandler.disable()  # it has nothing to tell
            norm.weight[0] = 7.0
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == signal.SIGSEGV


def test_who_asks_for_something_else_is_noticed(descriptors) -> None:
    """Two models under one key, which cannot be: the number of weights, or their order, tells them apart."""
    _, fd = made(tiny_checkpoint("llama"), descriptors)
    opened = open_image(fd, "k")
    assert opened is not None
    larger = tiny_checkpoint("llama", num_hidden_layers=40)
    with pytest.raises(ValueError, match="less than is asked for"):
        decoder_of(larger, memory=opened.memory())
    memory = opened.memory()
    decoder_of(tiny_checkpoint("llama", num_hidden_layers=1), memory=memory)
    assert memory.asked != opened.header.asked


def test_more_weights_than_were_said_leave_none(descriptors) -> None:
    fresh = NewImage(0)
    tensors = [fresh.memory.full((1 << 20,), torch.float32, float(i)) for i in range(30)]
    assert fresh.seal("k", "", 30 << 22) is None
    assert all(bool((tensor == i).all()) for i, tensor in enumerate(tensors))
    fresh.close()


def test_it_takes_what_the_weights_take(descriptors) -> None:
    """Whole pages behind each other, and the pages only once, whoever maps them."""
    fresh = NewImage(12 << 20)
    tensors = [fresh.memory.full((3, 1 << 18), torch.float32, float(i)) for i in range(4)]
    fd = descriptors(fresh.seal("k", "", 12 << 20))
    fresh.close()
    assert os.fstat(fd).st_size < (12 << 20) + 4096
    opened = open_image(fd, "k")
    assert isinstance(opened, Image)
    before = own_memory()
    memory = opened.memory()
    again = [memory.full((3, 1 << 18), torch.float32, 9.0) for _ in range(4)]
    assert all(torch.equal(a, b) for a, b in zip(tensors, again, strict=True))
    assert own_memory() - before < 2 << 20
    assert all(tensor.data_ptr() % 64 == 0 for tensor in again) and again[0].data_ptr() % HUGE_PAGE == 0


@pytest.mark.parametrize(
    ("private", "known", "slower"),
    [("always [madvise] never", False, True), ("always [madvise] never", True, False), ("[never]", False, False)],
)
def test_where_only_private_memory_has_huge_pages_it_is_slower(tmp_path, monkeypatch, private, known, slower) -> None:
    monkeypatch.setattr(images, "_MADV_COLLAPSE", mmap.MADV_NORMAL if known else 9999)  # which no kernel knows
    (tmp_path / "enabled").write_text(private + "\n")
    monkeypatch.setattr(images, "_HUGE_PAGES", tmp_path / "enabled")
    assert images.slower() == slower
    monkeypatch.setattr(images, "_HUGE_PAGES", tmp_path / "none")
    assert not images.slower()


def own_memory() -> int:
    """Bytes of this process that are no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def test_memory_that_is_filled_is_left_as_it_is() -> None:
    memory = WeightMemory(more=lambda _, least: torch.full((least,), 1, dtype=torch.uint8), notes=[3])
    assert memory.filled and memory.full((4,), torch.uint8, 0).tolist() == [1] * 4
    assert memory.next_note() == 3
    with pytest.raises(ValueError, match="nothing more"):
        memory.next_note()

"""A worker finds its weights in the image that another one has left, or reads them: what it finds is never something
else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import phalanx
from phalanx.config import EngineConfig
from phalanx.errors import NotEnoughMemory
from phalanx.loading import loader
from phalanx.loading.image import NewImage, open_image
from phalanx.loading.tensors import TensorReader
from phalanx.worker import worker as workers
from phalanx.worker.limits import Memory
from phalanx.worker.worker import Worker, open_worker
from tests.helpers.plans import Run, admission, answer, plan
from tests.helpers.worker_model import engine_config, retrain, write_model


class Kept:
    """A keeper in this process."""

    def __init__(self) -> None:
        self.share = "a"
        self.left: int | None = None

    def keep(self, fd: int) -> None:
        self.let_go()
        self.left = os.dup(fd)

    def let_go(self) -> None:
        if self.left is not None:
            os.close(self.left)
            self.left = None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def keeper():
    kept = Kept()
    yield kept
    kept.let_go()


@pytest.fixture(autouse=True)
def no_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the kernel is."""
    monkeypatch.setattr(workers, "slower", lambda: False)


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> list[TensorReader]:
    opened: list[TensorReader] = []

    class Noted(TensorReader):
        def __init__(self) -> None:
            super().__init__()
            opened.append(self)

    monkeypatch.setattr(loader, "TensorReader", Noted)
    return opened


def loaded(config: EngineConfig, keeper: Kept) -> Worker:
    worker = open_worker(config, keeper=keeper)
    worker.load()
    worker.allocate()
    return worker


def tokens(worker: Worker) -> list[int]:
    worker.reset(0)
    prompt = [3, 77, 12, 45]
    said = [answer(worker.run(plan([Run(0, 4)], admit=[admission(0, prompt, [0, 1, 2])]))).tokens[0]]
    for _ in range(6):
        said.append(answer(worker.run(plan([Run(0, 1, last=said[-1])]))).tokens[0])
    return said


def test_whoever_has_another_key_reads(model, keeper, readers, monkeypatch):
    """And leaves an image of its own."""
    config = engine_config(model)
    wanted = tokens(loaded(config, keeper))
    assert tokens(loaded(config, keeper)) == wanted and len(readers) == 1
    narrow = engine_config(model, dtype="bfloat16")
    loaded(narrow, keeper), loaded(narrow, keeper)
    assert len(readers) == 2
    keeper.share = "b"
    loaded(narrow, keeper), loaded(narrow, keeper)
    assert len(readers) == 3
    random = engine_config(model, load_format="dummy")
    assert tokens(loaded(random, keeper)) == tokens(loaded(random, keeper)) != wanted
    loaded(narrow, keeper)
    assert len(readers) == 4
    monkeypatch.setattr(phalanx, "__version__", "another")  # was installed while the front end ran
    loaded(narrow, keeper), loaded(narrow, keeper)
    assert len(readers) == 5


def test_the_files_are_of_no_importance_then(tmp_path, keeper):
    own = write_model(tmp_path)
    first = loaded(engine_config(own), keeper)
    wanted = tokens(first)
    retrain(own)
    second = loaded(engine_config(own), keeper)
    assert tokens(second) == wanted and second.status().weights == first.status().weights
    keeper.let_go()
    assert tokens(loaded(engine_config(own), keeper)) != wanted


def forge(keeper: Kept, worker: Worker, spoil: str) -> None:
    """An image full of the same number in the place of the right one."""
    key = worker._image_key(keeper)
    assert keeper.left is not None
    right = open_image(keeper.left, key)
    assert right is not None
    image = NewImage(1 << 20)
    image.memory.full((64 if spoil == "size" else 1 << 20,), torch.uint8, 0x3F)
    fd = image.seal("other" if spoil == "key" else key, "forged", right.nbytes)
    assert fd is not None
    keeper.keep(fd)
    os.close(fd)
    image.close()


@pytest.mark.parametrize("spoil", ["key", "order", "size"])
def test_a_spoiled_image_is_not_used(model, keeper, readers, spoil):
    config = engine_config(model)
    first = loaded(config, keeper)
    forge(keeper, first, spoil)
    second = loaded(config, keeper)
    assert len(readers) == 2
    assert second.status().weights == first.status().weights and tokens(second) == tokens(first)
    loaded(config, keeper)
    assert len(readers) == 2, "what the second has left is good"


def test_what_the_image_holds_is_counted_once(model, keeper, monkeypatch):
    """It has been taken from what is free, and is not taken again."""
    config = engine_config(model)
    first = loaded(config, keeper)
    used = first.status().memory
    room = used["activations"] + (1 << 20) + used["weights"] // 2  # 1 MiB for the cache
    monkeypatch.setattr(workers, "host_memory", lambda: Memory(1 << 40, room))
    open_worker(config, keeper=keeper).load()
    keeper.let_go()
    with pytest.raises(NotEnoughMemory):
        open_worker(config, keeper=keeper).load()


def test_where_there_are_no_images_it_reads(model, keeper, readers, monkeypatch):
    def refused(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refused)
    loaded(engine_config(model), keeper)
    assert keeper.left is None and len(readers) == 1


def test_where_steps_would_be_slower_with_an_image_it_reads(model, keeper, readers, monkeypatch):
    monkeypatch.setattr(workers, "slower", lambda: True)
    loaded(engine_config(model), keeper)
    assert keeper.left is None and len(readers) == 1

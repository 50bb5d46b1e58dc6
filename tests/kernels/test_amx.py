"""Products by AMX have the bits of those by AVX-512. No machine with AMX is needed: the library runs as it is, and an
emulator (`amx_emulator.cpp`) does what the processor does not know."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx.kernels.block_matmul import BlockProduct
from phalanx.kernels.library import native
from tests.kernels.test_block_matmul import ALL_KINDS, CPU_TYPES, cuts, matrix

LIBRARY = native()
if not {"amx", "avx512bf16"} <= {*LIBRARY.compiled_instruction_sets(), *LIBRARY.instruction_sets()}:
    pytest.skip("the compiler has no AMX, or the processor no AVX-512", allow_module_level=True)
EMULATED = "amx" not in LIBRARY.instruction_sets()


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    library = tmp_path_factory.mktemp("amx") / "emulator.so"
    source = Path(__file__).with_name("amx_emulator.cpp")
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run(["c++", *flags, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture
def amx(emulator: ctypes.CDLL) -> Iterator[ctypes.CDLL]:
    best = LIBRARY.active_instruction_set()
    emulator.start(False)
    LIBRARY.assume_instruction_set("amx")
    yield emulator
    LIBRARY.choose_instruction_set(best)
    emulator.stop()


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.dtype is torch.float32 else torch.int16)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_the_same_bits_as_without(kind: str, amx: ctypes.CDLL) -> None:
    torch.manual_seed(2)
    for inputs, columns in cuts(kind):
        product = BlockProduct([matrix(kind, outputs, inputs, columns)[0] for outputs in (37, 16, 1)])
        for number, rows in enumerate((1, 15, 16, 17, 47, 150)):
            x = torch.randn(rows, product.inputs)
            x[0], x[-1, 5], x[rows // 2, 40] = 0.0, -1e-42, 3e38
            if rows > 16:
                x[3, 5], x[9, 0], x[14, -1] = math.nan, math.inf, -math.inf
            x = x.to(CPU_TYPES[number % 3])
            bias = torch.randn(54) if rows % 2 else None
            LIBRARY.choose_instruction_set("avx512bf16")
            expected, before = product(x, bias), amx.product_count()
            LIBRARY.assume_instruction_set("amx")
            assert torch.equal(bits(product(x, bias)), bits(expected)), (columns, rows)
            assert (amx.product_count() > before) == (EMULATED and rows >= 16)
    assert not amx.has_tiles(), "released, so that the thread is switched faster"


def test_a_machine_without_it_says_why() -> None:
    assert bool(LIBRARY.amx_refusal()) == EMULATED


@pytest.mark.skipif(not EMULATED, reason="the processor has AMX")
def test_it_is_compared_before_it_is_taken(emulator: ctypes.CDLL) -> None:
    for wrong in (False, True):
        emulator.start(wrong)
        agrees = LIBRARY.amx_agrees()
        emulator.stop()
        assert agrees != wrong

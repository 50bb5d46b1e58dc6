"""Every kernel test runs on each instruction set that this machine has."""

from collections.abc import Iterator

import pytest

from phalanx.kernels.library import native, use_threads

LIBRARY = native()
if LIBRARY is None:
    pytest.skip("the native library was not built", allow_module_level=True)


@pytest.fixture(params=LIBRARY.instruction_sets())
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    best = LIBRARY.active_instruction_set()
    LIBRARY.choose_instruction_set(request.param)
    yield request.param
    LIBRARY.choose_instruction_set(best)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    use_threads(request.param)
    yield request.param
    use_threads(1)

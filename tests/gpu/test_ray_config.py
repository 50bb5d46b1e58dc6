"""`optimize_gpu_memory` on a CUDA device: cuDNN's switches, and a share of its memory that cannot be exceeded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from phalanx.cluster import RayConfig, optimize_gpu_memory
from phalanx.errors import ConfigError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none here"),
]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    yield
    cudnn.benchmark, cudnn.deterministic = before
    torch.cuda.set_per_process_memory_fraction(1.0, 0)


def test_what_is_set() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    wanted = RayConfig(gpu_ids=(0,), memory_fraction=0.05, cudnn_benchmark=False, cudnn_deterministic=True)
    found = optimize_gpu_memory(wanted)
    assert found.skipped == () and "memory_fraction 0.05 on GPU 0" in found.applied
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
    half = torch.empty(int(0.025 * total), dtype=torch.uint8, device="cuda:0")
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(int(0.03 * total), dtype=torch.uint8, device="cuda:0")
    del half


def test_a_gpu_that_is_not_there() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(ConfigError, match=f"names GPU {count}, but this process sees {count}"):
        optimize_gpu_memory(RayConfig(gpu_ids=(count,)))

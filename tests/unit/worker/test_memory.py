"""From bytes to blocks, and what a user is told when they are too few."""

import re

import pytest

from phalanx.config import CacheConfig
from phalanx.errors import NotEnoughMemory
from phalanx.worker.limits import Memory
from phalanx.worker.memory import Needs, cache_size, check_before_loading, readable

GIB, MIB = 2**30, 2**20


def needs(**changes) -> Needs:
    """One block is 1 MiB, a request of full length 64 blocks, all requests 640."""
    values = {
        "weights": GIB,
        "activations": 100 * MIB,
        "kv_bytes_per_token": 2**16,
        "block_size": 16,
        "max_model_len": 1024,
        "max_num_seqs": 10,
        **changes,
    }
    return Needs(**values)


@pytest.mark.parametrize(
    ("config", "device", "available", "blocks"),
    [
        (CacheConfig(), "cpu", 2 * GIB, 512),
        (CacheConfig(), "cpu", 16 * GIB, 640),
        (CacheConfig(kv_cache_memory_bytes=100 * MIB), "cpu", 2 * GIB, 100),
        (CacheConfig(kv_cache_memory_bytes=100 * MIB + 5), "cpu", 2 * GIB, 100),
        (CacheConfig(kv_cache_memory_bytes=2 * GIB), "cpu", 3 * GIB, 640),
        (CacheConfig(gpu_memory_utilization=0.5), "cpu", 9 * GIB, 1024 - 100),
        (CacheConfig(gpu_memory_utilization=0.45), "cpu", 9 * GIB, None),
        (CacheConfig(), "cuda", 4 * GIB, None),
        (CacheConfig(gpu_memory_utilization=1.0), "cuda", 600 * MIB, 500),
    ],
)
def test_number_of_blocks(config, device, available, blocks):
    memory = Memory(total=16 * GIB, available=available)
    requests = needs(max_num_seqs=10 if blocks is None or blocks <= 640 else 1000)
    if blocks is None:
        share = config.gpu_memory_utilization or 0.9
        left = int(share * 16 * GIB) - (16 * GIB - available) - 100 * MIB
        blocks = min(left // MIB, 640)
    assert cache_size(requests, memory, config, device=device) == blocks


def test_never_more_than_all_requests_can_use():
    huge = Memory(total=1024 * GIB, available=1000 * GIB)
    for config in (CacheConfig(), CacheConfig(kv_cache_memory_bytes=500 * GIB)):
        assert cache_size(needs(), huge, config, device="cpu") == 640


@pytest.mark.parametrize(
    "config", [CacheConfig(), CacheConfig(kv_cache_memory_bytes=40 * MIB), CacheConfig(gpu_memory_utilization=0.9)]
)
def test_the_context_that_fits_is_named_and_fits(config):
    memory = Memory(total=GIB, available=230 * MIB if config.gpu_memory_utilization is None else 240 * MIB)
    with pytest.raises(NotEnoughMemory) as caught:
        cache_size(needs(), memory, config, device="cpu")
    text = str(caught.value)
    assert "1024 tokens" in text and "64.0 MiB" in text and "1.0 GiB" in text and "100.0 MiB" in text
    fits = int(re.search(r"Use --max-model-len (\d+) or less", text)[1])
    assert 0 < fits < 1024
    assert cache_size(needs(max_model_len=fits), memory, config, device="cpu") >= fits // 16
    with pytest.raises(NotEnoughMemory):
        cache_size(needs(max_model_len=fits + 1), memory, config, device="cpu")


def test_whole_blocks_are_counted():
    """A context of 256 tokens in blocks of 100,000 needs one block, not 256 tokens."""
    wide = needs(max_model_len=256, block_size=100_000)
    config = CacheConfig(kv_cache_memory_bytes=wide.bytes_per_block - 1)
    with pytest.raises(NotEnoughMemory) as caught:
        cache_size(wide, Memory(2**50, 2**50), config, device="cpu")
    assert f"needs {readable(wide.bytes_per_block)} of KV cache (in blocks of 100000 tokens)" in str(caught.value)


def test_nothing_fits():
    with pytest.raises(NotEnoughMemory, match="No --max-model-len fits"):
        cache_size(needs(), Memory(GIB, 100 * MIB), CacheConfig(), device="cpu")
    with pytest.raises(NotEnoughMemory, match="No --max-model-len fits"):
        cache_size(needs(), Memory(GIB, 0), CacheConfig(), device="cuda")


def test_an_explicit_cache_that_is_not_there_is_refused():
    with pytest.raises(NotEnoughMemory, match=r"asks for 3\.0 GiB.*only 1\.9 GiB"):
        cache_size(needs(), Memory(4 * GIB, 2 * GIB), CacheConfig(kv_cache_memory_bytes=3 * GIB), device="cpu")


class TestBeforeLoading:
    def check(self, available: int, config: CacheConfig | None = None) -> None:
        memory = Memory(8 * GIB, available)
        check_before_loading(needs(), memory, config or CacheConfig(), device="cpu", dtype="bfloat16")

    def test_enough(self):
        self.check(2 * GIB)

    def test_weights_do_not_fit(self):
        with pytest.raises(NotEnoughMemory) as caught:
            self.check(GIB)
        for part in ("1.0 GiB for its weights in bfloat16", "64.0 MiB", "of the 8.0 GiB", "no --max-model-len fits"):
            assert part in str(caught.value)

    def test_weights_fit_but_the_context_does_not(self):
        with pytest.raises(NotEnoughMemory, match="Use --max-model-len 400 or less"):
            self.check(GIB + 125 * MIB, CacheConfig(kv_cache_memory_bytes=25 * MIB))


def test_readable():
    assert [readable(n) for n in (0, 1023, 2048, 3 * MIB, 5 * GIB // 2)] == [
        "0 bytes",
        "1023 bytes",
        "2.0 KiB",
        "3.0 MiB",
        "2.5 GiB",
    ]

"""Models that stretch long prompts have other keys for the same tokens then: long and short share no blocks."""

from __future__ import annotations

import msgspec

from tests.helpers.engine_driver import Driver


def cached_tokens(driver: Driver, request_id: str, prompt: list[int], salt: str = "") -> int:
    driver.ask(request_id, prompt, max_tokens=2, cache_salt=salt)
    driver.step()
    cached = driver.scheduler.requests[request_id].num_cached
    driver.drain()
    return cached


def test_classes_share_no_blocks() -> None:
    driver = Driver()
    driver.scheduler._layout = msgspec.structs.replace(driver.layout, prompt_classes=(16, 32))
    tokens = list(range(40))
    assert cached_tokens(driver, "short", tokens[:16]) == 0
    assert cached_tokens(driver, "short again", tokens[:15]) == 12
    assert cached_tokens(driver, "long", tokens[:20]) == 0, "its first 16 tokens are cached, but with other keys"
    assert cached_tokens(driver, "long again", tokens[:24]) == 20
    assert cached_tokens(driver, "longest", tokens[:36]) == 0
    assert cached_tokens(driver, "a salt that looks like a class", tokens[:20], salt="1:") == 0

"""Everyone who waits is told, and nobody by somebody else's cancellation."""

from __future__ import annotations

import asyncio

from phalanx.engine.news import News


async def waiting(news: News, count: int) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(news.wait()) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


async def test_all_who_wait_are_told() -> None:
    news = News()
    tasks = await waiting(news, 3)
    news.tell()
    await asyncio.wait_for(asyncio.gather(*tasks), 1)


async def test_what_was_told_before_is_not_remembered() -> None:
    news = News()
    news.tell()
    (task,) = await waiting(news, 1)
    assert not task.done()
    news.tell()
    await asyncio.wait_for(task, 1)


async def test_one_that_is_cancelled_is_forgotten_and_the_others_go_on_waiting() -> None:
    news = News()
    gone, stays = await waiting(news, 2)
    gone.cancel()
    await asyncio.sleep(0)
    assert gone.cancelled()
    assert not stays.done()
    assert len(news._readers) == 1
    news.tell()
    await asyncio.wait_for(stays, 1)

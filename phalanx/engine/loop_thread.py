"""An event loop that turns on a thread of its own, for callers without one."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class LoopThread:
    """From now until `end`."""

    def __init__(self, name: str):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def begin(self, work: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Without waiting. Cancelling the future cancels `work`."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call(self, work: Coroutine[Any, Any, _T], seconds: float | None = None) -> _T:
        """What `work` returns; it is cancelled when the caller is interrupted. Raises TimeoutError."""
        future = self.begin(work)
        try:
            return future.result(seconds)
        except BaseException:
            future.cancel()
            raise

    def end(self, seconds: float | None = None) -> None:
        """At most `seconds` for what the loop is doing at this moment."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(seconds)

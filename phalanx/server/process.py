"""A server's process: its event loop, what signals mean to it, and how it ends although threads are left."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from typing import Any

LAST_WORDS_S = 1.0
"""For the error frames of requests that shutdown ends, and then for connections to close."""


def run_to_end(work: Coroutine[Any, Any, int]) -> int:
    """`work` on an event loop of its own, which is not kept waiting by threads that cannot be interrupted."""
    loop = _new_loop()
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(work)
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        asyncio.set_event_loop(None)
        loop.close()


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def settle() -> None:
    """What is loaded stays: the collector need not look at it again, which would hold up all streams."""
    gc.collect()
    gc.freeze()


def leave_threads(own: set[threading.Thread], code: int) -> None:
    """A download in a thread cannot be interrupted, and Python would wait for it at exit; leave without it."""
    left = [thread for thread in threading.enumerate() if thread not in own and not thread.daemon]
    for thread in left:
        thread.join(timeout=0.2)
    if any(thread.is_alive() for thread in left):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Stop:
    """The first signal, as an event, and the second one, which ends the process after a moment for last words."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.asked = asyncio.Event()
        self.again = asyncio.Event()
        self.signal: signal.Signals | None = None
        self.second: signal.Signals | None = None
        self._loop = loop
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._received, number)

    def _received(self, number: signal.Signals) -> None:
        if self.signal is None:
            self.signal = number
            self.asked.set()
        elif self.second is None:
            print(f"Second {number.name}: ended at once.", file=sys.stderr, flush=True)
            self.second = number
            self.again.set()
            self._loop.call_later(LAST_WORDS_S, self.exit)
        else:
            self.exit()

    def exit(self) -> None:
        """On the spot. What this process has started ends when it loses us."""
        os._exit(128 + (self.second or 0))

    def seconds(self, shutdown_timeout: float) -> float:
        """That running requests have after the first signal."""
        return 0.0 if self.signal == signal.SIGINT else shutdown_timeout

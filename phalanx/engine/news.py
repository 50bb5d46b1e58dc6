"""`News`: what readers wait for, once for every token of every request. It costs less than an `asyncio.Event`."""

from __future__ import annotations

import asyncio


class News:
    """Remembers nothing: look first, then wait, without an `await` in between."""

    def __init__(self) -> None:
        self._readers: list[asyncio.Future[None]] = []

    def tell(self) -> None:
        """Whoever waits looks again."""
        if self._readers:
            for reader in self._readers:
                if not reader.done():
                    reader.set_result(None)
            self._readers.clear()

    async def wait(self) -> None:
        reader = asyncio.get_running_loop().create_future()
        self._readers.append(reader)
        try:
            await reader
        except asyncio.CancelledError:
            if reader in self._readers:
                self._readers.remove(reader)
            raise

from collections.abc import AsyncIterator

import pytest

from tests.helpers.server import EchoServer, echo_server


@pytest.fixture
async def server() -> AsyncIterator[EchoServer]:
    async with echo_server() as running:
        yield running

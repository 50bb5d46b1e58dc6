"""The processes of API servers, without what they serve."""

from __future__ import annotations

from phalanx.config import EngineConfig
from phalanx.engine.echo import EchoEngine
from phalanx.engine.front_ends import FrontEnds
from phalanx.engine.router import Router
from tests.helpers.processes import no_process_at_first, until


async def test_a_process_that_the_system_does_not_give_at_first_is_asked_for_again(caplog) -> None:
    config, router = EngineConfig.from_options(api_server_count=1), Router([EchoEngine()])
    with no_process_at_first():
        ends = FrontEnds(config, router, ["-c", "0"], inherited=(), cleared=lambda n: None, counts=dict)
        await until(lambda: ends._places[0].process is not None, 10)
    await ends.close()
    assert "API server 0 was lost: it could not be started (Resource temporarily unavailable)." in caplog.text

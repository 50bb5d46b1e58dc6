"""`Engines`: from a configuration to the engine processes of one model, behind one `Router`.

    engines = Engines(config)
    router = await engines.spawn()        # processes that import what they need
    checkpoint = await engines.locate()   # the model's files; now they know what to load
    info = await router.start()
    await engines.close()

Knows no text. The steps are apart because whoever starts engines has something to do beside each.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from phalanx.config import EngineConfig
from phalanx.engine.client import EngineInfo
from phalanx.engine.replicas import Replicas
from phalanx.engine.router import Router
from phalanx.engine.routing import make_routing
from phalanx.engine.scheduling import make_policy
from phalanx.errors import EngineDead
from phalanx.executor.base import StartProgress
from phalanx.layout_rules import check_replicas

if TYPE_CHECKING:
    from phalanx.checkpoint.locate import Checkpoint

_T = TypeVar("_T")


class Engines:
    """`progress` is called on the event loop, `renewed` with the facts of each process that takes the place of the
    first engine's."""

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint | None = None,
        *,
        progress: StartProgress | None = None,
        renewed: Callable[[EngineInfo], None] = lambda info: None,
    ):
        self.config = config
        """Resolved once `locate` has returned."""
        self.local: tuple[EngineConfig, str] | None = None
        """What the engines are told (`resolution.for_engine`), once `locate` has returned."""
        self._checkpoint = checkpoint
        self._progress, self._renewed = progress, renewed
        self._doors: dict[int, socket.socket] = {}
        """Where other nodes call, by the replica that they have ranks of."""
        self._replicas: Replicas | None = None
        self._router: Router | None = None
        self._closed = False

    async def spawn(self) -> Router:
        """Start the processes. Raises ConfigError."""
        parallel, scheduler = self.config.parallel, self.config.scheduler
        check_replicas(parallel)
        for number in filter(parallel.meets_nodes, range(parallel.data_parallel_size)):
            from phalanx.executor.interfaces import open_door

            self._doors[number] = await in_daemon_thread(partial(open_door, parallel, number))
        replicas = self._replicas = Replicas(parallel, progress=self._progress, doors=self._doors)
        make_policy(scheduler.scheduling_policy)  # the engines make their own: what is wrong is said before they start
        self._router = Router(
            replicas.first,
            make=replicas.makers,
            ended=replicas.ended,
            recovery=self.config.recovery,
            places=scheduler.max_num_queued_reqs + scheduler.max_num_seqs,
            at_once=scheduler.max_num_seqs,
            renewed=self._renewed,
            routing=make_routing(parallel.routing_policy),
        )
        replicas.spawn()
        return self._router

    async def locate(self) -> Checkpoint:
        """Find the model, decide what is automatic, and tell the processes. Raises UserError."""
        from phalanx.engine.resolution import for_engine

        report = reporting(self._progress, lambda: self._closed)
        checkpoint, self.config = await in_daemon_thread(partial(self._located, report))
        self.local = await in_daemon_thread(partial(for_engine, self.config, checkpoint))
        if self._replicas is not None:
            self._replicas.configure(*self.local)
        return checkpoint

    def _located(self, report: Callable[[str, int, int], None]) -> tuple[Checkpoint, EngineConfig]:
        from phalanx.checkpoint.locate import locate
        from phalanx.engine.resolution import resolved

        model = self.config.model
        checkpoint = self._checkpoint or locate(model.model, revision=model.revision, progress=report)
        return checkpoint, resolved(self.config, checkpoint)

    async def close(self) -> None:
        """Idempotent; no process is left."""
        self._closed = True
        if self._router is not None:
            await self._router.close()
        for door in self._doors.values():
            door.close()


def reporting(progress: StartProgress | None, closed: Callable[[], bool]) -> Callable[[str, int, int], None]:
    """For a thread that fetches files: it ends by an error once `closed`, `progress` is called on this event loop."""
    loop = asyncio.get_running_loop()

    def report(what: str, done: int, total: int) -> None:
        if closed():
            raise EngineDead("The engine was closed while it was fetching the model.")
        if progress is not None:
            loop.call_soon_threadsafe(progress, "download", done / total if total else 0.0, "")

    return report


async def in_daemon_thread(call: Callable[[], _T]) -> _T:
    """Like `asyncio.to_thread`, but the interpreter does not wait for the thread when it ends: a slow download must not
    hold up Ctrl-C."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def finish(result: _T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = call()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop may be gone by now
            loop.call_soon_threadsafe(finish, result, failure)

    threading.Thread(target=run, name="phalanx-locate", daemon=True).start()
    return await future

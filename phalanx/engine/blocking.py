"""`BlockingRouter`: replicas for a caller without an event loop (`phalanx.llm`), with the face of one `Engine`.

A thread of its own runs the loop with a `Router` over the replicas; requests and outputs go through thread-safe queues.
`step` waits for outputs instead of computing. After `close` no process and no thread is left.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterable
from contextlib import aclosing

from phalanx.config import EngineConfig
from phalanx.engine.client import EngineInfo, EngineOutput, EngineRequest, EngineStatus, request_error
from phalanx.engine.loop_thread import LoopThread
from phalanx.engine.replicas import Replicas
from phalanx.engine.router import Router
from phalanx.engine.routing import make_routing
from phalanx.errors import PhalanxError, QueueFull

_WAIT_S = 0.1
"""A caller of `step` looks up so often."""


class BlockingRouter:
    def __init__(self, config: EngineConfig, name: str):
        """Starts everything; `config` is resolved and names local files. Raises UserError, EngineDead; then nothing is
        left running."""
        scheduler, recovery = config.scheduler, config.recovery
        self._places = config.parallel.data_parallel_size * (scheduler.max_num_queued_reqs + scheduler.max_num_seqs)
        self._outputs: queue.SimpleQueue[EngineOutput] = queue.SimpleQueue()
        self._open: set[str] = set()
        """Requests whose last output the caller has not seen."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = LoopThread("phalanx-router")
        self._router: Router | None = None

        async def start() -> EngineInfo:  # there, because processes end with the thread that started them
            replicas = Replicas(config.parallel)
            replicas.configure(config, name)
            self._router = Router(
                replicas.first,
                make=replicas.makers,
                ended=replicas.ended,
                recovery=recovery,
                places=self._places,
                at_once=scheduler.max_num_seqs,
                routing=make_routing(config.parallel.routing_policy),
            )
            replicas.spawn()
            return await self._router.start()

        try:
            self.info = self._thread.call(start())
        except BaseException:
            self.close()
            raise

    def add(self, request: EngineRequest) -> None:
        """Raises QueueFull."""
        if len(self._open) >= self._places:
            raise QueueFull(f"The queue is full: {self._places} requests.", retry_after=1.0)
        self._open.add(request.request_id)
        self._thread.loop.call_soon_threadsafe(self._begin, request)

    def _begin(self, request: EngineRequest) -> None:
        task = asyncio.create_task(self._answer(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: EngineRequest) -> None:
        rid, made = request.request_id, 0
        try:
            if self._router is not None:
                async with aclosing(self._router.generate(request)) as outputs:
                    async for output in outputs:
                        made = output.start + len(output.token_ids)
                        self._outputs.put(output)
        except PhalanxError as error:
            self._outputs.put(EngineOutput(rid, made, finish_reason="error", error=request_error(error)))

    def abort(self, request_ids: Iterable[str]) -> None:
        """Each gets a last output, unless it had one."""
        for request_id in request_ids:
            if self._router is not None:
                self._thread.begin(self._router.abort(request_id))

    @property
    def has_work(self) -> bool:
        return bool(self._open)

    def step(self) -> list[EngineOutput]:
        """What has come; waits a little for the first."""
        found: list[EngineOutput] = []
        try:
            found.append(self._outputs.get(timeout=_WAIT_S))
            while True:
                found.append(self._outputs.get_nowait())
        except queue.Empty:
            pass
        self._open -= {output.request_id for output in found if output.finish_reason is not None}
        return found

    def status(self) -> EngineStatus:
        return self._router.status() if self._router is not None else EngineStatus(state="loading")

    def close(self) -> None:
        """Idempotent."""
        if self._thread.loop.is_closed():
            return

        async def end() -> None:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._router is not None:
                await self._router.close()

        self._thread.call(end())
        self._thread.end()
        self._thread.loop.close()

"""`RayWorker`: the leader of one replica, with an engine of its own. A plain class; `RayDistributedEngine` makes Ray
actors of it, or of a subclass.

    class Counting(RayWorker):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.answered = 0

        def generate(self, requests):
            responses = super().generate(requests)
            self.answered += len(responses)
            return responses

The engine is a process below the leader's; its ranks are started by the executor that the options choose. While
`generate` works, `answer` tells how far it is, so that its caller can go on elsewhere when this worker is lost. Does
not know other workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import platform
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from phalanx import env
from phalanx.cluster.messages import Progress, Request, Response
from phalanx.cluster.resuming import Resuming
from phalanx.config import EngineConfig, options_by_name
from phalanx.engine.loop_thread import LoopThread
from phalanx.error_names import name_of
from phalanx.errors import ConfigError, EngineDead, InvalidRequest, PhalanxError
from phalanx.outputs import RequestOutput

if TYPE_CHECKING:
    from phalanx.engine.async_engine import AsyncEngine
    from phalanx.engine.client import EngineStatus


_BEAT_S = 5.0
"""An event loop that does not turn for so long hangs."""
_CLOSE_S = 10.0


@dataclass(frozen=True)
class Moved:
    """What is new of the answer to the request at `position` of the call."""

    position: int
    progress: Progress


@dataclass(frozen=True)
class Delta:
    position: int
    response: Response


@dataclass(frozen=True)
class Failed:
    """A call's end in an error, as data: whatever users raise need not be fit to travel."""

    kind: str
    """Name of a class in `phalanx.errors`, or empty: then it was raised by the user's code."""
    message: str
    fix: str | None = None
    param: str | None = None
    code: str | None = None


@dataclass(frozen=True)
class Done:
    responses: list[Response]


Item = Moved | Delta | Failed | Done


@dataclass
class _Call:
    """One `answer`."""

    items: queue.SimpleQueue[Item] = field(default_factory=queue.SimpleQueue)
    positions: dict[str, int] = field(default_factory=dict)
    """Of its requests, by id."""
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    abandoned: bool = False


class RayWorker:
    """`model_name` (None: the demo model) and the options of `phalanx serve` by their flat names; `environment` is
    variables to set first. A subclass may take more; it hands all of them on.

    Raises what `LLM` raises when the model cannot be loaded; then nothing is left running.
    """

    def __init__(self, **kwargs: Any):
        env.adopt(kwargs.get("environment") or {})
        options = {name: value for name, value in kwargs.items() if name in options_by_name()}
        unknown = [name for name in kwargs if name not in options and name not in ("model_name", "environment")]
        if unknown and getattr(type(self), "__ray_actor_class__", type(self)) is RayWorker:
            raise ConfigError(
                f"Unknown option '{unknown[0]}'.", fix="A subclass of RayWorker may take options of its own."
            )
        if kwargs.get("model_name") is not None:
            options["model"] = kwargs["model_name"]
        self._calls: dict[str, _Call] = {}
        """By the ids of their requests."""
        self._closed = False
        self._thread = LoopThread("phalanx-worker")
        try:
            self._engine, resuming = self._thread.call(_open(EngineConfig.from_options(**options)))
            self._loop = _Loop(self._engine, resuming)
        except BaseException:
            self._thread.end(_CLOSE_S)
            raise

    # For users and their subclasses

    def generate(self, requests: list[Request]) -> list[Response]:
        """One response a request, in order. Raises InvalidRequest and the other errors of `AsyncEngine.submit`."""
        return self._thread.call(self._loop.all(requests, self._call_of(requests)))

    def health_check(self) -> bool:
        """True. Raises EngineDead when the engine is lost for good or hangs."""
        try:
            status = self._thread.call(self._loop.status(), _BEAT_S)
        except TimeoutError:
            raise EngineDead(f"The worker's event loop has not turned for {_BEAT_S:g} s.") from None
        if status.state == "failed":
            raise EngineDead(status.cause or "The engine is lost.")
        return True

    def get_stats(self) -> dict[str, Any]:
        """What the engine is and does now; numbers as in `/status`."""
        status, info = self._thread.call(self._loop.status(), _BEAT_S), self._engine.info
        return {
            "model": info.model,
            "node": platform.node(),
            "pid": os.getpid(),
            "engine_pid": info.pid,
            "executor": info.executor,
            "mesh": dict(info.mesh),
            "state": status.state,
            "epoch": status.epoch,
            "running": status.running,
            "waiting": status.waiting,
            "computed_tokens": status.computed_tokens,
            "kv_blocks": status.blocks,
            "kv_blocks_free": status.free_blocks,
            "workers": [{"rank": w.rank, "pid": w.pid, "node": w.node, "state": w.state} for w in status.workers],
        }

    def close(self) -> None:
        """End the engine. Idempotent."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(Exception):
                self._thread.call(self._engine.close(), _CLOSE_S)
            self._thread.end(_CLOSE_S)

    # For the engine that sends requests

    def answer(self, requests: list[Request], *, stream: bool = False) -> Iterator[list[Item]]:
        """`generate`, and meanwhile how far it is; with `stream` the text as it comes, without the user's `generate`.
        The last item is Done or Failed. Ids of requests must be unique."""
        call = _Call(positions={str(request.request_id): n for n, request in enumerate(requests)})
        self._calls.update(dict.fromkeys(call.positions, call))
        work = threading.Thread(target=self._work, args=(call, requests, stream), daemon=True)
        work.start()
        try:
            last = False
            while not last:
                items = [call.items.get()]
                with contextlib.suppress(queue.Empty):
                    while True:
                        items.append(call.items.get_nowait())
                last = isinstance(items[-1], Done | Failed)
                yield items
        finally:
            self.abandon(list(call.positions))
            for request_id in call.positions:
                self._calls.pop(request_id, None)

    def abandon(self, request_ids: list[str]) -> None:
        """Nobody waits any more for the call that these requests belong to."""
        for call in {id(call): call for name in request_ids if (call := self._calls.get(name))}.values():
            call.abandoned = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._thread.loop.call_soon_threadsafe(_cancel, call)

    def _work(self, call: _Call, requests: list[Request], stream: bool) -> None:
        try:
            if stream:
                last: Item = Done(self._thread.call(self._loop.all(requests, call, stream=True)))
            else:
                last = Done(_checked(self.generate(requests), len(requests), type(self).__name__))
        except PhalanxError as error:
            last = Failed(name_of(error), error.message, error.fix, error.param, error.code)
        except Exception as error:
            text = " ".join(str(error).split())[:400]
            last = Failed(
                "", f"{type(self).__name__}.generate on {platform.node()} raised {type(error).__name__}: {text}"
            )
        except BaseException:
            last = Failed("EngineDead", "The call was ended.")
        call.items.put(last)

    def _call_of(self, requests: Sequence[Request]) -> _Call | None:
        known = (self._calls.get(request.request_id or "") for request in requests)
        return next((call for call in known if call is not None), None)


class _Loop:
    """What the worker does on its event loop. These are no methods of the worker: Ray takes a class with an `async`
    method for an actor that is one event loop, and would run `answer` and all its others there, one after another."""

    def __init__(self, engine: AsyncEngine, resuming: Resuming):
        self._engine, self._resuming = engine, resuming
        self._numbers = itertools.count()
        scheduler = engine.config.scheduler
        self._room = asyncio.Semaphore(scheduler.max_num_seqs + scheduler.max_num_queued_reqs // 2)

    async def status(self) -> EngineStatus:
        return self._engine.status()

    async def all(self, requests: Sequence[Request], call: _Call | None, *, stream: bool = False) -> list[Response]:
        tasks = [asyncio.create_task(self._one(request, call, stream)) for request in requests]
        if call is not None:
            call.tasks.update(tasks)
            if call.abandoned:
                _cancel(call)
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, request: Request, call: _Call | None, stream: bool) -> Response:
        position = None if call is None else call.positions.get(request.request_id or "")
        request_id = request.request_id or f"request-{next(self._numbers)}"
        name = f"call-{next(self._numbers)}"

        def report(progress: Progress) -> None:
            if call is not None and position is not None:
                call.items.put(Moved(position, progress))

        params = request.sampling if request.sampling is not None else self._engine.default_sampling()
        for field_name, wrong in (("n", params.n != 1), ("logprobs", params.logprobs is not None)):
            if wrong:
                raise InvalidRequest(
                    f"Request {request_id}: a response holds one answer without log-probabilities.",
                    fix=f"Leave out `{field_name}`, or use AsyncEngine.",
                    param=field_name,
                )
        self._resuming.expect(name, request.progress or Progress(), report)
        whole: RequestOutput | None = None
        try:
            async with self._room:
                answers = await self._engine.submit(request.prompt, params, request_id=name, priority=request.priority)
                async with contextlib.aclosing(answers):
                    async for delta in answers:
                        if stream and call is not None and position is not None:
                            call.items.put(Delta(position, _response(request, request_id, delta)))
                        whole = delta if whole is None else _merged(whole, delta)
        except PhalanxError as error:
            error.message = f"Request {request_id}: {error.message}"
            raise
        finally:
            self._resuming.forget(name)
        if whole is None:
            raise EngineDead(f"Request {request_id}: the engine ended the answer without saying why.")
        return _response(request, request_id, whole)


async def _open(config: EngineConfig) -> tuple[AsyncEngine, Resuming]:
    """The engine of `config`, started. Raises UserError, EngineDead; then nothing is left running."""
    from phalanx.checkpoint.locate import locate
    from phalanx.engine.async_engine import AsyncEngine
    from phalanx.engine.replicas import Replicas
    from phalanx.engine.resolution import for_engine, resolved
    from phalanx.engine.router import Router

    model = config.model
    checkpoint = await asyncio.to_thread(locate, model.model, revision=model.revision)
    config = await asyncio.to_thread(resolved, config, checkpoint)
    replicas = Replicas(config.parallel)
    replicas.configure(*for_engine(config, checkpoint))
    scheduler = config.scheduler
    router = Router(
        replicas.first,
        make=replicas.makers,
        ended=replicas.ended,
        recovery=config.recovery,
        places=scheduler.max_num_queued_reqs + scheduler.max_num_seqs,
        at_once=scheduler.max_num_seqs,
    )
    resuming = Resuming(router)
    engine = AsyncEngine(config, client=resuming, checkpoint=checkpoint)
    await engine.start()
    return engine, resuming


def _cancel(call: _Call) -> None:
    for task in call.tasks:
        task.cancel()


def _merged(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    from phalanx.engine.output_processor import merge

    return merge(first, second)


def _response(request: Request, request_id: str, output: RequestOutput) -> Response:
    """Of a delta or of the whole."""
    (choice,) = output.outputs
    prompt, made = len(output.prompt_token_ids), len(choice.token_ids)
    usage = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
    usage["cached_tokens"] = output.num_cached_tokens
    return Response(
        request_id, choice.text, list(choice.token_ids), choice.finish_reason, usage, dict(request.metadata)
    )


def _checked(responses: Any, count: int, name: str) -> list[Response]:
    """What a user's `generate` has returned. Raises PhalanxError."""
    fine = isinstance(responses, list) and all(isinstance(response, Response) for response in responses)
    if not fine or len(responses) != count:
        what = f"{len(responses)} of them" if fine else type(responses).__name__
        raise PhalanxError(
            f"{name}.generate must return a list of {count} responses, one a request in order; it returned {what}.",
            fix=f"Return what super().generate(requests) returns, changed as you like, in {name}.",
        )
    return list(responses)

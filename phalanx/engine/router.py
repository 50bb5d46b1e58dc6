"""`Router`: one `EngineClient` over several. It sends each request to the engine that `routing` says, by outstanding
work and known beginnings, and keeps a cursor on it, so that a request outlives its engine.

When an engine is lost, each of its unfinished requests goes to another one, or to the next life of the same, as prompt
and tokens delivered so far, and the stream goes on at the cursor: nothing is repeated, nothing is lost. While no engine
is there, requests wait here: as many as would have had a place, and new ones too. One that was at work whenever an
engine was lost is tried alone, then refused alone. When nothing helps, streams end with EngineDead. In the same way
requests leave an engine that is much slower than another (`relief`): first those that wait there, the youngest first,
then those that have most to do, if that is more than what is computed again; none goes back to where it came from while
others take it. What happens to a lost engine is the business of `Lives`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial

import msgspec

from phalanx.config import RecoveryConfig
from phalanx.engine.client import (
    EngineClient,
    EngineInfo,
    EngineLost,
    EngineOutput,
    EngineRequest,
    EngineState,
    EngineStatus,
    Recovery,
    request_error,
)
from phalanx.engine.cursor import Cursor
from phalanx.engine.lives import SUMMED, Lives, Unfinished, added
from phalanx.engine.loads import Loads
from phalanx.engine.poison import Quarantine, refusal
from phalanx.engine.recovery import KEPT
from phalanx.engine.relief import Move, Relief, Sight
from phalanx.engine.routing import PrefixAffinity, Routing
from phalanx.errors import EngineDead, InvalidRequest, PhalanxError, QueueFull, Recovering

log = logging.getLogger(__name__)

_LAST_WORDS_S = 5.0
"""An engine that has called itself dead may still take so long to be gone."""
_RETRY_AFTER_S = 10.0
"""While memory is missing, nobody knows for how long."""
_PATIENCE_S = 1.0
"""For an engine to have lost workers back; about what that takes on one machine."""
_LOOK_S = 0.25
"""Between two looks at who is ready and who needs relief."""


class _Engine:
    def __init__(self, number: int) -> None:
        self.number = number
        self.lives: Lives
        self.pid: int | None = None
        self.outstanding = 0
        """Tokens that the requests sent there may still need: prompt tokens to compute and output tokens to make."""
        self.members: dict[str, Cursor] = {}
        """Requests that its present life has, oldest first."""
        self.made = self.prompts = self.pending = 0
        """Tokens of answers so far, tokens of prompts of requests that have one, and of those that have none yet."""
        self.relieved = 0
        self.without_workers = 0
        """Looks in a row."""
        self.left_in = -1
        """The last epoch in which requests left because its workers were lost."""
        self.given_up = False


class Router:
    """An `EngineClient`. `clients` must not be empty; it starts, drains and closes them all.

    `make` gives another client for one that is lost: one function for all, or one each. `places` is how many requests
    may wait here while no engine is there, `at_once` how many an engine runs at a time. `renewed` is called with the
    facts of each process that takes the place of the first engine's, `ended` with the number of an engine that will
    have no other process. Without `relieve` requests stay where they are."""

    def __init__(
        self,
        clients: Sequence[EngineClient],
        *,
        make: Callable[[], EngineClient] | Sequence[Callable[[], EngineClient]] | None = None,
        recovery: RecoveryConfig | None = None,
        places: int = 2048,
        at_once: int = 256,
        renewed: Callable[[EngineInfo], None] = lambda info: None,
        ended: Callable[[int], None] = lambda number: None,
        routing: Routing | None = None,
        relieve: bool = True,
    ):
        if not clients:
            raise ValueError("a router needs at least one engine")
        makers = [make] * len(clients) if make is None or callable(make) else list(make)
        self._engines: list[_Engine] = []
        for client, maker in zip(clients, makers, strict=True):
            engine = _Engine(len(self._engines))
            engine.lives = Lives(
                client,
                maker,
                recovery or RecoveryConfig(),
                lost=partial(self._lost, engine),
                at_work=partial(self._at_work, engine),
                changed=partial(self._news, engine),
                renewed=partial(self._renew, engine),
                ended=partial(ended, engine.number),
                replica=engine.number if len(clients) > 1 else None,
            )
            self._engines.append(engine)
        self._routing = routing or PrefixAffinity()
        self._loads = Loads(len(clients))
        """Of those engines that were ready at the last look, and so they are asked again before they get a request."""
        self._relief = Relief(len(clients)) if relieve and len(clients) > 1 else None
        self._looking: asyncio.Task[None] | None = None
        self._slowness = [1.0] * len(clients)
        self._renewed = renewed
        self._places = places
        self._at_once = at_once
        self._cursors: dict[str, Cursor] = {}
        """Every unfinished request."""
        self._waiting = 0
        """Of them, those that have waited until something changes."""
        self._quarantine = Quarantine()
        self._cell = self._engines[0]
        """Where suspects are tried."""
        self._refused: set[str] = set()
        self._changed = asyncio.Event()

    @property
    def clients(self) -> list[EngineClient]:
        """Those in use now."""
        return [engine.lives.client for engine in self._engines]

    async def start(self) -> EngineInfo:
        """All at the same time. Raises what the first of them that fails raises; then none is left running."""
        starting = [asyncio.ensure_future(engine.lives.start()) for engine in self._engines]
        try:
            infos = await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            raise
        for engine, info in zip(self._engines, infos, strict=True):
            engine.pid = info.pid
            self._weigh(engine)
        if len(self._engines) > 1:
            self._looking = asyncio.create_task(self._look())
        return infos[0]

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        rid, cursor = request.request_id, Cursor.of(request)
        if rid in self._cursors:
            raise InvalidRequest(f"A request with the id '{rid}' is running.")
        self._cursors[rid] = cursor
        failed: set[EngineClient] = set()
        full: dict[_Engine, EngineOutput] = {}
        try:
            while True:
                if cursor.aborted or rid in self._refused:
                    yield self._ending(cursor)
                    return
                engine = self._choose(cursor, failed, full)
                if engine is None:
                    last_words = self._unless_it_may_wait(cursor, failed, full)
                    if last_words is not None:
                        yield last_words
                        return
                    if not cursor.accepted:
                        cursor.accepted = True
                        yield EngineOutput(rid, len(cursor.delivered))
                        continue  # time has passed
                    await self._wait(failed)
                    full.clear()
                    continue
                client = engine.lives.client
                try:
                    async with aclosing(self._run(engine, cursor)) as outputs:
                        async for output in outputs:
                            if output.error is not None and output.error.status == 503:
                                # Full or shutting down: another engine may take it. Or it calls itself dead.
                                if output.error.retry_after is None:
                                    failed.add(client)
                                full[engine] = output
                                break
                            yield output
                            if self._quarantine and self._must_leave(engine, rid):
                                break
                        else:
                            if cursor.finished or not cursor.leaving:
                                return
                except EngineDead as error:
                    failed.add(client)
                    if isinstance(error, EngineLost):
                        engine.lives.note(client, error)
                cursor.leaving = False
        finally:
            del self._cursors[rid]
            self._refused.discard(rid)
            self._forget(rid)

    async def _run(self, engine: _Engine, cursor: Cursor) -> AsyncGenerator[EngineOutput, None]:
        """What one life of `engine` has to say that is new. Raises EngineDead."""
        request = cursor.resume() if cursor.accepted else cursor.request
        rid, lives, client, members = request.request_id, engine.lives, engine.lives.client, engine.members
        prompt = len(request.prompt_token_ids) + len(request.output_token_ids)
        work = len(request.prompt_token_ids) + (request.sampling.max_tokens or 0)
        engine.pending += prompt
        members[rid] = cursor
        self._burden(engine, work)
        try:
            async with aclosing(client.generate(request)) as outputs:
                async for output in outputs:
                    if output.error is not None:
                        cursor.leaving = False
                        yield output
                        return
                    leaves = cursor.leaving and output.finish_reason == "abort" and not cursor.aborted
                    new = cursor.accept(msgspec.structs.replace(output, finish_reason=None) if leaves else output)
                    if output.token_ids:
                        done = min(work, len(output.token_ids) + prompt)
                        self._burden(engine, -done)
                        work -= done
                        engine.made += len(output.token_ids)
                        engine.prompts += prompt
                        engine.pending -= prompt
                        prompt = 0
                    if new is not None and new.token_ids:
                        self._made(rid, len(new.token_ids), lives if lives.client is client else None)
                    if new is not None:
                        yield new
                    if cursor.finished or leaves:
                        return
            raise EngineDead("The engine ended the answer without saying why.")
        except EngineLost:
            members = {}  # it stays a member until `_lost` has counted it
            raise
        finally:
            self._burden(engine, -work)
            engine.pending -= prompt
            if members.pop(rid, None) is not None and self._waiting:
                self._wake()

    # Who goes where

    def _burden(self, engine: _Engine, tokens: int) -> None:
        """It has so many more to work on."""
        engine.outstanding += tokens
        if self._loads[engine.number] is not None:
            self._loads.set(engine.number, engine.outstanding * self._slowness[engine.number])

    def _weigh(self, engine: _Engine) -> None:
        """Whether it can take requests, and what it has to do."""
        load = engine.outstanding * self._slowness[engine.number]
        self._loads.set(engine.number, load if engine.lives.ready else None)

    def _choose(self, cursor: Cursor, failed: set[EngineClient], full: dict[_Engine, EngineOutput]) -> _Engine | None:
        """Where the request goes. The routing's choice among all that are ready, if this request may go there: so it
        is for nearly all, and it takes no longer when there are many engines."""
        while self._loads.able > 1:
            engine = self._engines[self._routed(cursor, self._loads)]
            if not engine.lives.ready:
                self._loads.set(engine.number, None)
            elif engine in full or engine.lives.client in failed or engine.number in cursor.left:
                break
            elif self._admits(engine, cursor):
                return engine
            else:
                break
        return self._choose_among_all(cursor, failed, full)

    def _choose_among_all(
        self, cursor: Cursor, failed: set[EngineClient], full: dict[_Engine, EngineOutput]
    ) -> _Engine | None:
        """Among those engines that may take this request. Those that are not ready come last, and before them those
        that it has left because they were slow."""
        able = [
            engine
            for engine in self._engines
            if engine not in full
            and engine.lives.client not in failed
            and engine.lives.usable
            and self._admits(engine, cursor)
        ]
        if len(able) > 1:
            states = {engine: engine.lives.client.status().state for engine in able}
            able = [engine for engine in able if states[engine] == "ready"] or (
                [engine for engine in able if states[engine] != "draining"] or able
            )
            able = [engine for engine in able if engine.number not in cursor.left] or able
        if len(able) <= 1:
            return able[0] if able else None
        loads: list[float | None] = [None] * len(self._engines)
        for engine in able:
            loads[engine.number] = engine.outstanding * self._slowness[engine.number]
        return self._engines[self._routed(cursor, Loads.of(loads))]

    def _routed(self, cursor: Cursor, loads: Loads) -> int:
        """The routing's choice, if it is one: a policy of somebody else's cannot send a request where none can go."""
        chosen = self._routing.choose(cursor.request, loads)
        able = 0 <= chosen < len(loads) and loads[chosen] is not None
        return chosen if able else loads.least()

    def _admits(self, engine: _Engine, cursor: Cursor) -> bool:
        """While there are suspects, one engine is theirs, one at a time."""
        alone = self._quarantine.alone
        if alone is None:
            return True
        if self._cell.lives.gone is not None:
            self._cell = next((each for each in self._engines if each.lives.gone is None), self._cell)
        if cursor.request_id == alone:
            return engine is self._cell and not engine.members
        return engine is not self._cell

    def _must_leave(self, engine: _Engine, request_id: str) -> bool:
        """Whether a request has to make room for a suspect; it goes on later."""
        alone = self._quarantine.alone
        return alone is not None and engine is self._cell and alone != request_id

    def _unless_it_may_wait(
        self, cursor: Cursor, failed: set[EngineClient], full: dict[_Engine, EngineOutput]
    ) -> EngineOutput | None:
        """None when a request that no engine takes now is to wait here; else its last output. Raises EngineDead."""
        lives = [engine.lives for engine in self._engines]
        returning = [each for each in lives if each.comes_back]
        able = [each for each in self._engines if each.lives.usable and each.lives.client not in failed]
        if not returning and not able and not any(each.usable for each in lives):
            raise next((each.gone for each in lives if each.gone is not None), None) or EngineDead(
                "The engine is gone."
            )
        if cursor.accepted:
            leaving = [each for each in able if each in full and each.lives.client.status().state == "draining"]
            return full[leaving[0]] if leaving and len(leaving) == len(able) and not returning else None
        if able and all(engine in full for engine in able) and not returning:
            return next(iter(full.values()))
        refused = self._no_room(returning if not able else [])
        if refused is None:
            return None
        return EngineOutput(
            cursor.request_id, len(cursor.delivered), finish_reason="error", error=request_error(refused)
        )

    def _no_room(self, returning: list[Lives]) -> PhalanxError | None:
        """Why a new request cannot wait for one of `returning`."""
        recoveries = [each.status().recovery for each in returning]
        for recovery in recoveries:
            if recovery is not None and recovery.plan == "wait":
                words = f"The engine waits for what it needs: {recovery.missing}"
                return Recovering(words, retry_after=_RETRY_AFTER_S)
        if len(self._cursors) > self._places:
            wait = max((recovery.estimate or 1.0 for recovery in recoveries if recovery is not None), default=1.0)
            return QueueFull(f"The queue is full: {self._places} requests wait already.", retry_after=wait)
        return None

    async def _wait(self, failed: set[EngineClient]) -> None:
        """Until something has changed. Raises EngineDead when only engines are left that have failed this request and
        do not end."""
        self._waiting += 1
        try:
            await asyncio.wait_for(self._changed.wait(), _LAST_WORDS_S if self._helpless(failed) else None)
        except TimeoutError:
            if self._helpless(failed):
                raise EngineDead("The engine takes no requests any more.") from None
        finally:
            self._waiting -= 1

    def _helpless(self, failed: set[EngineClient]) -> bool:
        lives = [engine.lives for engine in self._engines]
        return not any(each.comes_back or (each.usable and each.client not in failed) for each in lives)

    def _wake(self) -> None:
        """Whoever waits looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    # Slow engines

    async def _look(self) -> None:
        """Which engines are ready, and which are slow, as long as there are engines."""
        last, seen = time.monotonic(), [(0, 0)] * len(self._engines)
        while True:
            await asyncio.sleep(_LOOK_S)
            now = time.monotonic()
            move = None if self._relief is None else self._relief.look(self._sights(seen), now - last)
            last = now
            if self._relief is not None:
                self._slowness = self._relief.slowness()
            for engine in self._engines:
                self._weigh(engine)
            for engine in self._engines:
                await self._leave_if_lost(engine)
            if move is not None and self._quarantine.alone is None:
                await self._move(move)

    def _sights(self, seen: list[tuple[int, int]]) -> list[Sight]:
        """What has happened since `seen`, which is brought up to date."""
        sights = []
        for engine in self._engines:
            made, prompts = engine.made, engine.prompts
            before, seen[engine.number] = seen[engine.number], (made, prompts)
            new, computed = made - before[0], prompts - before[1]
            sights.append(Sight(engine.lives.ready, len(engine.members), new, computed, engine.pending))
        return sights

    async def _move(self, move: Move) -> None:
        source = self._engines[move.source]
        able = [c for c in source.members.values() if c.accepted and not (c.finished or c.leaving or c.aborted)]
        able = [c for c in reversed(able) if move.target not in c.left]
        fresh = [c for c in able if not c.delivered][: source.lives.client.status().waiting]
        begun = sorted((c for c in able if c not in fresh), key=lambda c: c.tokens_left, reverse=True)
        for cursor in [*fresh, *(c for c in begun if c.worth_moving)][: move.count]:
            cursor.leaving = True
            cursor.left.add(source.number)
            source.relieved += 1
            await source.lives.client.abort(cursor.request_id)

    async def _leave_if_lost(self, engine: _Engine) -> None:
        """When an engine has lost its workers and not got them back at once, its requests go on elsewhere: what they
        had must be computed again anyway."""
        recovery = None if self._loads[engine.number] is not None else engine.lives.client.status().recovery
        if recovery is None:
            engine.without_workers = 0
            return
        engine.without_workers += 1
        soon = recovery.plan != "wait" and engine.without_workers * _LOOK_S < _PATIENCE_S
        if soon or not engine.members or not self._loads.able:
            return
        able = [c for c in engine.members.values() if c.accepted and not (c.finished or c.leaving or c.aborted)]
        if able and engine.left_in != recovery.epoch:  # it may be one of them that ends workers wherever it runs
            engine.left_in = recovery.epoch
            self._refuse(self._quarantine.lost([cursor.request_id for cursor in able[: self._at_once]]))
            self._cell = self._engines[self._loads.least()]
            log.warning("Engine %d has lost workers; %d requests go on elsewhere.", engine.number, len(able))
        for cursor in able:
            cursor.leaving = True
            engine.relieved += 1
            await engine.lives.client.abort(cursor.request_id)

    # What happens to requests

    def _refuse(self, request_ids: list[str]) -> None:
        for rid in request_ids:
            log.error("Request %s is refused: an engine was lost each time it ran, at last while it ran alone.", rid)
            self._refused.add(rid)

    def _renew(self, engine: _Engine, info: EngineInfo) -> None:
        engine.pid = info.pid
        if self._relief is not None:
            self._relief.forget(engine.number)
        self._weigh(engine)
        if engine.number == 0:
            self._renewed(info)

    def _news(self, engine: _Engine) -> None:
        gone = engine.lives.gone
        if gone is not None and not engine.given_up and len(self._engines) > 1:
            engine.given_up = True
            log.error("Engine %d is given up, the others go on: %s", engine.number, gone.message)
        self._weigh(engine)
        self._wake()

    def _made(self, request_id: str, tokens: int, lives: Lives | None) -> None:
        if lives is not None:
            lives.moved()
        if not self._quarantine:
            return
        alone = self._quarantine.alone
        self._quarantine.made(request_id, tokens)
        if alone is not None and self._quarantine.alone != alone:
            self._wake()

    def _forget(self, request_id: str) -> None:
        alone = self._quarantine.alone
        self._quarantine.ended(request_id)
        if alone is not None and self._quarantine.alone != alone:
            self._wake()

    def _lost(self, engine: _Engine) -> Unfinished:
        """The present life of `engine` is over."""
        members, engine.members = engine.members, {}
        self._routing.forget(engine.number)
        unfinished = [cursor for rid, cursor in members.items() if self._cursors.get(rid) is cursor]
        # More cannot have been at work; they are served in order.
        refused = self._quarantine.lost([cursor.request_id for cursor in unfinished[: self._at_once]])
        self._refuse(refused)
        if self._quarantine.alone is not None:
            self._cell = engine
        going_on = [cursor for cursor in unfinished if cursor.request_id not in self._refused]
        tokens = sum(cursor.tokens for cursor in going_on)
        others = [other for other in self._engines if other is not engine]
        count = len(self._cursors) - sum(len(other.members) for other in others) - len(refused)
        return Unfinished(count, tokens, bool(refused), elsewhere=any(other.lives.ready for other in others))

    def _at_work(self, engine: _Engine) -> int:
        return len(engine.members)

    def _ending(self, cursor: Cursor) -> EngineOutput:
        rid, start = cursor.request_id, len(cursor.delivered)
        if cursor.aborted:
            return EngineOutput(rid, start, finish_reason="abort")
        return EngineOutput(rid, start, finish_reason="error", error=request_error(refusal()))

    async def abort(self, request_id: str) -> None:
        cursor = self._cursors.get(request_id)
        if cursor is not None:
            cursor.aborted = True
        for engine in self._engines:
            if request_id in engine.members:
                await engine.lives.client.abort(request_id)
                return
        self._wake()

    # All engines together

    def status(self) -> EngineStatus:
        """The engine's own when there is one; sums, and the best state, of several."""
        statuses = [engine.lives.status() for engine in self._engines]
        seen = [msgspec.structs.replace(own) for own in statuses]
        status = statuses[0] if len(statuses) == 1 else _merge(statuses)
        status.waiting += len(self._cursors) - sum(len(engine.members) for engine in self._engines)
        status.engines = [
            EngineState(
                pid=engine.pid,
                state=own.state,
                epoch=own.epoch,
                running=own.running,
                waiting=own.waiting,
                outstanding=engine.outstanding,
                slowness=round(slowness, 2),
                relieved=engine.relieved,
            )
            for engine, own, slowness in zip(self._engines, seen, self._slowness, strict=True)
        ]
        return status

    async def lost(self) -> EngineLost:
        """When the last engine is given up."""
        while True:
            gone = [engine.lives.gone for engine in self._engines]
            losses = [loss for loss in gone if loss is not None]
            if len(losses) == len(self._engines):
                return losses[-1]
            await self._changed.wait()

    async def drain(self, timeout: float) -> bool:
        return all(await asyncio.gather(*(engine.lives.drain(timeout) for engine in self._engines)))

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await asyncio.gather(*(engine.lives.close() for engine in self._engines))
        self._wake()


_BEST_FIRST = ("ready", "recovering", "loading", "draining", "failed")


def _merge(statuses: list[EngineStatus]) -> EngineStatus:
    best = min(statuses, key=lambda status: _BEST_FIRST.index(status.state))
    failures: dict[str, int] = {}
    for number, status in enumerate(statuses):
        failures = added(failures, status.failures)
        status.recoveries = [msgspec.structs.replace(each, engine=number) for each in status.recoveries]
        if status.recovery is not None:
            status.recovery = msgspec.structs.replace(status.recovery, engine=number)
    ranks = max(len(status.workers) for status in statuses)
    workers = [
        msgspec.structs.replace(worker, rank=number * ranks + worker.rank)
        for number, status in enumerate(statuses)
        for worker in status.workers
    ]
    recoveries: list[Recovery] = sorted(
        (recovery for status in statuses for recovery in status.recoveries), key=lambda recovery: recovery.since
    )
    return EngineStatus(
        state=best.state,
        epoch=sum(status.epoch for status in statuses),
        cause=next((status.cause for status in statuses if status.cause), None),
        since=best.since,
        heartbeat=max(status.heartbeat for status in statuses),
        ranks=sum(status.ranks for status in statuses),
        returned="; ".join(status.returned for status in statuses if status.returned) or None,
        workers=workers,
        recovery=next((status.recovery for status in statuses if status.recovery is not None), None),
        recoveries=recoveries[-KEPT:],
        failures=failures,
        hang_bound=max(status.hang_bound for status in statuses),
        **{name: sum(getattr(status, name) for status in statuses) for name in SUMMED},
    )

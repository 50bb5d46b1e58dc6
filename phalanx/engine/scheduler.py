"""Who runs now: turns the requests at hand into one `StepPlan` a step, and each `StepResult` into outputs.

There is no prefill and no decode here: a step gives every request some of the tokens that it still has to compute,
under one budget. A request that has computed all of its tokens samples the next one, and has one to compute again.

    schedule   running requests first, in order of (priority, arrival); the budget keeps one token for each of them, so
               a long prompt cannot stall the others; what is left goes to admissions, in the order of the queue; where
               several plans are in flight, prompts are computed in smaller pieces, so that no stage waits long for one
    apply      tokens, log-probabilities, failures and finished requests; blocks become findable here, once computed

A request is admitted when blocks for everything known of it are free. When a running one needs a block and none is
free, the last one in order is preempted. Preemption is release, resuming is admission, recovery is both. There is no
third case. A request in flight (its plan submitted, the result not back) is left alone: not preempted, planned only for
more of what is known of it, and when it is aborted its slot and blocks are released with its last result.

Where speculation is wanted, a running request that has one token to compute may get proposed ones beside it
(`phalanx.engine.speculation`): within the budget, in blocks that nobody needs, as far as its last token and its grammar
allow. Those that come true are its tokens, as if drawn one by one; the others leave nothing but blocks it will use.

A request that the whole cache cannot hold any more (workers that were lost left a smaller one) is parked: it is neither
running nor in the queue until a larger cache comes, and says so in the log.

Guarantees: the first running request can always go on, so some request always makes progress; whose turn it is, is not
overtaken for want of memory; every request that was added ends in exactly one output with a finish reason.

Covers policy and bookkeeping. Does no I/O, reads no clock (`now`, in seconds, is passed in), compiles no grammars.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from phalanx.config import SchedulerConfig
from phalanx.engine.client import EngineOutput, RequestError, request_error
from phalanx.engine.kv_blocks import BlockPool, extend_hashes
from phalanx.engine.plan_draft import MAX_ROW_TOKENS, PlanDraft, Row
from phalanx.engine.queue import WaitingQueue
from phalanx.engine.request import Request, error_output
from phalanx.engine.scheduling import make_policy
from phalanx.engine.speculation import Proposer
from phalanx.errors import InvalidRequest, PhalanxError, Recovering
from phalanx.executor.base import CacheLayout, WorkerDied
from phalanx.metrics.speculation import SpeculationCounts
from phalanx.step import PromptLogprobs, RowFailure, StepPlan, StepResult, TokenLogprobs, unpack

_log = logging.getLogger(__name__)

_PIECES = 4
"""Into so many a plan's share of a step's tokens is cut where several plans are in flight: stages of a pipeline wait
while the first piece of the prompts is on its way to them, and behind the last one."""
_LEAST_PIECE = 256
"""Tokens; with fewer, what a plan costs by itself would count."""


@dataclass
class Counters:
    """Since the start."""

    steps: int = 0
    step_seconds: float = 0.0
    computed_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    """Tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)


class _Answer(NamedTuple):
    """What one row of a result says."""

    tokens: Sequence[int]
    """Empty for a row that does not sample."""
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: PromptLogprobs | None
    failure: RowFailure | None


class Scheduler:
    def __init__(
        self,
        config: SchedulerConfig,
        layout: CacheLayout,
        *,
        prefix_caching: bool = True,
        max_in_flight: int = 1,
    ) -> None:
        self._config = config
        self._prefix_caching = prefix_caching
        self._max_in_flight = max_in_flight
        self._step_id = 0
        self._speculation, self._most_sampled = config.speculation, config.max_num_sampled
        self.counters = Counters()
        if self._speculation is not None:
            self.counters.speculation.accepted_at = [0] * self._speculation.num_speculative_tokens
        self.requests: dict[str, Request] = {}
        """Everyone waiting or running."""
        self.queue = WaitingQueue(config.max_num_queued_reqs, make_policy(config.scheduling_policy))
        self.running: list[Request] = []
        """In order of (priority, arrival)."""
        self.parked: dict[str, Request] = {}
        """Those that the cache cannot hold."""
        self.only: str | None = None
        """When set, no other request runs."""
        self._outputs: list[EngineOutput] = []
        self._most_blocks = 0
        self._forget_workers(0, layout)

    def _forget_workers(self, epoch: int, layout: CacheLayout) -> None:
        self.epoch = epoch
        self._layout = layout
        self._most_blocks = max(self._most_blocks, layout.blocks)
        self.pool = BlockPool(layout.blocks, layout.block_size, caching=self._prefix_caching)
        self._in_flight: deque[PlanDraft] = deque()
        self._free_slots = list(reversed(range(self._config.max_num_seqs)))
        self._released: list[int] = []
        """Slots that the workers still believe in use."""

    # Requests come and go

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self._in_flight or self._outputs)

    @property
    def step_id(self) -> int:
        return self._step_id

    def check(self, request: Request, now: float, *, elsewhere: int = 0) -> None:
        """Raise what would refuse `request`: InvalidRequest, QueueFull, Recovering. `elsewhere` counts requests that
        were checked and are not added yet."""
        if request.request_id in self.requests:
            raise InvalidRequest("A request with this id is already running.", param="request_id")
        self._check_fits(request)
        if not request.resumed:
            owner = request.given.owner
            self.queue.check_room(now, owner=owner, elsewhere=elsewhere, free_slots=len(self._free_slots))

    def _check_fits(self, request: Request) -> None:
        """Alone in the pool, a request must be able to reach its last token, which itself is never computed. One that
        was accepted before, when the cache was larger, may try."""
        needed = self.pool.blocks_for(request.max_total - 1)
        room = self.pool.blocks * self.pool.block_size
        if needed > self._most_blocks:
            raise InvalidRequest(
                f"The request may come to {request.max_total} tokens, but the KV cache holds {room}.",
                fix="Ask for fewer tokens, or start the server with a larger KV cache.",
                param="max_tokens",
            )
        if needed > self.pool.blocks and not request.resumed:
            raise Recovering(
                f"The request may come to {request.max_total} tokens, but since workers were lost the KV cache holds "
                f"{room}.",
                fix="Ask for fewer tokens, or try again later.",
                retry_after=30.0,
            )

    def add(self, request: Request, now: float) -> None:
        """Put a checked request into the queue. Its first output, without tokens, says so."""
        if self._speculation is not None:
            request.proposer = Proposer(self._speculation)
        self.requests[request.request_id] = request
        self._queue_or_park(request, now)
        self._outputs.append(EngineOutput(request.request_id, request.num_output))
        reason, stop_token = request.finish()
        if reason is not None:  # resumed after its last token
            self._end(request, self._finished(request, reason, stop_token), now)

    def _queue_or_park(self, request: Request, now: float) -> None:
        if self._fits(request):
            self.queue.push(request)
        else:
            self._park(request, now)

    def _fits(self, request: Request) -> bool:
        """The tokens it has come to so far, alone in the pool."""
        return self.pool.blocks_for(len(request.tokens)) <= self.pool.blocks

    def _park(self, request: Request, now: float) -> None:
        if request.parked_s is None:
            request.parked_s = now
            _log.warning(
                "Request %r has come to %d tokens and must wait: since workers were lost the KV cache holds %d.",
                request.request_id, len(request.tokens), self.pool.blocks * self.pool.block_size,
            )  # fmt: skip
        self.parked[request.request_id] = request

    def end_parked(self, before: float, now: float) -> None:
        """Those parked since `before` or longer have waited enough."""
        for request in [each for each in self.parked.values() if each.parked_s is not None and each.parked_s <= before]:
            refusal = Recovering(
                f"The request has come to {len(request.tokens)} tokens, but since workers were lost the KV cache holds "
                f"{self.pool.blocks * self.pool.block_size}, and nothing has come back in time."
            )
            self.fail(request, refusal, now)

    def abort(self, request_id: str, now: float) -> None:
        """An unknown id is ignored: the request may just have ended."""
        request = self.requests.get(request_id)
        if request is not None:
            self._end(request, self._finished(request, "abort"), now)

    def fail(self, request: Request, error: Exception, now: float) -> None:
        """End this request only."""
        if not isinstance(error, PhalanxError):
            _log.error("request %r failed in the engine", request.request_id, exc_info=error)
        self._end(request, error_output(request, request_error(error)), now)

    def take_outputs(self) -> list[EngineOutput]:
        """What is new since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def _finished(self, request: Request, reason: str, stop_token: int | None = None) -> EngineOutput:
        return EngineOutput(request.request_id, request.num_output, finish_reason=reason, stop_token_id=stop_token)

    def _end(self, request: Request, output: EngineOutput, now: float) -> None:
        request.finished = True
        del self.requests[request.request_id]
        if self.parked.pop(request.request_id, None) is not None:
            pass
        elif request.slot is None:
            self.queue.remove(request, now)
        else:
            self.running.remove(request)
            if not request.in_flight:
                self._release(request)
        self._outputs.append(output)

    def _release(self, request: Request) -> None:
        """Give back slot and blocks."""
        if request.slot is not None:
            self._free_slots.append(request.slot)
            if request.num_sent:
                self._released.append(request.slot)
        self.pool.free(request.blocks)
        request.slot = None
        request.num_computed = request.num_sent = 0

    def _requeue(self, request: Request, now: float) -> None:
        """Out of the running, to be admitted again with the tokens it has."""
        self.running.remove(request)
        self._release(request)
        request.resumed = True
        self._queue_or_park(request, now)

    # Planning

    def schedule(self, now: float) -> StepPlan | None:
        """The next plan, or None when nobody can run. Its result must be applied before any later one's."""
        if self.only is not None:
            for request in tuple(self.running):
                if request.request_id != self.only and not request.in_flight:
                    self._requeue(request, now)
        share = -(-len(self.running) // self._max_in_flight)  # of each plan in flight, so that every stage has work
        draft = PlanDraft(self.epoch, self._step_id + 1, self._budget(share), self._layout.vocab_size)
        self._continue_running(draft, share, now)
        self._admit_waiting(draft, now)
        if not draft.rows:
            return None
        self._step_id = draft.step_id
        self._in_flight.append(draft)
        released, self._released = self._released, []
        return draft.plan(released)

    def _budget(self, rows: int) -> int:
        """Tokens of a plan that goes on with `rows` requests."""
        most = self._config.max_num_batched_tokens
        if self._max_in_flight == 1:
            return most
        return min(most, max(_LEAST_PIECE, most // (_PIECES * self._max_in_flight)) + rows)

    def _continue_running(self, draft: PlanDraft, share: int, now: float) -> None:
        ready = [request for request in self.running if request.num_to_plan][:share]
        if self._speculation is not None:
            rows = len(ready) + min(len(self._free_slots), len(self.queue))
            draft.proposals = self._most_sampled - rows
        for position, request in enumerate(ready):
            if not draft.budget:
                break
            if request.slot is None:  # preempted by one before it
                continue
            kept = len(ready) - position - 1
            count = min(request.num_to_plan, max(1, draft.budget - kept), MAX_ROW_TOKENS)
            fresh = self._grow(request, request.num_computed + request.in_flight + count, now)
            if fresh is not None:
                proposed = self._propose(draft, request, count, kept, len(ready)) if draft.proposals > 0 else []
                if proposed:
                    fresh += self.pool.append(request.blocks, len(request.tokens) + len(proposed)) or []
                self._place(draft, request, count, fresh, now, proposed)

    def _propose(self, draft: PlanDraft, request: Request, count: int, kept: int, sharing: int) -> list[int]:
        """Tokens to compute beside the next `count`, for which there are blocks; those after it keep a token each of
        the budget, and everyone running a free block. `sharing` requests share the step."""
        proposer = request.proposer
        if proposer is None or count > 1 or request.num_to_compute > 1:
            return []
        room = min(draft.budget - kept - 1, draft.proposals, request.max_total - len(request.tokens) - 1)
        proposed = proposer.propose(request.tokens, room, sharing)
        if not proposed:
            return proposed
        spare = max(0, self.pool.num_free - len(self.running)) + len(request.blocks)
        return proposed[: max(0, spare * self.pool.block_size - len(request.tokens))]

    def _grow(self, request: Request, tokens: int, now: float) -> list[int] | None:
        """Give `request` blocks for `tokens` tokens, at the cost of those after it. None when it must wait."""
        while (fresh := self.pool.append(request.blocks, tokens)) is None:
            if not self._fits(request):  # nobody's going would help
                self._requeue(request, now)
                return None
            victim = next(other for other in reversed(self.running) if other is request or not other.in_flight)
            if victim is request:
                return None
            self.counters.preemptions += 1
            self._requeue(victim, now)
        return fresh

    def _admit_waiting(self, draft: PlanDraft, now: float) -> None:
        if not draft.budget or not self._free_slots:
            return
        for request in self.queue:
            if self.only not in (None, request.request_id):
                continue
            cached = self._cached_blocks(request)
            if cached is None:
                continue
            # One free block for each running request: an admission should not cause the next preemption.
            table = self.pool.allocate(cached, len(request.tokens), spare=len(self.running))
            if table is None:
                break
            self._admit(request, table, len(cached), now)
            count = min(request.num_to_compute, draft.budget, MAX_ROW_TOKENS)
            self._place(draft, request, count, table, now)
            if not draft.budget or not self._free_slots:
                break

    def _cached_blocks(self, request: Request) -> list[int] | None:
        """The cached blocks it can begin with, never all of its tokens: one must be left to compute. None when the
        next block is being computed by a running request, so that waiting is cheaper than computing it twice."""
        if not self._prefix_caching or request.wants_prompt_logprobs():
            return []
        if request.awaits is not None and self.pool.is_expected(request.awaits):
            return None
        self._extend_hashes(request)
        usable = request.hashes[: (len(request.tokens) - 1) // self.pool.block_size]
        cached = self.pool.lookup(usable)
        following = usable[len(cached) : len(cached) + 1]
        request.awaits = following[0] if following and self.pool.is_expected(following[0]) else None
        return None if request.awaits is not None else cached

    def _admit(self, request: Request, table: list[int], num_cached: int, now: float) -> None:
        self.queue.remove(request, now)
        insort(self.running, request, key=Request.order)
        request.slot = self._free_slots.pop()
        request.blocks = table
        request.num_found = num_cached
        request.num_computed = num_cached * self.pool.block_size
        if self._prefix_caching and not request.wants_prompt_logprobs():
            self.counters.prefix_queries += len(request.tokens)
            self.counters.prefix_hits += request.num_computed
        if not request.resumed:
            self.queue.policy.admitted(request, len(request.tokens) - request.num_computed)
        if request.scheduled_s is None:
            request.scheduled_s = now
            request.num_cached = min(request.num_computed, request.num_prompt)
        if self._prefix_caching:
            self._extend_hashes(request)
            for block, block_hash in zip(table[num_cached:], request.hashes[num_cached:], strict=False):
                self.pool.expect(block, block_hash)

    def _place(
        self, draft: PlanDraft, request: Request, count: int, fresh: list[int], now: float, proposed: Sequence[int] = ()
    ) -> None:
        try:
            draft.add(request, count, fresh, proposed)
        except Exception as error:  # its grammar's; nobody else may suffer from it
            self.fail(request, error, now)

    def _extend_hashes(self, request: Request) -> None:
        # The class comes first, so that no salt a client chooses can stand for another class.
        salt = f"{bisect_left(self._layout.prompt_classes, request.num_prompt)}:{request.given.cache_salt}"
        extend_hashes(request.hashes, request.tokens, self.pool.block_size, salt)

    # Results

    def apply(self, result: StepResult, now: float) -> list[EngineOutput]:
        """What is new after `result`, which must answer the oldest plan in flight. Raises WorkerDied when it does not:
        workers that answer something else than they were asked cannot be trusted with the next plan."""
        if not self._in_flight:
            raise WorkerDied(0, f"it answered step {result.step_id}, which nobody asked for")
        draft = self._in_flight[0]
        answers = _read(draft, result)
        self._in_flight.popleft()
        self.counters.steps += 1
        self.counters.step_seconds += result.compute_s
        for row, answer in zip(draft.rows, answers, strict=True):
            request = row.request
            request.in_flight -= row.count
            if request.finished:
                if not request.in_flight:
                    self._release(request)
                continue
            try:
                self._advance(request, row, answer, len(draft.rows), now)
            except Exception as error:
                self.fail(request, error, now)
        return self.take_outputs()

    def _advance(self, request: Request, row: Row, answer: _Answer, sharing: int, now: float) -> None:
        if answer.failure is not None:
            if answer.failure.asked_for:
                error = request_error(InvalidRequest(answer.failure.message, fix="Relax them."))
            else:
                error = RequestError(answer.failure.message)
                self.pool.retract(request.blocks[request.num_found :])  # it must not fail whoever shares them, too
            self._end(request, error_output(request, error), now)
            return
        self.counters.computed_tokens += row.count + len(row.proposed)
        request.num_computed += row.count
        self._publish(request, request.num_computed - row.count)
        piece = answer.prompt_logprobs
        prompt_logprobs = request.new_prompt_logprobs(piece) if piece is not None else None
        if not answer.tokens:
            if prompt_logprobs:
                self._outputs.append(
                    EngineOutput(request.request_id, request.num_output, prompt_logprobs=prompt_logprobs)
                )
            return
        start = request.num_output
        try:
            reason, stop_token = self._append_all(request, answer.tokens)
        except Exception:
            if request.num_output > start:
                self._outputs.append(_news(request, start, answer, prompt_logprobs))
            raise
        output = _news(request, start, answer, prompt_logprobs, reason, stop_token)
        if row.proposed:
            self.counters.speculation.note(len(row.proposed), len(output.token_ids) - 1)
            if request.proposer is not None:
                request.proposer.settle(len(row.proposed), len(output.token_ids) - 1, sharing)
        if reason is None:
            self._outputs.append(output)
        else:
            self._end(request, output, now)

    def _append_all(self, request: Request, tokens: Sequence[int]) -> tuple[str | None, int | None]:
        """Append tokens until one ends the request; all but the last of these are computed. As `Request.finish`."""
        for place, token in enumerate(tokens):
            if place:
                request.num_computed += 1
                self._publish(request, request.num_computed - 1)
            self._append(request, token)
            reason, stop_token = request.finish()
            if reason is not None:
                return reason, stop_token
        return None, None

    def _publish(self, request: Request, before: int) -> None:
        """Make the blocks findable that became full since `before` tokens were computed."""
        size = self.pool.block_size
        full = range(before // size, request.num_computed // size)
        if self._prefix_caching and full:
            self._extend_hashes(request)
            for index in full:
                self.pool.publish(request.blocks[index], request.hashes[index])

    def _append(self, request: Request, token: int) -> None:
        if not 0 <= token < self._layout.vocab_size:
            raise PhalanxError(f"The worker drew token {token}, which is not in the vocabulary.")
        if (
            request.grammar is not None
            and token not in request.given.eos_token_ids
            and not request.grammar.accept(token)
        ):
            raise PhalanxError(f"The worker drew token {token}, which the grammar does not allow here.")
        request.tokens.append(token)
        request.parked_s = None
        self.counters.output_tokens += 1
        self.queue.policy.made(request)

    # Recovery

    def at_work(self) -> list[str]:
        """Who was being computed when this was asked."""
        return [row.request.request_id for draft in self._in_flight for row in draft.rows if not row.request.finished]

    def fence(self, now: float) -> None:
        """The workers are gone: everyone who ran waits to be admitted again, and a new epoch begins, in which nothing
        is known or cached. No plan may be made before `restart`."""
        self._in_flight.clear()
        for request in tuple(self.running):
            request.in_flight = 0
            self._requeue(request, now)
        self._forget_workers(self.epoch + 1, self._layout)

    def restart(self, layout: CacheLayout, now: float, *, max_in_flight: int) -> None:
        """The epoch's workers are ready and know nothing. A request that the new cache cannot hold is parked, one that
        it can hold again goes on."""
        self._max_in_flight = max_in_flight
        self._forget_workers(self.epoch, layout)
        for request in tuple(self.queue):
            if not self._fits(request):
                self.queue.remove(request, now)
                self._park(request, now)
        for request in [each for each in self.parked.values() if self._fits(each)]:
            del self.parked[request.request_id]
            self.queue.push(request)

    def fail_all(self, error: Exception, now: float) -> None:
        """After `fence`."""
        for request in tuple(self.requests.values()):
            self.fail(request, error, now)

    def check_invariants(self) -> None:
        """Raise RuntimeError when slots, blocks or places are inconsistent."""
        held = {id(request): request for request in self.running}
        held |= {id(row.request): row.request for draft in self._in_flight for row in draft.rows}
        self.pool.check_invariants([request.blocks for request in held.values()])
        slots = sorted([request.slot for request in held.values() if request.slot is not None] + self._free_slots)
        if slots != list(range(self._config.max_num_seqs)):
            raise RuntimeError("A slot is lost or has two requests.")
        if len(self.running) + len(self.queue) + len(self.parked) != len(self.requests):
            raise RuntimeError("A request is in two places or in none.")


def _news(
    request: Request, start: int, answer: _Answer, prompt_logprobs: list[TokenLogprobs] | None,
    reason: str | None = None, stop_token: int | None = None,
) -> EngineOutput:  # fmt: skip
    """Its output tokens from `start` on, with what `answer` says of them."""
    first = start == len(request.given.output_token_ids)
    tokens = request.tokens[request.num_prompt + start :]
    return EngineOutput(
        request.request_id,
        start,
        tokens,
        logprobs=answer.logprobs[: len(tokens)] if answer.logprobs is not None else None,
        prompt_logprobs=prompt_logprobs or None,
        finish_reason=reason,
        stop_token_id=stop_token,
        num_cached_tokens=(request.num_cached or 0) if first else 0,
        scheduled_s=request.scheduled_s if first else None,
        queued_s=request.queued_s if first else None,
    )


def _read(draft: PlanDraft, result: StepResult) -> list[_Answer]:
    """One answer for each row of `draft`. Raises WorkerDied when `result` does not answer that plan, row for row."""
    if (result.epoch, result.step_id) != (draft.epoch, draft.step_id):
        raise WorkerDied(
            0,
            f"it answered step {result.step_id} of epoch {result.epoch} "
            f"when step {draft.step_id} of epoch {draft.epoch} was due",
        )
    slots, drawn = unpack(result.slots, "H"), unpack(result.tokens)
    failures = {failure.slot: failure for failure in result.failures}
    prompt_logprobs = {piece.slot: piece for piece in result.prompt_logprobs}
    tokens: dict[int, list[int]] = {}
    for slot, token in zip(slots, drawn, strict=False):
        tokens.setdefault(slot, []).append(token)
    due = {row.slot: row.proposed for row in draft.rows if row.samples and row.slot not in failures}
    fits = len(slots) == len(drawn) and tokens.keys() - failures.keys() == due.keys()
    if not fits or any(_unasked(tokens[slot], proposed) for slot, proposed in due.items()):
        raise WorkerDied(0, f"its answer to step {result.step_id} does not fit the plan")
    return [
        _Answer(tokens.get(slot, ()), result.logprobs.get(slot), prompt_logprobs.get(slot), failures.get(slot))
        for slot in (row.slot for row in draft.rows)
    ]


def _unasked(tokens: list[int], proposed: list[int]) -> bool:
    """Whether these are not the beginning of what was proposed, and one more."""
    return len(tokens) > 1 and tokens[:-1] != proposed[: len(tokens) - 1]

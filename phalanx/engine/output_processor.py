"""From tokens to answers: text, stop strings, log-probabilities and usage of one request with its n choices.

A `RequestAssembly` takes the engine's outputs for one request, in any interleaving of its choices, and gives deltas.
It keeps a cursor per choice: tokens it has seen before are dropped, a gap is an error. It does no I/O and knows no
engine; when a stop string ends a choice early, `done` says so and the owner aborts the engine's request.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from phalanx.engine.client import EngineOutput, EngineRequest
from phalanx.errors import PhalanxError
from phalanx.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestMetrics, RequestOutput
from phalanx.step import TokenLogprobs, unpack
from phalanx.text.detokenizer import Detokenizer
from phalanx.text.tokenizer import Tokenizer


@dataclass(slots=True)
class _Choice:
    """What is known of one answer so far."""

    request: EngineRequest
    detokenizer: Detokenizer
    received: int
    """Output tokens seen, the cursor."""
    cumulative_logprob: float | None
    finish_reason: str | None = None


class OutputProcessor:
    """Opens an assembly per request. Holds only the tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def open(
        self, children: list[EngineRequest], *, request_id: str, prompt: str | None, arrival: float | None = None
    ) -> RequestAssembly:
        """`children` are the choices of one request, as `InputProcessor.process` made them. `arrival` is monotonic."""
        return RequestAssembly(self._tokenizer, children, request_id, prompt, arrival)


class RequestAssembly:
    """One request with all of its choices. Not thread-safe: one owner pushes."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        children: list[EngineRequest],
        request_id: str,
        prompt: str | None,
        arrival: float | None,
    ):
        self._tokenizer = tokenizer
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = children[0].prompt_token_ids
        self.metrics = RequestMetrics(arrival=time.monotonic() if arrival is None else arrival)
        self._choices = {child.request_id: self._begin(child) for child in children}
        self._open = len(children)
        """Choices without a finish reason."""
        self._num_cached_tokens = 0
        self._prompt_logprobs = _PromptLogprobs(len(self.prompt_token_ids))

    def _begin(self, child: EngineRequest) -> _Choice:
        sampling = child.sampling
        detokenizer = Detokenizer(
            self._tokenizer,
            skip_special_tokens=sampling.skip_special_tokens,
            stop=sampling.stop,
            include_stop=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
            prompt_token_ids=self.prompt_token_ids,
        )
        return _Choice(child, detokenizer, 0, None if sampling.logprobs is None else 0.0)

    @property
    def finished(self) -> bool:
        return not self._open

    def done(self, engine_request_id: str) -> bool:
        """Whether this choice has its finish reason; the engine may still be at work on it after a stop string."""
        return self._choices[engine_request_id].finish_reason is not None

    def push(self, output: EngineOutput) -> RequestOutput | None:
        """The delta that `output` brings, or None when it brings nothing. Raises PhalanxError on a gap.

        `output.error` is the owner's to look at first. Outputs after a choice's end are ignored.
        """
        choice = self._choices[output.request_id]
        if choice.finish_reason is not None:
            return None
        if self.metrics.first_token is None or output.num_cached_tokens:
            self._measure(output)
        prompt_logprobs = self._take_prompt_logprobs(output.prompt_logprobs) if output.prompt_logprobs else None
        tokens, logprobs = self._new_tokens(choice, output)
        if not tokens and output.finish_reason is None and prompt_logprobs is None:
            return None
        delta = self._advance(choice, tokens, logprobs, output)
        finished = self.finished
        if finished:
            self.metrics.finished = time.monotonic()
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[delta],
            finished=finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self._num_cached_tokens,
            metrics=self.metrics,
        )

    def _measure(self, output: EngineOutput) -> None:
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        if self.metrics.scheduled is None:
            self.metrics.scheduled = output.scheduled_s
        if output.token_ids and self.metrics.first_token is None:
            self.metrics.first_token = time.monotonic()

    def _new_tokens(self, choice: _Choice, output: EngineOutput) -> tuple[list[int], list[TokenLogprobs] | None]:
        """The part of `output` past the cursor."""
        known = choice.received - output.start
        if known < 0:
            raise PhalanxError(
                f"Tokens of an answer were lost on the way: expected number {choice.received}, got {output.start}.",
                fix="This is a bug in Phalanx; please report it with the log.",
            )
        logprobs = output.logprobs
        if known:
            return output.token_ids[known:], None if logprobs is None else logprobs[known:]
        return output.token_ids, logprobs

    def _advance(
        self, choice: _Choice, tokens: list[int], logprobs: list[TokenLogprobs] | None, output: EngineOutput
    ) -> CompletionOutput:
        sampling, detokenizer = choice.request.sampling, choice.detokenizer
        before = choice.received
        # The token that ended the answer counts, but its text shows only when asked for. A grammar may end an answer
        # too, after a token like any other.
        ended = output.finish_reason == "stop" and bool(tokens)
        by_token = ended and (output.stop_token_id is not None or tokens[-1] in choice.request.eos_token_ids)
        hide_last = by_token and not sampling.include_stop_str_in_output
        text = detokenizer.push(tokens[:-1] if hide_last else tokens)
        reason = output.finish_reason
        stopped_by: int | str | None = output.stop_token_id
        if detokenizer.stopped_by is not None:
            reason, stopped_by = "stop", detokenizer.stopped_by
            tokens = tokens[: max(0, detokenizer.tokens_used - before)]
            logprobs = None if logprobs is None else logprobs[: len(tokens)]
        elif reason is not None:
            text += detokenizer.finish()
            if detokenizer.stopped_by is not None:
                reason, stopped_by = "stop", detokenizer.stopped_by
        choice.received = before + len(tokens)
        choice.finish_reason = reason
        self._open -= reason is not None
        described = self._describe(choice, tokens, logprobs)
        return CompletionOutput(
            index=choice.request.choice,
            text=text,
            token_ids=list(tokens),
            logprobs=described,
            cumulative_logprob=choice.cumulative_logprob,
            finish_reason=reason,
            stop_reason=stopped_by,
        )

    def _describe(
        self, choice: _Choice, tokens: list[int], logprobs: list[TokenLogprobs] | None
    ) -> list[PositionLogprobs] | None:
        if choice.cumulative_logprob is None or logprobs is None:
            return None
        choice.cumulative_logprob += sum(entry.logprob for entry in logprobs)
        return [self._position(token, entry) for token, entry in zip(tokens, logprobs, strict=True)]

    def _position(self, token: int, entry: TokenLogprobs) -> PositionLogprobs:
        ids, values = unpack(entry.top_ids), unpack(entry.top_logprobs, "f")
        top = [self._logprob(t, value, rank) for rank, (t, value) in enumerate(zip(ids, values, strict=True), 1)]
        return PositionLogprobs(self._logprob(token, entry.logprob, entry.rank), top)

    def _logprob(self, token: int, value: float, rank: int) -> Logprob:
        if token >= self._tokenizer.size:  # the output head may have more rows than the tokenizer has tokens
            return Logprob(token, value, rank, "", b"")
        return Logprob(token, value, rank, self._tokenizer.token_text(token), self._tokenizer.token_bytes(token))

    def _take_prompt_logprobs(self, piece: list[TokenLogprobs]) -> list[PositionLogprobs | None] | None:
        """The whole list, once its last piece has come."""
        complete = self._prompt_logprobs.add(piece)
        if complete is None:
            return None
        described: list[PositionLogprobs | None] = [None]
        described += [self._position(t, e) for t, e in zip(self.prompt_token_ids[1:], complete, strict=True)]
        return described


def merge(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """One delta for two that follow each other; `first` is used up."""
    by_index: dict[int, CompletionOutput] = {choice.index: choice for choice in first.outputs}
    for choice in second.outputs:
        before = by_index.get(choice.index)
        if before is None:
            first.outputs.append(choice)
            continue
        before.text += choice.text
        before.token_ids += choice.token_ids
        if choice.logprobs is not None:
            before.logprobs = (before.logprobs or []) + choice.logprobs
        before.cumulative_logprob = choice.cumulative_logprob
        before.finish_reason, before.stop_reason = choice.finish_reason, choice.stop_reason
    first.finished = second.finished
    first.prompt_logprobs = first.prompt_logprobs or second.prompt_logprobs
    first.num_cached_tokens = second.num_cached_tokens
    first.metrics = second.metrics
    return first


@dataclass(slots=True)
class _PromptLogprobs:
    """Collects the pieces of a prompt's log-probabilities."""

    num_prompt: int
    entries: list[TokenLogprobs] = field(default_factory=list)

    def add(self, piece: list[TokenLogprobs]) -> list[TokenLogprobs] | None:
        """All entries when this piece completes them. Raises PhalanxError when there are too many."""
        self.entries += piece
        if len(self.entries) > self.num_prompt - 1:
            raise PhalanxError(
                "More prompt log-probabilities came than the prompt has tokens.",
                fix="This is a bug in Phalanx; please report it with the log.",
            )
        return self.entries if len(self.entries) == self.num_prompt - 1 else None

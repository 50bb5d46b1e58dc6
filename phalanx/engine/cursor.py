"""`Cursor`: how far one request is delivered, so that it can go on in another engine exactly there.

Repeats are dropped, a gap is an error, and what a new engine tells again (prompt log-probabilities, cache hits) is told
to nobody twice. Pure; knows no engine.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import msgspec

from phalanx.engine.client import EngineOutput, EngineRequest
from phalanx.errors import PhalanxError


@dataclass(eq=False)
class Cursor:
    request: EngineRequest
    delivered: list[int]
    """Output tokens, those that came with the request included."""
    prompt_logprobs: int = 0
    """Entries delivered."""
    skip_prompt_logprobs: int = 0
    """Entries that the present engine will repeat."""
    accepted: bool = False
    """Its owner has been told that it is in the queue: it must not be refused any more."""
    resumed: bool = False
    finished: bool = False
    aborted: bool = False
    """Its client does not want it any more."""
    leaving: bool = False
    """It is to go on in another engine, because its own is slow."""
    left: set[int] = field(default_factory=set)
    """Engines that it has left so."""

    @classmethod
    def of(cls, request: EngineRequest) -> Cursor:
        return cls(request, list(request.output_token_ids))

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def accept(self, output: EngineOutput) -> EngineOutput | None:
        """What of `output` is new, or None. Raises PhalanxError on a gap."""
        known = len(self.delivered) - output.start
        if known < 0:
            raise PhalanxError(
                f"Tokens of an answer were lost on the way: expected number {len(self.delivered)}, got {output.start}.",
                fix="This is a bug in Phalanx; please report it with the log.",
            )
        prompt_logprobs = len(output.prompt_logprobs or ())
        repeated = min(self.skip_prompt_logprobs, prompt_logprobs)
        if self.accepted and not output.token_ids and output.finish_reason is None and not prompt_logprobs:
            return None  # an acknowledgement
        if known or repeated:
            output = msgspec.structs.replace(
                output,
                start=output.start + min(known, len(output.token_ids)),
                token_ids=output.token_ids[known:],
                logprobs=output.logprobs[known:] if output.logprobs is not None else None,
                prompt_logprobs=(output.prompt_logprobs or [])[repeated:] or None,
            )
        if self.resumed and self.delivered and output.num_cached_tokens:
            # What another engine found in its cache is no saving of this request's.
            output = msgspec.structs.replace(output, num_cached_tokens=0)
        self.skip_prompt_logprobs -= repeated
        self.prompt_logprobs += prompt_logprobs - repeated
        self.delivered += output.token_ids
        self.accepted = True
        self.finished = output.finish_reason is not None
        return output

    def resume(self) -> EngineRequest:
        """The request for another engine to go on with."""
        self.resumed = True
        self.skip_prompt_logprobs = self.prompt_logprobs
        sampling = self.request.sampling
        if sampling.prompt_logprobs is not None and self.prompt_logprobs >= len(self.request.prompt_token_ids) - 1:
            # All delivered: without the wish the new engine may use its prefix cache.
            sampling = dataclasses.replace(sampling, prompt_logprobs=None)
            self.skip_prompt_logprobs = 0
        return msgspec.structs.replace(self.request, sampling=sampling, output_token_ids=tuple(self.delivered))

    @property
    def tokens_left(self) -> int:
        """Tokens that it may still get."""
        return (self.request.sampling.max_tokens or 0) - len(self.delivered)

    @property
    def worth_moving(self) -> bool:
        """Whether what is left is more than what another engine would have to compute again."""
        return self.tokens_left > len(self.request.prompt_token_ids) + len(self.delivered)

    @property
    def tokens(self) -> int:
        """Tokens that were computed before: another engine computes them again."""
        return len(self.request.prompt_token_ids) + len(self.delivered) if self.delivered else 0

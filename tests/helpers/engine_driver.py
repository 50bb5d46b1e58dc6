"""An engine on the fake executor, and a judge: every output is compared with what the request must come to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field

from phalanx.config import CacheConfig, EngineConfig, ModelConfig, RecoveryConfig, SchedulerConfig
from phalanx.engine.client import EngineOutput, EngineRequest
from phalanx.engine.engine import Engine
from phalanx.engine.speculation import Proposer
from phalanx.executor.base import CacheLayout
from phalanx.sampling_params import SamplingParams
from phalanx.speculative_config import parse_speculative_config
from phalanx.step import TokenLogprobs
from tests.helpers.fake_clock import FakeClock
from tests.helpers.fake_executor import FakeExecutor, fake_logprobs, fingerprints, oracle
from tests.helpers.fake_grammar import compile_fake

VOCAB = 64


def make_request(request_id: str, prompt: list[int], *, max_tokens: int = 8, **options: object) -> EngineRequest:
    """Options of `EngineRequest` go there, all others into its sampling parameters."""
    own = {name: options.pop(name) for name in EngineRequest.__struct_fields__ if name in options}
    sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, **options)  # type: ignore[arg-type]
    return EngineRequest(request_id, prompt, sampling, **own)  # type: ignore[arg-type]


@dataclass
class Answer:
    request: EngineRequest
    wanted: list[int]
    wanted_reason: str
    tokens: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    outputs: int = 0
    reason: str | None = None
    output: EngineOutput | None = None
    may_end: set[str] = field(default_factory=set)
    """Finish reasons that something done to it excuses."""


class Guesses(Proposer):
    """Knows the answer, and says it where `guess` says so."""

    def __init__(self, wanted: list[int], most: int, guess: Callable[[], bool]) -> None:
        self._wanted, self._limit, self._guess = wanted, most, guess

    def propose(self, tokens: Sequence[int], room: int, running: int) -> list[int]:
        coming = [*self._wanted[len(tokens) :], *range(self._limit)][: max(0, min(room, self._limit))]
        return [token if self._guess() else (token + 1) % VOCAB for token in coming]

    def settle(self, proposed: int, accepted: int, running: int) -> None:
        assert 0 <= accepted <= proposed <= self._limit


class Driver:
    """`step` steps the engine and checks what it says and all invariants; `drain` runs it empty."""

    def __init__(
        self,
        *,
        blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 32,
        max_num_queued_reqs: int = 1000,
        max_model_len: int = 48,
        max_in_flight: int = 1,
        prefix_caching: bool = True,
        recovery: RecoveryConfig | None = None,
        load_s: float | None = None,
        proposed: int = 0,
        guess: Callable[[], bool] = lambda: True,
    ) -> None:
        """Up to `proposed` tokens are proposed for a request at a time: the right ones where `guess` says so."""
        self._guess = guess
        self.layout = CacheLayout(blocks, block_size, 1, VOCAB)
        self.executor = FakeExecutor(
            self.layout,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_in_flight=max_in_flight,
            max_proposed=proposed,
        )
        speculative = {"method": "ngram", "num_speculative_tokens": proposed}
        self.clock = FakeClock()
        self.max_model_len = max_model_len
        self.engine = Engine(
            EngineConfig(
                model=ModelConfig(max_model_len=max_model_len),
                cache=CacheConfig(block_size=block_size, enable_prefix_caching=prefix_caching),
                scheduler=SchedulerConfig(
                    max_num_seqs=max_num_seqs,
                    max_num_batched_tokens=max_num_batched_tokens,
                    max_num_queued_reqs=max_num_queued_reqs,
                    speculative_config=parse_speculative_config(speculative) if proposed else None,
                ),
                recovery=recovery or RecoveryConfig(),
            ),
            self.executor,
            self.layout,
            compile_grammar=compile_fake,
            clock=self.clock,
            pause=self.clock.advance,
            load_s=load_s,
            debug=True,
        )
        self.scheduler = self.engine._scheduler
        self.answers: dict[str, Answer] = {}

    def add(self, request: EngineRequest) -> Answer:
        """Raises what the engine raises; then nothing is remembered of it."""
        structured = request.sampling.structured_outputs
        self.engine.add(request)
        grammar = compile_fake(structured) if structured is not None else None
        wanted, reason = oracle(request, VOCAB, self.max_model_len, grammar)
        answer = Answer(request, wanted, reason, list(request.output_token_ids))
        self.answers[request.request_id] = answer
        return answer

    def ask(self, request_id: str, prompt: list[int], **options: object) -> Answer:
        return self.add(make_request(request_id, prompt, **options))  # type: ignore[arg-type]

    def abort(self, *request_ids: str) -> None:
        for request_id in request_ids:
            self.answers[request_id].may_end.add("abort")
        self.engine.abort(request_ids)
        self.check()

    def running(self) -> list[Answer]:
        return [answer for answer in self.answers.values() if answer.reason is None]

    def step(self) -> list[EngineOutput]:
        self.clock.advance(0.01)
        wait([future for _, future in self.engine._compilations._pending.values()])
        for request in self.scheduler.requests.values():
            if type(request.proposer) is Proposer and request.request_id in self.answers:
                wanted = [*request.given.prompt_token_ids, *self.answers[request.request_id].wanted]
                request.proposer = Guesses(wanted, self.executor.max_proposed, self._guess)
        outputs = self.engine.step()
        for output in outputs:
            self._judge(output)
        self.check()
        return outputs

    def drain(self, steps: int = 10_000) -> None:
        for _ in range(steps):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, "the engine does not come to an end"
        assert not self.running()
        pool = self.scheduler.pool
        assert pool.num_free == pool.blocks
        assert len(self.scheduler._free_slots) == self.executor.max_num_seqs
        self.answers.clear()

    def drain_dead(self, steps: int = 10_000) -> list[EngineOutput]:
        """Until the engine is beyond repair; everyone has been told then."""
        outputs: list[EngineOutput] = []
        for _ in range(steps):
            if self.engine.status().state == "failed":
                break
            outputs += self.step()
        assert self.engine.status().state == "failed"
        assert not self.running()
        self.answers.clear()
        return outputs

    def check(self) -> None:
        self.scheduler.check_invariants()
        salts: dict[int, str] = {}
        for request in self.scheduler.running:
            for block in request.blocks:
                assert salts.setdefault(block, request.given.cache_salt) == request.given.cache_salt

    def _judge(self, output: EngineOutput) -> None:
        answer = self.answers[output.request_id]
        request = answer.request
        assert answer.reason is None, "an output after the last one"
        assert output.start == len(answer.tokens), "a gap or a repetition"
        answer.outputs += 1
        if answer.outputs == 1 and output.finish_reason not in ("abort", "error"):
            assert not output.token_ids
            assert output.finish_reason is None
        answer.tokens += output.token_ids
        assert answer.tokens == answer.wanted[: len(answer.tokens)]
        answer.logprobs += output.logprobs or []
        answer.prompt_logprobs += output.prompt_logprobs or []
        answer.reason, answer.output = output.finish_reason, output
        if output.finish_reason in ("stop", "length"):
            assert answer.tokens == answer.wanted
            assert output.finish_reason == answer.wanted_reason
            self._judge_logprobs(answer, request)
        elif output.finish_reason is not None:
            assert output.finish_reason in answer.may_end, output

    def _judge_logprobs(self, answer: Answer, request: EngineRequest) -> None:
        prompt, delivered = request.prompt_token_ids, len(request.output_token_ids)
        prefixes = fingerprints([*prompt, *answer.tokens])
        if request.sampling.logprobs is not None:
            assert answer.logprobs == [fake_logprobs(prefix) for prefix in prefixes[len(prompt) + delivered :]]
        else:
            assert not answer.logprobs
        if request.sampling.prompt_logprobs is not None and not delivered:
            assert answer.prompt_logprobs == [fake_logprobs(prefix) for prefix in prefixes[1 : len(prompt)]]
        else:
            assert not answer.prompt_logprobs

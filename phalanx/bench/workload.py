"""The work that `phalanx bench` measures: distinct random prompts, answered greedily to an exact length.

One engine with its own process, as the server has it, driven through `AsyncEngine`; so a figure holds what a user of
the Python API gets, detokenising included. Tokens are counted on what arrives and compared with what was asked for.
Does not cover the HTTP server, other engines, or how figures are shown (`phalanx.bench.report`).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.config import EngineConfig
from phalanx.engine.async_engine import AsyncEngine
from phalanx.errors import PhalanxError, UserError
from phalanx.metrics.speculation import SpeculationCounts
from phalanx.sampling_params import SamplingParams

_REPORT_S = 0.6
"""In which an engine reports, busy or not."""

FIRST_REQUEST_TOKENS = 16
"""Prompt length of the request whose first token ends the measured start."""


@dataclass(frozen=True)
class Work:
    """`requests` at once, each with a prompt of `input_len` random tokens and an answer of `output_len`."""

    requests: int
    input_len: int
    output_len: int


@dataclass(frozen=True)
class Run:
    """One pass over a `Work`; times in seconds since just before its first request."""

    first_tokens: tuple[float, ...]
    last_tokens: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int

    @property
    def wall(self) -> float:
        return max(self.last_tokens)

    @property
    def first(self) -> float:
        """When the last of the requests had its first token: all prompts are then computed."""
        return max(self.first_tokens)

    @property
    def prefill_tok_s(self) -> float:
        return self.prompt_tokens / self.first

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens after the first ones over the time from first to last; None for one-token answers."""
        rest = self.output_tokens - len(self.first_tokens)
        span = self.wall - min(self.first_tokens)
        return rest / span if rest and span > 0 else None

    @property
    def e2e_tok_s(self) -> float:
        return self.output_tokens / self.wall


class Prompts:
    """Random token ids, the same for the same seed, without special tokens; no two prompts begin alike."""

    def __init__(self, vocabulary: Sequence[int], seed: int):
        if not vocabulary:
            raise UserError("The model's vocabulary has no ordinary tokens to draw prompts from.")
        self._vocabulary = vocabulary
        self._random = random.Random(seed)

    def draw(self, count: int, length: int) -> list[list[int]]:
        return [self._random.choices(self._vocabulary, k=length) for _ in range(count)]


class Bench:
    """A started engine and its source of prompts. Use `async with await Bench.start(…)`."""

    def __init__(self, engine: AsyncEngine, prompts: Prompts, start_s: float):
        self.engine = engine
        self.prompts = prompts
        self.start_s = start_s
        """From before the engine was made to the first token of a first request."""
        self.speculation = SpeculationCounts()
        """What became of the tokens proposed in the measured runs."""

    @classmethod
    async def start(cls, config: EngineConfig, seed: int) -> Bench:
        """Raises UserError when the model cannot be loaded."""
        begin = time.perf_counter()
        engine = AsyncEngine(config)
        try:
            info = await engine.start()
            known = min(engine.tokenizer.size, info.vocab_size)
            special = engine.tokenizer.special_ids
            prompts = Prompts([token for token in range(known) if token not in special], seed)
            bench = cls(engine, prompts, 0.0)
            first = await bench.run(Work(1, FIRST_REQUEST_TOKENS, 1), begin)
        except BaseException:
            await engine.close()
            raise
        bench.start_s = first.wall
        return bench

    async def __aenter__(self) -> Bench:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close()

    async def run(self, work: Work, begin: float | None = None) -> Run:
        """Do the work once. Raises PhalanxError when an answer has another length than asked for."""
        params = SamplingParams(temperature=0.0, max_tokens=work.output_len, ignore_eos=True, seed=0)
        prompts = self.prompts.draw(work.requests, work.input_len)
        begin = time.perf_counter() if begin is None else begin
        try:
            async with asyncio.TaskGroup() as group:
                answers = [group.create_task(self._answer(prompt, params)) for prompt in prompts]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        times = [answer.result() for answer in answers]
        run = Run(
            first_tokens=tuple(first - begin for first, _, _ in times),
            last_tokens=tuple(last - begin for _, last, _ in times),
            prompt_tokens=sum(len(prompt) for prompt in prompts),
            output_tokens=sum(tokens for _, _, tokens in times),
        )
        wanted = work.requests * work.output_len
        if run.output_tokens != wanted:
            raise PhalanxError(f"The engine gave {run.output_tokens} tokens where {wanted} were asked for.")
        return run

    async def counted(self) -> SpeculationCounts:
        """What the engine has counted; it says so a moment after its last token."""
        await asyncio.sleep(_REPORT_S)
        return self.engine.status().speculation

    async def _answer(self, prompt: list[int], params: SamplingParams) -> tuple[float, float, int]:
        """Times of the first and the last token, and how many there were."""
        first = last = 0.0
        tokens = 0
        async for delta in self.engine.generate(prompt, params):
            new = sum(len(output.token_ids) for output in delta.outputs)
            if new:
                last = time.perf_counter()
                first = first or last
                tokens += new
        return first, last, tokens


def _check(work: Work, config: EngineConfig, max_model_len: int) -> None:
    """Before prompts are drawn, however many. Raises UserError."""
    if work.input_len + work.output_len > max_model_len:
        raise UserError(
            f"--input-len {work.input_len} and --output-len {work.output_len} are more than the {max_model_len} "
            "tokens of the model's context.",
            fix="Make one shorter.",
        )
    scheduler = config.scheduler
    places = config.parallel.data_parallel_size * (scheduler.max_num_queued_reqs + scheduler.max_num_seqs)
    if work.requests > places:
        raise UserError(
            f"{work.requests} requests at once are more than may run and wait ({places}).",
            fix="Ask for fewer, or raise --max-num-queued-reqs.",
        )


async def measure(config: EngineConfig, work: Work, *, runs: int, warmup: int, seed: int) -> tuple[Bench, list[Run]]:
    """Start an engine, warm it up, do the work `runs` times, close the engine. Raises UserError, PhalanxError."""
    async with await Bench.start(config, seed) as bench:
        _check(work, config, bench.engine.info.max_model_len)
        for _ in range(warmup):
            await bench.run(Work(work.requests, work.input_len, min(work.output_len, 8)))
        before = await bench.counted()
        measured = [await bench.run(work) for _ in range(runs)]
        bench.speculation = (await bench.counted()).since(before)
        return bench, measured

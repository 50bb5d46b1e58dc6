"""POST /v1/completions: text or token ids in, one or many, with echo and log-probabilities."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from phalanx.errors import InvalidRequest
from phalanx.outputs import CompletionOutput, PositionLogprobs
from phalanx.sampling_params import SamplingParams
from phalanx.server.endpoint import Call, answer_id, encode, receive_call
from phalanx.server.generation import ChoiceText, Generation, start_generation
from phalanx.server.logprobs import CompletionLogprobsWriter, prompt_logprobs
from phalanx.server.openai_types import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    PromptLogprobsList,
    Usage,
)
from phalanx.server.request_fields import completion_params
from phalanx.server.state import ServerState
from phalanx.server.streaming import frame

PositionsOfPrompt = list[PositionLogprobs | None]


async def completions(state: ServerState, request: Request) -> Response:
    call = await receive_call(state, request, CompletionRequest)
    answer = _Answer(call)
    await call.work(answer.start())
    if call.body.stream:
        return call.stream(answer.generation, answer.frames())
    return await call.reply(answer.generation, answer.whole())


def _prompts(prompt: Any, max_prompts: int) -> list[Any]:
    """One entry a prompt. Raises InvalidRequest."""
    prompts: list[Any] = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    if len(prompts) > max_prompts:
        raise InvalidRequest(
            f"`prompt` holds {len(prompts)} prompts; this server allows at most {max_prompts}.",
            fix="Its operator can raise the limit with --max-prompts.", param="prompt",
        )  # fmt: skip
    return prompts


class _Answer:
    """One completion request on its way to an answer. Choice i of prompt p has index p · n + i."""

    generation: Generation

    def __init__(self, call: Call[CompletionRequest]):
        self._call = call
        body = self._body = call.body
        self._params: SamplingParams = completion_params(body, call.state.engine.default_sampling)
        self._prompts = _prompts(body.prompt, call.state.config.limits.max_prompts)
        self._hide = body.max_tokens == 0
        self._id = answer_id("cmpl", call.request_id)
        self._created = int(time.time())
        self._echo_logprobs = bool(body.echo) and body.logprobs is not None
        if self._echo_logprobs and body.stream and self._params.n > 1:
            raise InvalidRequest("`echo` with `logprobs` and `n` above 1 cannot be streamed.", param="n")

    async def start(self) -> None:
        state, body = self._call.state, self._body
        add = True if body.add_special_tokens is None else body.add_special_tokens
        self.generation = await start_generation(
            state,
            self._prompts,
            self._params,
            body,
            owner=self._call.owner,
            add_special_tokens=add,
            source="prompt",
        )
        count = len(self._prompts) * self._params.n
        self._writers = [CompletionLogprobsWriter(body.logprobs or 0) for _ in range(count)]

    def _echoed(self, number: int) -> str:
        prompt = self._prompts[number]
        if isinstance(prompt, str) and self._body.truncate_prompt_tokens is None:
            return prompt
        return self._call.state.engine.tokenizer.decode(self.generation.streams[number].prompt_token_ids)

    def _logprobs(
        self, index: int, positions: list[PositionLogprobs], prompt: PositionsOfPrompt | None, *, echo: bool
    ) -> CompletionLogprobs | None:
        """`echo`: begin with the prompt's tokens."""
        if self._body.logprobs is None:
            return None
        positions = [] if self._hide else positions
        if not echo:
            return self._writers[index].write(positions)
        first = self.generation.streams[index // self._params.n].prompt_token_ids[0]
        text = self._call.state.engine.tokenizer.token_text(first)
        return self._writers[index].write_echo(prompt or [None], text, positions)

    # Not streamed

    async def whole(self) -> Completion:
        n = self._params.n
        choices = [ChoiceText(index) for index in range(len(self._prompts) * n)]
        positions: list[list[PositionLogprobs]] = [[] for _ in choices]
        in_prompts: list[PositionsOfPrompt] = [[None] for _ in self._prompts]
        async for output in self.generation:
            number = self.generation.saw(output)
            if output.prompt_logprobs is not None:
                in_prompts[number] = output.prompt_logprobs
            for choice in output.outputs:
                choices[number * n + choice.index].add(choice)
                positions[number * n + choice.index] += choice.logprobs or []
        finished = [
            self._finished(choice, positions[choice.index], in_prompts[choice.index // n]) for choice in choices
        ]
        usage = self.generation.usage(hide_completion=self._hide)
        return Completion(self._id, self._created, self._call.model, finished, usage)

    def _finished(
        self, choice: ChoiceText, positions: list[PositionLogprobs], prompt: PositionsOfPrompt
    ) -> CompletionChoice:
        text = "" if self._hide else "".join(choice.parts)
        if self._body.echo:
            text = self._echoed(choice.index // self._params.n) + text
        return CompletionChoice(
            index=choice.index,
            text=text,
            logprobs=self._logprobs(choice.index, positions, prompt, echo=self._echo_logprobs),
            finish_reason="length" if self._hide else choice.finish_reason,
            stop_reason=None if self._hide else choice.stop_reason,
            prompt_logprobs=self._listed(prompt),
        )

    def _listed(self, prompt: PositionsOfPrompt | None) -> PromptLogprobsList | UnsetType:
        if self._body.prompt_logprobs is None or prompt is None:
            return UNSET
        return prompt_logprobs(prompt)

    # Streamed

    async def frames(self) -> AsyncGenerator[bytes, None]:
        options, generation = self._body.stream_options, self.generation
        final_usage = bool(options and options.include_usage)
        every_usage = bool(options and options.continuous_usage_stats)
        no_usage: Usage | UnsetType | None = None if final_usage else UNSET
        begun = [not self._body.echo] * (len(self._prompts) * self._params.n)
        async for output in generation:
            number, data = generation.saw(output), []
            for choice in output.outputs:
                index = number * self._params.n + choice.index
                described = self._chunk(index, choice, output.prompt_logprobs, echo=not begun[index])
                begun[index] = True
                if described is not None:
                    usage = generation.usage(hide_completion=self._hide) if every_usage else no_usage
                    data.append(
                        frame(encode(Completion(self._id, self._created, self._call.model, [described], usage)))
                    )
            if data:
                yield b"".join(data)
        if final_usage:
            usage = generation.usage(hide_completion=self._hide)
            yield frame(encode(Completion(self._id, self._created, self._call.model, [], usage)))

    def _chunk(
        self, index: int, choice: CompletionOutput, prompt: PositionsOfPrompt | None, *, echo: bool
    ) -> CompletionChoice | None:
        listed = self._listed(prompt)
        text = "" if self._hide else choice.text
        if echo:
            text = self._echoed(index // self._params.n) + text
        if not text and not choice.logprobs and choice.finish_reason is None and listed is UNSET:
            return None
        reason = choice.finish_reason
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=self._logprobs(index, choice.logprobs or [], prompt, echo=echo and self._echo_logprobs),
            finish_reason=reason if reason is None or not self._hide else "length",
            stop_reason=UNSET if reason is None else None if self._hide else choice.stop_reason,
            prompt_logprobs=listed,
        )

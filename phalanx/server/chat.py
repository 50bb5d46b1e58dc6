"""POST /v1/chat/completions. Tool calls are not in this version."""

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
from phalanx.server.logprobs import chat_logprobs, prompt_logprobs
from phalanx.server.openai_types import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatFields,
    ChatRequest,
    Delta,
    PromptLogprobsList,
    Usage,
)
from phalanx.server.request_fields import chat_params, template_kwargs, template_messages
from phalanx.server.state import ServerState
from phalanx.server.streaming import frame


async def chat_completions(state: ServerState, request: Request) -> Response:
    call = await receive_call(state, request, ChatRequest)
    generation, params = await call.work(_start(call))
    if call.body.stream:
        return call.stream(generation, _frames(call, generation, params))
    return await call.reply(generation, _whole(call, generation, params))


async def _start(call: Call[ChatRequest]) -> tuple[Generation, SamplingParams]:
    body, state = call.body, call.state
    params = chat_params(body, state.engine.default_sampling)
    prompt = await render_prompt(state, body)
    generation = await start_generation(
        state,
        [prompt],
        params,
        body,
        owner=call.owner,
        add_special_tokens=bool(body.add_special_tokens),
        source="messages",
    )
    return generation, params


async def render_prompt(state: ServerState, body: ChatFields) -> str:
    """The conversation as the model's template writes it. Raises InvalidRequest."""
    messages = template_messages(body.messages, state.config.limits.max_messages)
    kwargs = template_kwargs(body)
    unfinished = bool(body.continue_final_message)
    if unfinished and body.add_generation_prompt:
        raise InvalidRequest(
            "`continue_final_message` and `add_generation_prompt` cannot both be true.", param="continue_final_message"
        )
    begin = not unfinished if body.add_generation_prompt is None else body.add_generation_prompt
    text = await state.engine.apply_chat_template(messages, add_generation_prompt=begin, **kwargs)
    return _cut_after_final_message(text, messages) if unfinished else text


def _cut_after_final_message(text: str, messages: list[dict[str, Any]]) -> str:
    """Without what the template writes after the last message, so that the model goes on in its middle."""
    final = messages[-1]["content"].strip()
    at = text.rfind(final)
    if not final or at < 0:
        raise InvalidRequest(
            "The final message cannot be continued: it is empty, or the chat template changes it.",
            param="continue_final_message",
        )
    return text[: at + len(final)]


async def _whole(call: Call[ChatRequest], generation: Generation, params: SamplingParams) -> ChatCompletion:
    choices = [ChoiceText(index) for index in range(params.n)]
    logprobs: list[list[PositionLogprobs]] = [[] for _ in choices]
    in_prompt: PromptLogprobsList | UnsetType = UNSET if params.prompt_logprobs is None else [None]
    async for output in generation:
        generation.saw(output)
        if output.prompt_logprobs is not None and in_prompt is not UNSET:
            in_prompt = prompt_logprobs(output.prompt_logprobs)
        for choice in output.outputs:
            choices[choice.index].add(choice)
            logprobs[choice.index] += choice.logprobs or []
    return ChatCompletion(
        id=answer_id("chatcmpl", call.request_id),
        created=int(time.time()),
        model=call.model,
        choices=[
            ChatChoice(
                index=choice.index,
                message=AssistantMessage("".join(choice.parts)),
                logprobs=None if params.logprobs is None else chat_logprobs(logprobs[choice.index]),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
            )
            for choice in choices
        ],
        usage=generation.usage(),
        prompt_logprobs=in_prompt,
    )


async def _frames(
    call: Call[ChatRequest], generation: Generation, params: SamplingParams
) -> AsyncGenerator[bytes, None]:
    answer, created, model = answer_id("chatcmpl", call.request_id), int(time.time()), call.model
    options = call.body.stream_options
    final_usage = bool(options and options.include_usage)
    every_usage = bool(options and options.continuous_usage_stats)
    no_usage: Usage | UnsetType | None = None if final_usage else UNSET
    begun = [False] * params.n

    def chunk(choice: ChatChunkChoice) -> bytes:
        usage = generation.usage() if every_usage else no_usage
        return frame(encode(ChatChunk(answer, created, model, [choice], usage)))

    async for output in generation:
        generation.saw(output)
        data = []
        for choice in output.outputs:
            if not begun[choice.index]:
                begun[choice.index] = True
                data.append(chunk(ChatChunkChoice(choice.index, Delta(role="assistant", content=""))))
            if choice.text or choice.logprobs or choice.finish_reason is not None:
                data.append(chunk(_chunk_choice(choice)))
        if output.prompt_logprobs is not None and params.prompt_logprobs is not None:
            listed = prompt_logprobs(output.prompt_logprobs)
            data.append(frame(encode(ChatChunk(answer, created, model, [], no_usage, prompt_logprobs=listed))))
        if data:
            yield b"".join(data)
    if final_usage:
        yield frame(encode(ChatChunk(answer, created, model, [], generation.usage())))


def _chunk_choice(choice: CompletionOutput) -> ChatChunkChoice:
    return ChatChunkChoice(
        index=choice.index,
        delta=Delta(content=choice.text) if choice.text or choice.logprobs else Delta(),
        logprobs=None if choice.logprobs is None else chat_logprobs(choice.logprobs),
        finish_reason=choice.finish_reason,
        stop_reason=UNSET if choice.finish_reason is None else choice.stop_reason,
    )

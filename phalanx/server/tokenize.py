"""POST /tokenize and /detokenize: between text and token ids, with the served model's tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar, cast

from starlette.requests import Request
from starlette.responses import Response

from phalanx.errors import InvalidRequest
from phalanx.server.chat import render_prompt
from phalanx.server.endpoint import Call, json_response, receive_call
from phalanx.server.openai_types import DetokenizeRequest, Text, TokenizeRequest, Tokens
from phalanx.server.state import ServerState

Result = TypeVar("Result")

_INLINE = 4096
"""Characters or ids below which the work is done at once, on the event loop."""


async def tokenize(state: ServerState, request: Request) -> Response:
    call = await receive_call(state, request, TokenizeRequest)
    return json_response(await call.work(_tokens(call)))


async def _tokens(call: Call[TokenizeRequest]) -> Tokens:
    body, state = call.body, call.state
    if (body.prompt is None) == (cast(object, body.messages) is None):
        raise InvalidRequest("Send either `prompt` or `messages`.", param="prompt")
    tokenizer = state.engine.tokenizer
    if body.prompt is not None:
        text = body.prompt
        special = True if body.add_special_tokens is None else body.add_special_tokens
    else:
        text = await render_prompt(state, body)
        special = bool(body.add_special_tokens)
    ids = await _aside(state, len(text), partial(tokenizer.encode, text, add_special_tokens=special))
    texts = [tokenizer.token_text(token) for token in ids] if body.return_token_strs else None
    return Tokens(len(ids), state.max_model_len, ids, texts)


async def detokenize(state: ServerState, request: Request) -> Response:
    call = await receive_call(state, request, DetokenizeRequest)
    return json_response(await call.work(_text(call)))


async def _text(call: Call[DetokenizeRequest]) -> Text:
    tokenizer, ids = call.state.engine.tokenizer, call.body.tokens
    if ids and not (min(ids) >= 0 and max(ids) < tokenizer.size):
        raise InvalidRequest(
            f"`tokens` has an id that is not in the vocabulary (0 to {tokenizer.size - 1}).", param="tokens"
        )
    decode = partial(tokenizer.decode, ids, skip_special_tokens=bool(call.body.skip_special_tokens))
    return Text(await _aside(call.state, len(ids), decode))


async def _aside(state: ServerState, size: int, work: Callable[[], Result]) -> Result:
    """Long work on a thread, one at a time, so that generation keeps the other threads."""
    if size <= _INLINE:
        return work()
    async with state.long_texts:
        return await asyncio.to_thread(work)

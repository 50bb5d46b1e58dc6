"""One HTTP request as work of the engine: one stream for each prompt, merged, counted and closed together.

Knows tokens and usage. Does not know which endpoint's words the answer will be put in.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING

from phalanx.errors import InvalidRequest, PhalanxError, Unavailable
from phalanx.outputs import CompletionOutput, RequestOutput
from phalanx.sampling_params import INT32, SamplingParams
from phalanx.server.failures import ClientGone
from phalanx.server.openai_types import PromptTokensDetails, SamplingFields, Usage
from phalanx.server.state import ServerState

if TYPE_CHECKING:
    from phalanx.engine.request_stream import RequestStream


class Generation:
    """Every prompt of the request has been admitted when this exists. Iterate it for outputs in order of arrival, which
    raises PhalanxError, and show each one to `saw`."""

    def __init__(self, streams: list[RequestStream], params: SamplingParams, state: ServerState):
        self.streams = streams
        self._recorders = [state.metrics.recorder(len(stream.prompt_token_ids), params.n) for stream in streams]
        self._cached = [0] * len(streams)
        self._prompt_tokens = sum(len(stream.prompt_token_ids) for stream in streams)
        self._completion_tokens = 0
        self._numbers = {stream.request_id: number for number, stream in enumerate(streams)}
        self._merged = _merged(streams) if len(streams) > 1 else None

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self._merged or self.streams[0]  # a generator in between would cost something for each token

    def saw(self, output: RequestOutput) -> int:
        """Count it. The number of its prompt. Raises Unavailable when the server has ended the request."""
        number = self._numbers[output.request_id]
        for choice in output.outputs:
            if choice.finish_reason == "abort":
                raise Unavailable("The request was stopped by the server.")
            self._completion_tokens += len(choice.token_ids)
        self._cached[number] = output.num_cached_tokens
        self._recorders[number].saw(output)
        return number

    def usage(self, *, hide_completion: bool = False) -> Usage:
        completion = 0 if hide_completion else self._completion_tokens
        details = PromptTokensDetails(sum(self._cached))
        return Usage(self._prompt_tokens, completion, self._prompt_tokens + completion, details)

    def failed(self, error: BaseException) -> None:
        status = 499 if isinstance(error, ClientGone) else error.status if isinstance(error, PhalanxError) else 500
        for recorder in self._recorders:
            recorder.failed(status)

    async def close(self) -> None:
        """Abort what still runs. Idempotent."""
        if self._merged is not None:
            await self._merged.aclose()
        await _close_all(self.streams)


async def start_generation(
    state: ServerState,
    prompts: list[str] | list[list[int]],
    params: SamplingParams,
    request: SamplingFields,
    *,
    owner: int,
    add_special_tokens: bool,
    source: str,
) -> Generation:
    """Returns once every prompt is in the engine's queue; when one is refused, the others are aborted. `owner` is a
    number for whoever asks.

    Raises what `AsyncEngine.submit` raises.
    """
    keep = request.truncate_prompt_tokens
    if keep is not None and keep != -1 and not 1 <= keep <= INT32:
        raise InvalidRequest("`truncate_prompt_tokens` must be at least 1, or -1.", param="truncate_prompt_tokens")

    scheduler = state.config.scheduler
    places = scheduler.max_num_queued_reqs + scheduler.max_num_seqs
    if len(prompts) * params.n > places:  # a refusal as "full" would make clients try again for ever
        raise InvalidRequest(
            f"The request asks for {len(prompts) * params.n} answers; this server has places for {places}.",
            fix="Ask for fewer; its operator can raise --max-num-queued-reqs.",
            param="n" if params.n > 1 else "prompt",
        )

    async def submit(prompt: str | list[int]) -> RequestStream:
        if keep is not None:
            prompt = await _truncated(state, prompt, params, keep, add_special_tokens)
        return await state.engine.submit(
            prompt,
            params,
            request_id=uuid.uuid4().hex,
            priority=request.priority or 0,
            cache_salt=request.cache_salt or "",
            owner=owner,
            add_special_tokens=add_special_tokens,
            source=source,
        )

    if len(prompts) == 1:
        return Generation([await submit(prompts[0])], params, state)
    tasks = [asyncio.create_task(submit(prompt)) for prompt in prompts]
    try:
        streams = list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await _close_all([result for result in results if not isinstance(result, BaseException)])
        raise
    return Generation(streams, params, state)


async def _truncated(
    state: ServerState, prompt: str | list[int], params: SamplingParams, keep: int, add_special_tokens: bool
) -> list[int]:
    """The last `keep` tokens; -1 keeps what the context can hold beside the answer."""
    if isinstance(prompt, str):
        prompt = await state.engine.tokenize(prompt, add_special_tokens=add_special_tokens)
    if keep == -1:
        keep = state.max_model_len - (params.max_tokens or 1)
    return prompt[-keep:] if keep > 0 else prompt


async def _merged(streams: list[RequestStream]) -> AsyncGenerator[RequestOutput, None]:
    arrived: asyncio.Queue[RequestOutput | Exception | None] = asyncio.Queue(maxsize=len(streams))

    async def pump(stream: RequestStream) -> None:
        try:
            async for output in stream:
                await arrived.put(output)
        except Exception as error:
            await arrived.put(error)
        else:
            await arrived.put(None)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    running = len(streams)
    try:
        while running:
            item = await arrived.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _close_all(streams: list[RequestStream]) -> None:
    if streams:
        await asyncio.gather(*(stream.aclose() for stream in streams), return_exceptions=True)


class ChoiceText:
    """One answer as it is put together for a reply that is not streamed."""

    __slots__ = ("finish_reason", "index", "parts", "stop_reason")

    def __init__(self, index: int) -> None:
        self.index = index
        self.parts: list[str] = []
        self.finish_reason = "stop"
        self.stop_reason: int | str | None = None

    def add(self, choice: CompletionOutput) -> None:
        self.parts.append(choice.text)
        if choice.finish_reason is not None:
            self.finish_reason, self.stop_reason = choice.finish_reason, choice.stop_reason

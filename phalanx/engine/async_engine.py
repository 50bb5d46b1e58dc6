"""`AsyncEngine`: the asyncio API, text in and text out, over an engine in a process of its own.

    engine = AsyncEngine(EngineConfig())
    await engine.start()
    async for delta in engine.generate("Once upon a time", SamplingParams(max_tokens=32)):
        print(delta.outputs[0].text, end="")
    await engine.close()

The event loop never waits for compute: the model runs in the engine process, long texts are tokenised and templates
and grammars are worked on in a small pool of threads. Does not speak HTTP.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from phalanx.config import EngineConfig
from phalanx.engine.client import EngineClient, EngineInfo, EngineLost, EngineStatus
from phalanx.engine.input_processor import InputProcessor, check_text
from phalanx.engine.output_processor import OutputProcessor
from phalanx.engine.request_stream import RequestStream
from phalanx.errors import ConfigError, Draining, EngineDead, Loading
from phalanx.executor.base import StartProgress
from phalanx.outputs import RequestOutput
from phalanx.sampling_params import SamplingParams, StructuredOutputs

if TYPE_CHECKING:
    from phalanx.checkpoint.locate import Checkpoint
    from phalanx.engine.engines import Engines
    from phalanx.structured.grammar import GrammarCompiler
    from phalanx.text.chat_template import ChatTemplate
    from phalanx.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_INLINE_CHARACTERS = 1024
"""A shorter prompt is tokenised on the event loop: it takes less time than handing it to a thread."""


class AsyncEngine:
    """One model, served to many callers of one event loop.

    Guarantees: an error of one request reaches that request alone; a stream that is closed, cancelled or dropped frees
    what it held within one step; after `close` no process is left.
    """

    info: EngineInfo
    """Set by `start`, and again by each engine process that takes the place of a lost one; of several replicas, the
    first one's."""
    tokenizer: Tokenizer
    """Set by `start`."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        client: EngineClient | None = None,
        checkpoint: Checkpoint | None = None,
        tokenizer: Tokenizer | None = None,
        name: str = "",
    ):
        """`client` replaces the engine process (for example an `EchoEngine`); then `tokenizer` or `checkpoint` must
        come with it. Otherwise all is found from `config`. `name` tells its requests from those of others where it
        shares the client with them."""
        self.config = config or EngineConfig()
        """Resolved once `start` has returned."""
        self.checkpoint = checkpoint
        self._client = client
        self._engines: Engines | None = None
        self._given_tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="phalanx-text")
        self._trials = ThreadPoolExecutor(max_workers=2, thread_name_prefix="phalanx-grammar")
        """For requests with a grammar: trying one may take seconds, and texts must not wait behind it."""
        self._streams: weakref.WeakSet[RequestStream] = weakref.WeakSet()
        self._preparing = 0
        """Requests being tokenised, not yet in the engine."""
        self._name = name
        self._count = itertools.count()
        self._state = "loading"
        self._started = False
        self._inputs: InputProcessor | None = None
        self._outputs: OutputProcessor | None = None
        self._template: ChatTemplate | None = None
        self._grammars: GrammarCompiler | None = None
        self._grammars_lock = threading.Lock()

    async def start(self, progress: StartProgress | None = None) -> EngineInfo:
        """Load the model. `progress` is called on the event loop. Raises UserError; then nothing is left running."""
        self._started = True
        try:
            if self._client is None:
                self.info = await self._start_process(progress)
            else:
                self.info = await self._start_given()
        except BaseException:
            await self.close()
            raise
        if self._state == "closed":
            raise EngineDead("The engine was closed while it was starting.")
        self._inputs = InputProcessor(
            self.config,
            self.tokenizer,
            self.info.vocab_size,
            self.checkpoint.generation_config if self.checkpoint is not None else None,
            validate_grammar=self._validate_grammar,
        )
        self._outputs = OutputProcessor(self.tokenizer)
        self._state = "ready"
        return self.info

    async def _start_process(self, progress: StartProgress | None) -> EngineInfo:
        from phalanx.engine.engines import Engines

        engines = self._engines = Engines(self.config, self.checkpoint, progress=progress, renewed=self._renewed)
        # First of all: importing torch there takes longer than everything here.
        self._client = await engines.spawn()
        self.checkpoint = await engines.locate()
        self.config = engines.config
        started = asyncio.ensure_future(self._client.start())
        try:
            await self._in_thread(self._load_text)
        except BaseException:
            started.cancel()
            await asyncio.gather(started, return_exceptions=True)
            raise
        return await started

    def _renewed(self, info: EngineInfo) -> None:
        """A new engine process took the place of the first one."""
        self.info = info

    async def _start_given(self) -> EngineInfo:
        client = self._client
        if client is None:
            raise ConfigError("There is no engine to start.")
        await self._in_thread(self._load_text)
        info = await client.start()
        if self.config.model.max_model_len is None:
            self.config = replace_model(self.config, max_model_len=info.max_model_len)
        return info

    def _load_text(self) -> None:
        """Tokenizer and chat template. Raises UserError."""
        from phalanx.text.chat_template import ChatTemplate, load_source
        from phalanx.text.tokenizer import load_tokenizer

        model = self.config.model
        if self._given_tokenizer is not None:
            self.tokenizer = self._given_tokenizer
        elif self.checkpoint is not None:
            self.tokenizer = load_tokenizer(self.checkpoint, model.tokenizer, model.revision)
        else:
            raise ConfigError("An engine client needs a tokenizer beside it.", fix="Give AsyncEngine a tokenizer.")
        source = load_source(model.chat_template, self.tokenizer.chat_template)
        self._template = ChatTemplate(source, self.tokenizer.special_tokens)
        self._template.start()
        if self._state == "closed":  # while this was read, on a thread that nobody waits for
            self._template.close()

    @property
    def chat_template(self) -> ChatTemplate | None:
        """None before `start`; without a `source` when the model has no template."""
        return self._template

    def default_sampling(self, **overrides: Any) -> SamplingParams:
        """See `InputProcessor.default_sampling`."""
        return self._ready().default_sampling(**overrides)

    async def submit(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        owner: int = 0,
        add_special_tokens: bool = True,
        source: str = "prompt",
    ) -> RequestStream:
        """Validate, tokenise and queue a request; returns when it is in the queue. Iterate the stream for deltas and
        close it (`aclose`), or drop it, to abort.

        `add_special_tokens` is False for a rendered chat template; `source` is what errors call the prompt.
        `owner` is a number for whoever asks: those who wait are served fairly.
        Raises InvalidRequest, ContextLengthExceeded, QueueFull, Loading, Draining, EngineDead.
        """
        inputs = self._ready()
        if self._outputs is None or self._client is None:
            raise Loading("The engine is loading the model.")
        arrival = time.monotonic()
        number = next(self._count)
        request_id = request_id if request_id is not None else f"request-{number}"
        check_text("request_id", request_id)
        # Callers' ids need not be unique, the engine's are.
        process = partial(
            inputs.process,
            f"{request_id[:100]}-{self._name}{number}",
            prompt,
            params,
            priority=priority,
            cache_salt=cache_salt,
            owner=owner,
            add_special_tokens=add_special_tokens,
            source=source,
        )
        self._preparing += 1
        try:
            if _is_quick(prompt, params):
                children = process()
            else:
                threads = self._trials if params.structured_outputs is not None else self._threads
                children = await asyncio.get_running_loop().run_in_executor(threads, process)
            text = prompt if isinstance(prompt, str) else None
            assembly = self._outputs.open(children, request_id=request_id, prompt=text, arrival=arrival)
            stream = RequestStream(self._client, children, assembly)
            self._streams.add(stream)
            try:
                await stream.admitted()
            except BaseException:
                await stream.aclose()
                raise
            return stream
        finally:
            self._preparing -= 1

    async def generate(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """`submit` and iterate: yields deltas, raises what `submit` raises. Without `params`, the model's defaults."""
        params = params if params is not None else self.default_sampling()
        stream = await self.submit(prompt, params, request_id=request_id, **options)
        try:
            async for delta in stream:
                yield delta
        finally:
            await stream.aclose()

    async def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """The prompt for a conversation, by the model's template, in a thread. `options` go to `ChatTemplate.render`.

        Submit it with `add_special_tokens=False`. Raises InvalidRequest when there is no template or it refuses.
        """
        self._ready()
        if self._template is None:
            raise Loading("The model is loading.", retry_after=2.0)
        return await self._in_thread(partial(self._template.render, messages, **options))

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids, off the event loop."""
        return await self._in_thread(partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens))

    def status(self) -> EngineStatus:
        """The latest known, without waiting. `state` says loading, ready, recovering, draining or failed."""
        if self._client is None:
            return EngineStatus(state="failed" if self._state == "closed" else self._state, heartbeat=time.time())
        status = self._client.status()
        if self._state in ("loading", "draining") and status.state == "ready":  # of several, the first one is
            return msgspec.structs.replace(status, state=self._state)
        return status

    @property
    def phase(self) -> str:
        """loading, ready, draining or closed: what this object does, not how its engines are (`status`)."""
        return self._state

    async def lost(self) -> EngineLost:
        """Returns, with the reason, when the engine is lost for good: nothing was or will be recovered any more."""
        if self._client is None:
            raise EngineDead("The engine is not started.")
        return await self._client.lost()

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait for those that run. False when some still ran after `timeout` seconds."""
        if self._state != "closed":
            self._state = "draining"
        deadline = time.monotonic() + timeout
        while self._preparing or any(stream.running for stream in list(self._streams)):
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(0.02)
        return self._client is None or await self._client.drain(max(0.0, deadline - time.monotonic()))

    async def close(self) -> None:
        """End every stream and the engine process. Idempotent."""
        self._state = "closed"
        await asyncio.gather(*(stream.aclose() for stream in list(self._streams)), return_exceptions=True)
        if self._engines is not None:
            await self._engines.close()
        elif self._client is not None:
            await self._client.close()
        if self._template is not None:
            self._template.close()
        if self._grammars is not None:
            self._grammars.close()
        for threads in (self._threads, self._trials):
            threads.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _ready(self) -> InputProcessor:
        if self._state == "draining":
            raise Draining("The server is shutting down.", retry_after=5.0)
        if self._state == "closed":
            raise EngineDead("The engine is closed.")
        if self._inputs is None:
            if not self._started:
                raise Loading("The engine is not started. Use `async with`, or await `start()`.", retry_after=2.0)
            raise Loading("The model is loading.", retry_after=2.0)
        return self._inputs

    def _validate_grammar(self, wanted: StructuredOutputs) -> None:
        from phalanx.structured.grammar import GrammarCompiler

        with self._grammars_lock:
            if self._grammars is None:
                self._grammars = GrammarCompiler(self.tokenizer, self.info.vocab_size, self.config.limits)
        self._grammars.validate(wanted)

    async def _in_thread(self, call: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


def _is_quick(prompt: str | list[int], params: SamplingParams) -> bool:
    if isinstance(params, SamplingParams) and (params.structured_outputs is not None or params.bad_words):
        return False
    return not isinstance(prompt, str) or len(prompt) <= _INLINE_CHARACTERS


def replace_model(config: EngineConfig, **changes: Any) -> EngineConfig:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **changes))

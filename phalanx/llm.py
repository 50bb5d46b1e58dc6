"""`LLM`: the offline API, a thin loop over `Engine` in this process.

    with LLM("folder, .gguf file or hub id") as llm:
        for output in llm.generate(["Once upon a time", "2 + 2 ="], SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)

Answers come back whole and in the order of the prompts. The model is in this process, or in others where there are
several ranks or replicas. Serves one caller at a time, others wait; for many callers at once use `AsyncEngine`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from phalanx.checkpoint.locate import Checkpoint, locate
from phalanx.config import EngineConfig
from phalanx.engine.blocking import BlockingRouter
from phalanx.engine.client import EngineOutput, EngineRequest
from phalanx.engine.core import open_engine
from phalanx.engine.core_messages import raised
from phalanx.engine.engine import Engine
from phalanx.engine.input_processor import InputProcessor
from phalanx.engine.mailboxes import merged
from phalanx.engine.output_processor import OutputProcessor, RequestAssembly, merge
from phalanx.engine.resolution import for_engine, resolved
from phalanx.errors import EngineDead, InvalidRequest, QueueFull
from phalanx.outputs import RequestOutput
from phalanx.sampling_params import SamplingParams, StructuredOutputs
from phalanx.text.chat_template import ChatTemplate, load_source
from phalanx.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from rich.progress import Progress

    from phalanx.checkpoint.progress import DownloadProgress
    from phalanx.structured.grammar import GrammarCompiler

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`; a mapping may add `cache_salt`, `priority`."""
Message = Mapping[str, Any]


_AT_ONCE = 8
"""Outputs of a request of which text is made together, at most: so much later a progress bar moves."""


@dataclasses.dataclass
class _Job:
    """One prompt being answered."""

    assembly: RequestAssembly
    children: list[EngineRequest]
    result: RequestOutput | None = None
    _held: dict[str, list[EngineOutput]] = dataclasses.field(default_factory=dict)

    def due(self, output: EngineOutput) -> EngineOutput | None:
        """`output`, with those before it that could wait; None when it can, too. Nobody sees an answer before its end,
        and the text of several tokens takes little longer than that of one; but a stop string has to be found."""
        held = self._held.setdefault(output.request_id, [])
        held.append(output)
        begun = self.assembly.metrics.first_token is not None
        if begun and output.finish_reason is None and len(held) < _AT_ONCE and not self.children[0].sampling.stop:
            return None
        del self._held[output.request_id]
        return merged(held) if len(held) > 1 else output


_living: weakref.WeakSet[LLM] = weakref.WeakSet()


def _in_a_fork() -> None:
    """A thread that has the turn is not in the fork, which would wait for it for ever; and its step is torn."""
    for llm in _living:
        if llm._turn.locked():
            llm._turn, llm._home = threading.Lock(), os.getppid()


os.register_at_fork(after_in_child=_in_a_fork)


class LLM:
    """A loaded model. Raises UserError when it cannot be loaded: ConfigError for an unknown option, CheckpointError,
    UnsupportedModel, NotEnoughMemory.

    `options` are those of `phalanx serve` by their flat names (`dtype="float32"`, `max_model_len=4096`, …); without
    `model` it is the demo model. Threads that call at once take turns.
    """

    def __init__(self, model: str | None = None, **options: Any):
        config = EngineConfig.from_options(model=model, **options)
        checkpoint = _locate(config)
        self.config = resolved(config, checkpoint)
        self.tokenizer = load_tokenizer(checkpoint, config.model.tokenizer, config.model.revision)
        template = load_source(config.model.chat_template, self.tokenizer.chat_template)
        self._template = ChatTemplate(template, self.tokenizer.special_tokens)
        self._engine: Engine | BlockingRouter
        if self.config.parallel.data_parallel_size > 1:
            self._engine = BlockingRouter(*for_engine(self.config, checkpoint))
            self.info = self._engine.info
        else:
            self._engine, self.info = open_engine(*for_engine(self.config, checkpoint))
        self._closed = False
        alone = self.info.executor == "inprocess" and isinstance(self._engine, Engine)
        self._home = None if alone else os.getpid()
        """The process whose child processes compute, or threads did at a fork; a fork of it must leave them alone."""
        self._turn = threading.Lock()
        self._grammars: GrammarCompiler | None = None
        self._inputs = InputProcessor(
            self.config,
            self.tokenizer,
            self.info.vocab_size,
            checkpoint.generation_config,
            validate_grammar=self._validate_grammar,
        )
        self._outputs = OutputProcessor(self.tokenizer)
        self._count = itertools.count()
        _living.add(self)

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses when given none: 16 tokens, the rest as the model's generation_config.json says."""
        return self._inputs.default_sampling()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """One output per prompt, in order. `sampling_params` are for all, or one per prompt.

        `use_tqdm` shows a progress bar when standard error is a terminal. Ctrl-C gives up the whole call; the object
        stays usable. Raises InvalidRequest before anything is computed.
        """
        return self._generate(_prompts(prompts), sampling_params, use_tqdm, special_tokens=True)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list of conversations, by the model's chat template.

        Raises InvalidRequest when there is no template or it refuses the messages.
        """
        if not messages:
            raise InvalidRequest("There are no messages.", param="messages")
        one = isinstance(messages[0], Mapping)
        conversations: Any = [messages] if one else messages
        options = dict(chat_template_kwargs or {})
        texts = [
            self._template.render(list(c), add_generation_prompt=add_generation_prompt, tools=tools, **options)
            for c in conversations
        ]
        return self._generate(texts, sampling_params, use_tqdm, special_tokens=False)

    def _generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        bar: bool,
        *,
        special_tokens: bool,
    ) -> list[RequestOutput]:
        with self._turn:
            if self._closed:
                raise EngineDead("This LLM is closed.")
            if self._home not in (None, os.getpid()):
                raise EngineDead(
                    "This LLM belongs to the process that made it, not to a fork of it.",
                    fix="Make one in each process.",
                )
            every = self._params(sampling_params, len(prompts))
            jobs = [self._job(prompt, params, special_tokens) for prompt, params in zip(prompts, every, strict=True)]
            with _progress(len(jobs), bar) as advance, _held_interrupt() as check:
                self._run(jobs, advance, check)
        return [_whole(job) for job in jobs]

    def _params(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given if given is not None else self.get_default_sampling_params()] * count
        if not isinstance(given, Sequence):
            raise InvalidRequest(f"Sampling parameters must be SamplingParams, got {type(given).__name__}.")
        if len(given) != count:
            raise InvalidRequest(f"There are {count} prompts but {len(given)} sampling parameters.")
        return given

    def _job(self, prompt: Prompt, params: SamplingParams, special_tokens: bool) -> _Job:
        number = str(next(self._count))
        text, options = _unpack(prompt)
        children = self._inputs.process(number, text, params, add_special_tokens=special_tokens, **options)
        shown = text if isinstance(text, str) else None
        return _Job(self._outputs.open(children, request_id=number, prompt=shown), children)

    def _run(self, jobs: list[_Job], advance: Callable[[int, int], None], check: Callable[[], None]) -> None:
        """Until all jobs are done. Whatever ends it early, the engine is empty afterwards."""
        waiting = deque(child for job in jobs for child in job.children)
        owners = {child.request_id: job for job in jobs for child in job.children}
        open_ids = set(owners)
        try:
            while open_ids or self._engine.has_work:  # an aborted request still has a last output
                self._feed(waiting)
                for output in self._engine.step():
                    job = owners[output.request_id]
                    self._take(job, output, advance)
                    if job.assembly.done(output.request_id):
                        open_ids.discard(output.request_id)
                check()
        finally:
            if open_ids:
                self._clear(open_ids)

    def _feed(self, waiting: deque[EngineRequest]) -> None:
        """Queue as many requests as the engine takes."""
        while waiting:
            try:
                self._engine.add(waiting[0])
            except QueueFull:
                return
            waiting.popleft()

    def _take(self, job: _Job, output: EngineOutput, advance: Callable[[int, int], None]) -> None:
        assembly = job.assembly
        if assembly.done(output.request_id):  # it ended at a stop string; the engine has been told
            return
        if output.error is not None:
            raise raised(output.error)
        due = job.due(output)
        delta = assembly.push(due) if due is not None else None
        if delta is None:
            return
        tokens = sum(len(choice.token_ids) for choice in delta.outputs)
        job.result = delta if job.result is None else merge(job.result, delta)
        if assembly.done(output.request_id) and output.finish_reason is None:
            self._engine.abort([output.request_id])
        advance(int(assembly.finished), tokens)

    def _clear(self, request_ids: set[str]) -> None:
        try:
            self._engine.abort(request_ids)
            while self._engine.has_work:
                self._engine.step()
        except BaseException:  # interrupted within a step, or the engine is broken: nothing of it can be trusted
            self.close()
            raise

    def _validate_grammar(self, wanted: StructuredOutputs) -> None:
        from phalanx.structured.grammar import GrammarCompiler

        if self._grammars is None:
            self._grammars = GrammarCompiler(self.tokenizer, self.info.vocab_size, self.config.limits)
        self._grammars.validate(wanted)

    def close(self) -> None:
        """Free the model. Idempotent; leaves no thread or process."""
        if not getattr(self, "_closed", True):
            self._closed = True
            if self._home not in (None, os.getpid()):
                return
            self._engine.close()
            self._template.close()
            if self._grammars is not None:
                self._grammars.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


def _locate(config: EngineConfig) -> Checkpoint:
    """The model's files; a download shows how far it is."""
    from phalanx.checkpoint.progress import TerminalProgress

    with TerminalProgress() as bar:
        shown: DownloadProgress = bar
        return locate(config.model.model, revision=config.model.revision, progress=shown)


def _prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Always a list of prompts: a text, a mapping or a flat list of ids is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidRequest(f"Prompts must be a text, token ids or a list of them, got {type(prompts).__name__}.")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [list(prompts)]  # type: ignore[arg-type]
    return prompts  # type: ignore[return-value]


def _unpack(prompt: Prompt) -> tuple[str | list[int], dict[str, Any]]:
    """The prompt's text or ids, and what else its mapping says. Raises InvalidRequest."""
    if isinstance(prompt, str):
        return prompt, {}
    if not isinstance(prompt, Mapping):
        return list(prompt) if isinstance(prompt, tuple) else prompt, {}  # type: ignore[return-value]
    fields = dict(prompt)
    options: dict[str, Any] = {n: fields.pop(n) for n in ("cache_salt", "priority") if n in fields}
    if set(fields) == {"prompt"} or set(fields) == {"prompt_token_ids"}:
        return next(iter(fields.values())), options
    raise InvalidRequest(
        'A prompt mapping needs either "prompt" (a text) or "prompt_token_ids" (a list of token ids), '
        'and may have "cache_salt" and "priority".',
        param="prompt",
    )


def _whole(job: _Job) -> RequestOutput:
    if job.result is None:
        raise EngineDead("The engine ended the answer without saying why.")
    job.result.outputs.sort(key=lambda choice: choice.index)
    return job.result


@contextlib.contextmanager
def _held_interrupt() -> Iterator[Callable[[], None]]:
    """Holds Ctrl-C back until the function it gives is called, between steps, so that no step is torn. A second one is
    not held."""
    pressed = False
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = signal.getsignal(signal.SIGINT)

    def hold(number: int, frame: Any) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, hold)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)
    check()  # pressed after the last step


@contextlib.contextmanager
def _progress(total: int, wanted: bool) -> Iterator[Callable[[int, int], None]]:
    """Gives a function to call with prompts finished and tokens made since the last call."""
    if not (wanted and total and sys.stderr.isatty()):
        yield lambda prompts, tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("Prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[rate]}"),
    )
    bar: Progress
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("prompts", total=total, rate="")
        made = 0

        def advance(prompts: int, tokens: int) -> None:
            nonlocal made
            made += tokens
            elapsed = bar.tasks[0].elapsed or 0.0
            bar.update(task, advance=prompts, rate=f"{made / elapsed:.0f} tokens/s" if elapsed else "")

        yield advance

"""Chat templates: messages to the prompt a model was trained on.

A template is a program that came with the model. It is rendered in a sandbox, in a process of its own
(`template_worker`) that is killed when it takes longer than allowed, and whose text and memory are limited. Templates
sent by clients are not the business of this module; the server refuses them.

Also flattens message content given in parts. Does not fetch images, and does not read tool calls back from an answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from phalanx.errors import ConfigError, InvalidRequest

MAX_SOURCE = 1 << 20
"""Characters of the longest template. The longest published ones have about 30,000."""
MAX_OUTPUT = 16 << 20
"""Characters of the longest prompt that a template may make."""
_MEMORY = 768 << 20
_START_S = 20.0


class ChatTemplate:
    """One template, checked for syntax when made. `render` may be called from several threads."""

    def __init__(
        self,
        source: str | None,
        special_tokens: Mapping[str, str] | None = None,
        *,
        timeout_s: float = 2.0,
        max_output: int = MAX_OUTPUT,
        processes: int = 2,
    ):
        """`source` None stands for a model without a template: `render` then says what to do. At most `processes`
        renders run at the same time. Raises ConfigError when the template is too long or has a syntax error."""
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._timeout_s = timeout_s
        self._max_output = max_output
        if source is not None:
            check_syntax(source)
        self._pool = _Pool(processes)
        self.close = weakref.finalize(self, self._pool.close)
        """Ends the processes. Idempotent; happens by itself when the object goes."""

    def start(self) -> None:
        """Start a process now, so that the first request does not wait for it."""
        if self.source is not None:
            self._pool.start()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for `messages`. `kwargs` are further variables of the template.

        Raises InvalidRequest when there is no template, when the template refuses the messages (with its own words)
        or fails on them, and when the text grows too long or takes too long.
        """
        if self.source is None:
            raise InvalidRequest(
                "The model has no chat template, so it cannot take chat messages.",
                fix="Send a completion request, or start with --chat-template FILE.",
                param="messages",
            )
        variables = {
            **self._special_tokens,
            **kwargs,
            "messages": [_without_none(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": list(tools) if tools else None,
        }
        try:
            request = json.dumps({"template": self.source, "variables": variables, "limit": self._max_output})
        except (TypeError, ValueError, RecursionError):
            raise InvalidRequest(
                "The messages hold something that is not JSON, or is nested too deeply.", param="messages"
            ) from None
        reply = self._pool.ask(request.encode("ascii"), self._timeout_s)
        if "text" in reply:
            return reply["text"]
        raise InvalidRequest(self._explain(reply), param="messages")

    def _explain(self, reply: dict[str, str]) -> str:
        detail = " ".join(reply["error"].split())[:500]
        match reply["kind"]:
            case "time":
                return f"The chat template took longer than the {self._timeout_s:g} seconds it may take."
            case "size":
                return f"The chat template made more than {self._max_output} characters, or needed too much memory."
            case "security":
                return f"The chat template did something that templates must not do: {detail}"
            case _:
                return f"The chat template cannot take these messages: {detail}"


def check_syntax(source: str) -> None:
    """Raises ConfigError when `source` is too long or is not a template."""
    if len(source) > MAX_SOURCE:
        raise ConfigError(f"The chat template has {len(source)} characters; at most {MAX_SOURCE} are allowed.")
    from phalanx.text.template_worker import Sandbox

    try:
        Sandbox().parse(source)  # only parses: nothing of the template runs, not even its constants
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"The chat template has a syntax error in line {error.lineno}: {error.message}",
            fix="Mend it, or give another with --chat-template.",
        ) from None
    except RecursionError:
        raise ConfigError("The chat template is nested too deeply.", fix="Give another with --chat-template.") from None


def load_source(option: str | None, model_template: str | None) -> str | None:
    """The template to use: what `--chat-template` names (a file, or a template in one line), else the model's own.

    Raises ConfigError when it names no file and does not look like a template.
    """
    if option is None:
        return model_template
    if "{" in option or "\n" in option:
        return option
    try:
        path = Path(option)
        if path.stat().st_size > 4 * MAX_SOURCE:
            raise ConfigError(f"The chat template '{option}' is too large.")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The chat template '{option}' cannot be read: {error}",
            fix="Give the path of a file, or the template itself in one line.",
        ) from None


def flatten_content(content: Any) -> str | None:
    """Message content as one string: None and text as they are, text parts joined by line breaks.

    Raises InvalidRequest for parts that are not text, since the models served here take only text.
    """
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest("`content` must be a string or a list of parts.", param="messages")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else "text" if isinstance(part, str) else None
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text", "refusal") and not isinstance(part, str):
            raise InvalidRequest(
                f"Content of type {str(kind)[:40]!r} is not supported; this model takes only text.",
                param="messages",
                code="unsupported_parameter",
            )
        if isinstance(part, dict) and kind == "refusal":
            text = part.get("refusal")
        if not isinstance(text, str):
            raise InvalidRequest("A content part of type text must have a string as `text`.", param="messages")
        texts.append(text)
    return "\n".join(texts)


def _without_none(message: Mapping[str, Any]) -> dict[str, Any]:
    """Templates ask whether a key is there; `"tool_calls": null` must look as if it were not."""
    return {key: value for key, value in message.items() if value is not None}


class _Gone(Exception):
    """The process ended by itself."""


class _Late(Exception):
    """The process did not answer in time."""


class _Process:
    """One template worker. After an exception it is dead."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("template_worker.py")
        # Its environment holds only the way to jinja2, so that a template could not even find a secret there; in its
        # own session it does not get the terminal's Ctrl-C.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script), str(_MEMORY)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise OSError("no pipes")
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)

    def ask(self, request: bytes, timeout_s: float) -> dict[str, str]:
        """Raises _Late or _Gone."""
        deadline = time.monotonic() + timeout_s
        try:
            self._write(len(request).to_bytes(4, "big") + request, deadline)
            size = int.from_bytes(self._read(4, deadline), "big")
            answer: dict[str, str] = json.loads(self._read(size, deadline))
            return answer
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _write(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            _await(self._in, select.POLLOUT, deadline)
            try:
                view = view[os.write(self._in, view) :]
            except BrokenPipeError:
                raise _Gone from None
            except BlockingIOError:
                continue

    def _read(self, count: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            _await(self._out, select.POLLIN, deadline)
            try:
                piece = os.read(self._out, min(count - len(data), 1 << 20))
            except BlockingIOError:
                continue
            if not piece:
                raise _Gone
            data += piece
        return bytes(data)


def _await(descriptor: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise _Late


class _Pool:
    """Up to `size` processes, started when first needed and kept. Thread-safe."""

    def __init__(self, size: int):
        self._slots = threading.BoundedSemaphore(size)
        self._idle: list[_Process] = []
        self._lock = threading.Lock()
        self._closed = False

    def ask(self, request: bytes, timeout_s: float) -> dict[str, str]:
        with self._slots:
            for process, fresh in ((self._idle_one(), False), (None, True)):
                if process is None and not fresh:
                    continue
                try:
                    if process is None:
                        process = _Process()
                        process.ask(_PROBE, _START_S)
                    answer = process.ask(request, timeout_s)
                except _Late:
                    return {"kind": "time", "error": ""}
                except _Gone:  # an idle process may have been killed by somebody; a fresh one died of this template
                    continue
                self._keep(process)
                return answer
            return {"kind": "size", "error": ""}

    def start(self) -> None:
        """One process that has rendered something."""
        self.ask(_PROBE, _START_S)

    def close(self) -> None:
        with self._lock:
            self._closed, idle = True, self._idle
            self._idle = []
        for process in idle:
            process.kill()

    def _idle_one(self) -> _Process | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _keep(self, process: _Process) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(process)
                return
        process.kill()


_PROBE = json.dumps({"template": "", "variables": {}, "limit": 0}).encode("ascii")

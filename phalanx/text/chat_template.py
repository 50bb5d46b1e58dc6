"""Chat templates: messages to the prompt a model was trained on.

A template is a program that came with the model. It is rendered in a sandbox, in a process of its own
(`template_worker`) that is killed when it computes longer than allowed, and whose text and memory are limited.
Templates sent by clients are not the business of this module; the server refuses them.

Also flattens message content given in parts. Does not fetch images, and does not read tool calls back from an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from phalanx.errors import ConfigError, InvalidRequest
from phalanx.killable import Gone, KillablePool, Late

MAX_SOURCE = 1 << 20
"""Characters of the longest template. The longest published ones have about 30,000."""
MAX_OUTPUT = 16 << 20
"""Characters of the longest prompt that a template may make."""
_MEMORY = 768 << 20
"""Bytes of address space of a process that renders."""


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
        renders run at the same time, and each may use `timeout_s` of processor time. Raises ConfigError when the
        template is too long or has a syntax error."""
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._timeout_s = timeout_s
        self._max_output = max_output
        if source is not None:
            check_syntax(source)
        self._pool = KillablePool("phalanx.text.template_worker", size=processes, memory_bytes=_MEMORY)

    def start(self) -> None:
        """Start a process now, so that the first request does not wait for it."""
        if self.source is not None:
            self._pool.start()

    def close(self) -> None:
        """End the processes. Idempotent; happens by itself when the object goes."""
        self._pool.close()

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
        or fails on them, and when the text grows too long or takes too long. Raises Unavailable when the machine is too
        busy to render it.
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
        request = {"template": self.source, "variables": variables, "limit": self._max_output}
        try:
            reply = self._pool.ask(request, self._timeout_s)
        except ValueError:
            kind, detail = "template", "they hold something that is not JSON, or are nested too deeply"
        except Late:
            kind, detail = "time", ""
        except Gone:
            kind, detail = "size", ""
        else:
            if "text" in reply:
                text: str = reply["text"]
                return text
            kind, detail = reply["kind"], " ".join(reply["error"].split())[:500]
        match kind:
            case "time":
                why = (
                    f"The chat template took longer than the {self._timeout_s:g} seconds of processor time it may take."
                )
            case "size":
                why = f"The chat template made more than {self._max_output} characters, or needed too much memory."
            case "security":
                why = f"The chat template did something that templates must not do: {detail}"
            case _:
                why = f"The chat template cannot take these messages: {detail}"
        raise InvalidRequest(why, param="messages")


def check_syntax(source: str) -> None:
    """Raises ConfigError when `source` is too long or is not a template."""
    if len(source) > MAX_SOURCE:
        raise ConfigError(f"The chat template has {len(source)} characters; at most {MAX_SOURCE} are allowed.")
    from phalanx.text.template_worker import Sandbox

    try:
        Sandbox().parse(source)  # only parses: nothing of the template runs, not even its constants
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"The chat template has a syntax error in line {error.lineno}: {str(error.message).rstrip('.')}.",
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
            f"The chat template '{option}' cannot be read: {getattr(error, 'strerror', None) or error}.",
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

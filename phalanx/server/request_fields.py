"""From the fields of a request to `SamplingParams`, and what we say to fields that this version does not have.

A field that is known but not supported is refused when its value asks for something; a field nobody knows is ignored,
with one warning in the log for each name.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.errors import InvalidRequest
from phalanx.sampling_params import SamplingParams, StructuredOutputs
from phalanx.server.openai_types import ChatFields, ChatMessage, ChatRequest, CompletionRequest, SamplingFields
from phalanx.text.chat_template import flatten_content

logger = logging.getLogger("phalanx.server")


@dataclass(frozen=True, slots=True)
class Unsupported:
    why: str
    harmless: tuple[Any, ...] = ()
    """Values that ask for nothing; null always does."""


_TOOLS = "tool calling is not in this version"
_STRUCTURED = "use `structured_outputs`"
UNSUPPORTED: dict[str, Unsupported] = {
    "tools": Unsupported(_TOOLS, ([],)),
    "tool_choice": Unsupported(_TOOLS, ("none",)),
    "parallel_tool_calls": Unsupported(_TOOLS, (True, False)),
    "functions": Unsupported(_TOOLS, ([],)),
    "function_call": Unsupported(_TOOLS, ("none",)),
    "audio": Unsupported("the model answers in text only"),
    "modalities": Unsupported("the model answers in text only", (["text"],)),
    "prediction": Unsupported("predicted outputs are not in this version"),
    "web_search_options": Unsupported("web search is not in this version"),
    "reasoning_effort": Unsupported("reasoning control is not in this version", ("none",)),
    "include_reasoning": Unsupported("reasoning control is not in this version", (True, False)),
    "thinking_token_budget": Unsupported("reasoning control is not in this version"),
    "store": Unsupported("answers are not stored", (False,)),
    "documents": Unsupported("documents are not in this version; put their text into a message", ([],)),
    "chat_template": Unsupported("a request cannot bring its own chat template; set --chat-template on the server"),
    "mm_processor_kwargs": Unsupported("the model takes text only", ({},)),
    "media_io_kwargs": Unsupported("the model takes text only", ({},)),
    "prompt_embeds": Unsupported("prompts are text or token ids"),
    "suffix": Unsupported("insertion is not in this version", ("",)),
    "best_of": Unsupported("use `n`", (1,)),
    "use_beam_search": Unsupported("beam search is not in this version", (False,)),
    "length_penalty": Unsupported("beam search is not in this version", (1, 1.0)),
    "early_stopping": Unsupported("beam search is not in this version", (False,)),
    "logprob_token_ids": Unsupported("use `logprobs`", ([],)),
    "guided_json": Unsupported(_STRUCTURED),
    "guided_regex": Unsupported(_STRUCTURED),
    "guided_choice": Unsupported(_STRUCTURED),
    "guided_grammar": Unsupported(_STRUCTURED),
    "guided_decoding_backend": Unsupported(_STRUCTURED),
    "truncation_side": Unsupported("prompts are truncated on the left", ("left",)),
    "kv_transfer_params": Unsupported("KV transfer is not in this version"),
    "return_token_ids": Unsupported("use /tokenize", (False,)),
    "return_tokens_as_token_ids": Unsupported("use /tokenize", (False,)),
    "spaces_between_special_tokens": Unsupported("special tokens are written as they are", (True, False)),
}

ACCEPTED = frozenset({"service_tier", "prompt_cache_key", "safety_identifier", "verbosity", "detokenize"})
"""OpenAI's fields that change nothing here and need no warning."""

MAX_WARNED = 256
"""Unknown names remembered; a client cannot make the set or the log grow beyond."""


class UnknownFields:
    """One warning for each unknown field name, for a bounded number of names."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def warn(self, names: Mapping[str, Any]) -> None:
        for name in names:
            if name not in self._seen and len(self._seen) < MAX_WARNED:
                self._seen.add(name)
                logger.warning("Ignoring the unknown request field %r (said once for each name).", name[:64])


def refuse_unsupported(extra: Mapping[str, Any], unknown: UnknownFields) -> None:
    """`extra`: the fields that the request type does not declare. Raises InvalidRequest."""
    tools_unused = extra.get("tool_choice") == "none"
    ignored = {}
    for name, value in extra.items():
        rule = UNSUPPORTED.get(name)
        if rule is None:
            if name not in ACCEPTED:
                ignored[name] = value
        elif value is not None and value not in rule.harmless and not (name == "tools" and tools_unused):
            raise InvalidRequest(f"`{name}` is not supported: {rule.why}.", param=name, code="unsupported_parameter")
    if ignored:
        unknown.warn(ignored)


MakeParams = Callable[..., SamplingParams]
"""Makes the parameters from the ones given; the rest are the model's defaults (`AsyncEngine.default_sampling`)."""


def sampling_params(request: SamplingFields, make: MakeParams, **given: Any) -> SamplingParams:
    """`given` comes from the endpoint's own rules. Raises InvalidRequest."""
    values = {name: value for name in _SAMPLING_FIELDS if (value := getattr(request, name)) is not None}
    return make(**values, structured_outputs=_structured_outputs(request), **given)


_SAMPLING_FIELDS = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens",
    "bad_words", "logit_bias", "allowed_token_ids", "prompt_logprobs",
)  # fmt: skip


def _structured_outputs(request: SamplingFields) -> StructuredOutputs | None:
    wanted, fields = request.response_format, request.structured_outputs
    constrained = wanted is not None and wanted.type != "text"
    if constrained and fields is not None:
        raise InvalidRequest(
            "`response_format` and `structured_outputs` cannot be used together.", param="structured_outputs"
        )
    if fields is not None:
        return StructuredOutputs(
            json=_schema(fields.json_, "structured_outputs.json"),
            json_object=bool(fields.json_object),
            regex=fields.regex,
            choice=None if fields.choice is None else tuple(fields.choice),
            grammar=fields.grammar,
        )
    if wanted is None or not constrained:
        return None
    if wanted.type == "json_object":
        return StructuredOutputs(json_object=True)
    if wanted.json_schema is None:
        raise InvalidRequest(
            "`response_format.json_schema` is required for type json_schema.",
            param="response_format.json_schema", code="missing_required_parameter",
        )  # fmt: skip
    return StructuredOutputs(json=_schema(wanted.json_schema.schema_, "response_format.json_schema.schema"))


def _schema(schema: dict[str, Any] | str | bool | None, param: str) -> dict[str, Any] | str | None:
    if schema is True:
        return {}
    if schema is False:
        raise InvalidRequest("The JSON Schema `false` allows no answer.", param=param)
    return schema


def completion_params(request: CompletionRequest, make: MakeParams) -> SamplingParams:
    """The endpoint's own rules: `max_tokens` is 16 by default; 0 (with `echo`) computes one token that is not shown."""
    max_tokens = 16 if request.max_tokens is None else request.max_tokens
    if max_tokens == 0 and not request.echo:
        raise InvalidRequest("`max_tokens` must be at least 1 without `echo`.", param="max_tokens")
    given: dict[str, Any] = {"max_tokens": max_tokens or 1, "logprobs": request.logprobs}
    if request.echo and request.logprobs is not None and request.prompt_logprobs is None:
        given["prompt_logprobs"] = request.logprobs
    return sampling_params(request, make, **given)


def chat_params(request: ChatRequest, make: MakeParams) -> SamplingParams:
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("`top_logprobs` needs `logprobs: true`.", param="top_logprobs")
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    if (
        None not in (request.max_tokens, request.max_completion_tokens)
        and request.max_tokens != request.max_completion_tokens
    ):
        raise InvalidRequest(
            "`max_tokens` and `max_completion_tokens` differ; send only one.", param="max_completion_tokens"
        )
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return sampling_params(request, make, max_tokens=max_tokens, logprobs=logprobs)


# ----------------------------------------------------------------------------------------------------- chat prompts

MAX_TEMPLATE_KWARGS = 64
RESERVED_TEMPLATE_KWARGS = frozenset({
    "add_generation_prompt", "bos_token", "chat_template", "continue_final_message", "conversation", "conversations",
    "documents", "eos_token", "messages", "pad_token", "padding", "return_assistant_tokens_mask", "return_dict",
    "return_tensors", "self", "template", "tokenize", "tokenizer", "tokenizer_kwargs", "tools", "truncation",
    "unk_token",
})  # fmt: skip
"""Names that would change what is rendered, or how, instead of adding a variable to it."""


def template_kwargs(request: ChatFields) -> dict[str, Any]:
    """Raises InvalidRequest: a request can never bring a template, nor turn on anything but template variables."""
    kwargs = request.chat_template_kwargs or {}
    if len(kwargs) > MAX_TEMPLATE_KWARGS:
        raise InvalidRequest(
            f"`chat_template_kwargs` has more than {MAX_TEMPLATE_KWARGS} entries.", param="chat_template_kwargs"
        )
    for name in kwargs:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,63}", name):
            raise InvalidRequest("The keys of `chat_template_kwargs` must be names.", param="chat_template_kwargs")
        if name.lower() in RESERVED_TEMPLATE_KWARGS:
            raise InvalidRequest(
                f"`chat_template_kwargs` may not contain `{name.lower()}`.", param="chat_template_kwargs"
            )
    return kwargs


def template_messages(messages: list[ChatMessage], max_messages: int) -> list[dict[str, Any]]:
    """The messages as a chat template reads them: text parts joined, `developer` as `system`. Raises InvalidRequest."""
    if len(messages) > max_messages:
        raise InvalidRequest(
            f"`messages` has {len(messages)} entries; at most {max_messages} are allowed (--max-messages).",
            param="messages",
        )
    rendered = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        extra = message.model_extra or {}
        if message.role in ("tool", "function") or extra.get("tool_calls") or extra.get("function_call"):
            raise InvalidRequest(
                f"`{where}` is about a tool call: {_TOOLS}.", param=where, code="unsupported_parameter"
            )
        role = "system" if message.role == "developer" else message.role
        entry: dict[str, Any] = {"role": role, "content": _text(message, where)}
        if message.name is not None:
            entry["name"] = message.name
        rendered.append(entry)
    return rendered


def _text(message: ChatMessage, where: str) -> str:
    if message.content is None:
        raise InvalidRequest(
            f"`{where}.content` is required.", param=f"{where}.content", code="missing_required_parameter"
        )
    try:
        return flatten_content(message.content) or ""
    except InvalidRequest as error:
        error.param = f"{where}.content"
        raise

"""What clients send (pydantic, strict) and what they get (msgspec), in the shapes of the OpenAI API.

Requests check types and shapes here; ranges are checked once for every front end, by `SamplingParams` and by the
engine's input processor, and only documented here. null always means "not given". Fields we do not know stay in
`model_extra`; `request_fields.refuse_unsupported` looks at them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic.types import FailFast

from phalanx.errors import InvalidRequest

# ---------------------------------------------------------------------------------------------------- field types


class StopAtFirst(FailFast):
    """One error for a list, not one for each of its million entries. (Hashable, so that it can be part of a union.)"""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


def _range(low: float | None = None, high: float | None = None, **more: Any) -> Any:
    bounds = {name: value for name, value in (("minimum", low), ("maximum", high)) if value is not None}
    return Field(default=None, json_schema_extra={**bounds, **more})


def _is_token(value: Any) -> bool:
    return type(value) is int


def check_prompt(value: Any, name: str = "prompt") -> Any:
    """A string, token ids, or a list of either kind. Raises InvalidRequest."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        if all(map(_is_token, value)) or all(isinstance(item, str) for item in value):
            return value
        if all(isinstance(item, list) and item and all(map(_is_token, item)) for item in value):
            return value
    raise InvalidRequest(
        f"`{name}` must be a string, a list of strings, a list of token ids, or a list of such lists, and not empty.",
        param=name,
        code="missing_required_parameter" if value is None else None,
    )


def _logit_bias(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidRequest("`logit_bias` must map token ids to numbers.", param="logit_bias")
    biases = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequest("The keys of `logit_bias` must be token ids.", param="logit_bias")
        if isinstance(bias, bool) or not isinstance(bias, (int, float)):
            raise InvalidRequest("The values of `logit_bias` must be numbers.", param="logit_bias")
        biases[int(key)] = bias
    return biases


def _metadata(value: Any) -> dict[str, str] | None:
    good = value is None or (
        isinstance(value, dict)
        and len(value) <= 16
        and all(len(key) <= 64 and isinstance(item, str) and len(item) <= 512 for key, item in value.items())
    )
    if not good:
        raise InvalidRequest(
            "`metadata` takes at most 16 strings of at most 512 characters, with keys of at most 64.", param="metadata"
        )
    return value  # type: ignore[no-any-return]


_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        _TOKENS,
        {"type": "array", "items": _TOKENS, "minItems": 1},
    ]
}
Prompt = Annotated[Any, PlainValidator(check_prompt), WithJsonSchema(_PROMPT_SCHEMA)]
LogitBias = Annotated[
    dict[int, float] | None,
    PlainValidator(_logit_bias),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
                {"type": "null"},
            ]
        }
    ),
]
Metadata = Annotated[
    dict[str, str] | None,
    PlainValidator(_metadata),
    WithJsonSchema({"anyOf": [{"type": "object", "additionalProperties": {"type": "string"}}, {"type": "null"}]}),
]
Strings = Annotated[list[str], StopAtFirst()]
TokenIds = Annotated[list[int], StopAtFirst()]


class _Object(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True, protected_namespaces=())

    model: str | None = Field(None, description="A name that /v1/models lists. Default: the served model.")


# -------------------------------------------------------------------------------------------------------- requests


class StreamOptions(_Object):
    include_usage: bool | None = Field(None, description="One more chunk at the end, with the token counts.")
    continuous_usage_stats: bool | None = Field(None, description="Token counts in every chunk.")


class JsonSchemaFormat(_Object):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Object):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputsFields(BaseModel):
    """Exactly one of the fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    json_: dict[str, Any] | str | bool | None = Field(
        None, alias="json", description="A JSON Schema, as an object or as text."
    )
    json_object: bool | None = None
    regex: str | None = None
    choice: Strings | None = None
    grammar: str | None = Field(None, description="Lark or GBNF.")


class SamplingFields(_Request):
    """What both generating endpoints understand."""

    n: int | None = _range(1, 128, description="Answers per prompt.")
    temperature: float | None = _range(0, 2)
    top_p: float | None = _range(0, 1, exclusiveMinimum=0)
    top_k: int | None = _range(-1, description="0 or -1 keeps all.")
    min_p: float | None = _range(0, 1)
    presence_penalty: float | None = _range(-2, 2)
    frequency_penalty: float | None = _range(-2, 2)
    repetition_penalty: float | None = _range(0, 100, exclusiveMinimum=0)
    seed: int | None = None
    stop: str | Strings | None = Field(None, description="At most 16 strings at which the answer ends.")
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = _range(0)
    skip_special_tokens: bool | None = None
    bad_words: Strings | None = None
    logit_bias: LogitBias = None
    allowed_token_ids: TokenIds | None = None
    prompt_logprobs: int | None = _range(0, 20)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsFields | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = Field(None, description="Lower runs first; the default is 0.")
    cache_salt: str | None = Field(None, description="Requests with different salts share no cached blocks.")
    request_id: str | None = Field(
        None, description="Printable ASCII; becomes part of the answer's id and X-Request-Id."
    )
    truncate_prompt_tokens: int | None = _range(
        -1, description="Keep only the last tokens of the prompt; -1: what the context holds."
    )
    user: str | None = None
    metadata: Metadata = None


class CompletionRequest(SamplingFields):
    prompt: Prompt
    max_tokens: int | None = _range(0, description="Default 16. 0 is allowed with `echo`.")
    logprobs: int | None = _range(0, 20)
    echo: bool | None = None
    add_special_tokens: bool | None = Field(None, description="Default true: as the model's tokenizer does.")


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[dict[str, Any]], StopAtFirst()] | None = None
    name: str | None = None


class ChatFields(_Request):
    """How messages become a prompt."""

    messages: Annotated[list[ChatMessage], StopAtFirst()] = Field(min_length=1)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = Field(None, description="Default false: the chat template writes them.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Extra variables for the chat template.")


class ChatRequest(ChatFields, SamplingFields):
    max_tokens: int | None = _range(1, description="Default: what the context leaves.")
    max_completion_tokens: int | None = _range(1)
    logprobs: bool | None = None
    top_logprobs: int | None = _range(0, 20)


class TokenizeRequest(ChatFields):
    """Either `prompt` or `messages`."""

    messages: Annotated[list[ChatMessage], StopAtFirst()] | None = Field(None, min_length=1)  # type: ignore[assignment]
    prompt: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Request):
    tokens: TokenIds
    skip_special_tokens: bool | None = Field(None, description="Default false.")


# ------------------------------------------------------------------------------------------------------- responses


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class ChatTopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobsList = list[dict[str, PromptLogprob] | None]


class AssistantMessage(msgspec.Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None


class ChatCompletion(msgspec.Struct, tag_field="object", tag="chat.completion"):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobsList | UnsetType = UNSET


class Delta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET


class ChatChunk(msgspec.Struct, tag_field="object", tag="chat.completion.chunk"):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobsList | UnsetType = UNSET


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobsList | UnsetType = UNSET


class Completion(msgspec.Struct, tag_field="object", tag="text_completion"):
    """A whole answer, and a chunk of a stream too."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelCard(msgspec.Struct, tag_field="object", tag="model"):
    id: str
    created: int
    root: str
    max_model_len: int
    owned_by: str = "phalanx"
    parent: None = None


class ModelList(msgspec.Struct, tag_field="object", tag="list"):
    data: list[ModelCard]


class Tokens(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(msgspec.Struct):
    prompt: str


class ErrorObject(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    error: ErrorObject


def lowest(logprob: float) -> float:
    """JSON has no -inf; OpenAI writes -9999."""
    return logprob if logprob > -9999.0 else -9999.0

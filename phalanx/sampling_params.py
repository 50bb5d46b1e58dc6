"""How a request wants its tokens drawn. All validation that needs no model happens here, once, for every front end."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from phalanx.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """Restricts the answer to a grammar. Exactly one field is set.

    `json` is a JSON Schema as a dictionary or as text; `json_object` asks for any JSON object; `regex`, `choice`
    (a list of literal answers) and `grammar` (Lark or GBNF) are as in vLLM.
    """

    json: dict[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        if self.choice is not None:
            if isinstance(self.choice, str) or not all(isinstance(item, str) for item in self.choice):
                raise InvalidRequest("`choice` must be a list of strings.", param="structured_outputs.choice")
            object.__setattr__(self, "choice", tuple(self.choice))
            if not self.choice:
                raise InvalidRequest("`choice` must not be empty.", param="structured_outputs.choice")
        chosen = [f.name for f in fields(self) if getattr(self, f.name) not in (None, False)]
        if len(chosen) != 1:
            raise InvalidRequest(
                f"`structured_outputs` needs exactly one of json, json_object, regex, choice, grammar; "
                f"got {', '.join(chosen) or 'none'}.",
                param="structured_outputs",
            )
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise InvalidRequest(f"`{name}` must be a non-empty string.", param=f"structured_outputs.{name}")
        if self.json is not None and not isinstance(self.json, (dict, str, bool)):
            raise InvalidRequest("`json` must be a JSON Schema object or its text.", param="structured_outputs.json")


def _number(name: str, value: Any, low: float, high: float, *, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequest(f"`{name}` must be a number, got {type(value).__name__}.", param=name)
    if not low <= value <= high or (low_open and value == low):  # NaN fails the first comparison
        left = "(" if low_open else "["
        raise InvalidRequest(f"`{name}` must be in {left}{low:g}, {high:g}].", param=name)


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"`{name}` must be an integer, got {type(value).__name__}.", param=name)
    if not low <= value <= high:
        raise InvalidRequest(f"`{name}` must be between {low} and {high}.", param=name)


def _is_list(value: Any) -> bool:
    return value is None or isinstance(value, (list, tuple, set, frozenset))


INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Immutable; make a changed copy with `dataclasses.replace`. Raises `InvalidRequest` naming the parameter.

    Limits that an operator can change (`n`, number of stop strings, …) are not here but in `LimitsConfig`; the
    vocabulary is not known here either, so token ids are checked against it when the request is accepted.
    """

    n: int = 1
    """Answers per prompt; answer i draws with choice number i."""
    temperature: float = 1.0
    """0 is greedy; at most 2."""
    top_p: float = 1.0
    """In (0, 1]."""
    top_k: int = 0
    """0 or -1 keeps all."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Above 0; counts prompt and output tokens."""
    seed: int | None = None
    """Any 64-bit integer; None draws one when the request is accepted."""
    max_tokens: int | None = 16
    """None takes what the context leaves."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    bad_words: tuple[str, ...] = ()
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Token id to a bias in [-100, 100]."""
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    """Alternatives beside the chosen token at each output position; 0 reports the chosen one only."""
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, INT32)
        _number("temperature", self.temperature, 0.0, 2.0)
        _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _integer("top_k", self.top_k, -1, INT32)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, INT32)
        _integer("min_tokens", self.min_tokens, 0, INT32)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"`min_tokens` ({self.min_tokens}) is above `max_tokens` ({self.max_tokens}).", param="min_tokens"
            )
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"`{name}` must be true or false.", param=name)
        self._strings("stop")
        self._strings("bad_words")
        self._token_ids("stop_token_ids")
        if self.allowed_token_ids is not None:
            self._token_ids("allowed_token_ids")
            if not self.allowed_token_ids:
                raise InvalidRequest("`allowed_token_ids` must not be empty.", param="allowed_token_ids")
        if not isinstance(self.logit_bias, dict):
            raise InvalidRequest("`logit_bias` must map token ids to numbers.", param="logit_bias")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, INT32)
            _number("logit_bias", bias, -100.0, 100.0)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, INT32)
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputs):
            raise InvalidRequest(
                f"`structured_outputs` must be StructuredOutputs, got {type(self.structured_outputs).__name__}.",
                fix="Such as StructuredOutputs(regex='[0-9]+').",
                param="structured_outputs",
            )

    def _strings(self, name: str) -> None:
        value = getattr(self, name)
        items = (value,) if isinstance(value, str) else tuple(value or ()) if _is_list(value) else (None,)
        if not all(isinstance(item, str) for item in items):
            raise InvalidRequest(f"`{name}` must be a string or a list of strings.", param=name)
        if not all(items):
            raise InvalidRequest(f"`{name}` must not contain an empty string.", param=name)
        object.__setattr__(self, name, items)

    def _token_ids(self, name: str) -> None:
        value = getattr(self, name) or ()
        if not _is_list(value):
            raise InvalidRequest(f"`{name}` must be a list of token ids.", param=name)
        for token in value:
            _integer(name, token, 0, INT32)
        object.__setattr__(self, name, tuple(value))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

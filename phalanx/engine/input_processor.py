"""From a caller's prompt and parameters to complete engine requests. The one validator behind every front end.

What needs no model is checked by `SamplingParams` itself; here is the rest: the operator's limits, token ids against
the vocabulary, the context length, grammars. Everything left open is decided here (seed, `max_tokens`), so that a
request can be started again anywhere. Does no I/O; tokenising a long text takes time, so call it off the event loop.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import secrets
from collections.abc import Callable, Iterable
from typing import Any

from phalanx.config import EngineConfig, LimitsConfig
from phalanx.engine.client import EngineRequest
from phalanx.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from phalanx.sampling_params import INT32, SamplingParams, StructuredOutputs
from phalanx.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_COMPOSED = 4
"""Normalising a text (NFC) makes at most about this many characters one."""
_MAX_SALT = 256


class InputProcessor:
    """Thread-safe: it holds only what does not change after construction (and one number computed on first need)."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        vocab_size: int,
        generation_config: dict[str, Any] | None = None,
        *,
        validate_grammar: Callable[[StructuredOutputs], None] | None = None,
    ):
        """`config` is resolved; `vocab_size` is the model's (rows of its output head). `validate_grammar` raises
        InvalidRequest; without one, structured outputs are refused. Raises ConfigError without a context length."""
        if config.model.max_model_len is None:
            raise ConfigError("The context length is not resolved.", fix="Give max_model_len.")
        self.max_model_len = config.model.max_model_len
        self._limits: LimitsConfig = config.limits
        self._seed = config.model.seed
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._validate_grammar = validate_grammar
        generation = dict(generation_config or {}) if config.model.generation_config == "auto" else {}
        self._defaults = _sampling_defaults(generation)
        self._eos = self._end_of_text(generation.get("eos_token_id"))
        self._longest_token: int | None = None

    def _end_of_text(self, stated: Any) -> tuple[int, ...]:
        more = stated if isinstance(stated, list) else [stated]
        ids = [*self._tokenizer.eos_token_ids, *(t for t in more if isinstance(t, int) and not isinstance(t, bool))]
        return tuple(dict.fromkeys(t for t in ids if 0 <= t < self._vocab_size))

    def default_sampling(self, **overrides: Any) -> SamplingParams:
        """The parameters of a caller who set only `overrides`; the rest as the model's generation_config.json says.

        None for temperature, top_p, top_k, min_p or repetition_penalty counts as not set. Raises InvalidRequest,
        ConfigError on an unknown name.
        """
        known = {f.name for f in dataclasses.fields(SamplingParams)}
        unknown = sorted(set(overrides) - known)
        if unknown:
            import difflib

            close = difflib.get_close_matches(unknown[0], known, 1)
            raise ConfigError(
                f"Unknown sampling parameter '{unknown[0]}'.", fix=f"Did you mean '{close[0]}'?" if close else None
            )
        given = {n: v for n, v in overrides.items() if v is not None or n not in _GENERATION_DEFAULTS}
        return SamplingParams(**{**self._defaults, **given})

    def process(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        owner: int = 0,
        add_special_tokens: bool = True,
        source: str = "prompt",
    ) -> list[EngineRequest]:
        """One request per choice, named `request_id#0`, `request_id#1`, …

        `add_special_tokens` is False for a text that already has them, such as a rendered chat template. `source` is
        what the caller's front end calls the prompt ("prompt", "messages", "input"); errors use it.
        Raises InvalidRequest, ContextLengthExceeded.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"Sampling parameters must be SamplingParams, got {type(params).__name__}.")
        self._check_limits(params)
        self._check_values(params)
        _check_int("priority", priority)
        _check_int("owner", owner)
        check_text("cache_salt", cache_salt)
        if len(cache_salt) > _MAX_SALT:
            raise InvalidRequest(f"`cache_salt` may have at most {_MAX_SALT} characters.", param="cache_salt")
        token_ids = self._tokens(prompt, add_special_tokens, source)
        params = self._resolve(params, len(token_ids), source)
        if params.structured_outputs is not None:
            params = dataclasses.replace(params, structured_outputs=self._structure(params.structured_outputs))
        bad_words = self._bad_words(params.bad_words)
        # Prompt log-probabilities are the same for every choice; asking once keeps the others' prompt cacheable.
        later = params if params.prompt_logprobs is None else dataclasses.replace(params, prompt_logprobs=None)
        return [
            EngineRequest(
                request_id=f"{request_id}#{choice}",
                prompt_token_ids=token_ids,
                sampling=params if choice == 0 else later,
                choice=choice,
                eos_token_ids=() if params.ignore_eos else self._eos,
                bad_words_token_ids=bad_words,
                priority=priority,
                cache_salt=cache_salt,
                owner=owner,
            )
            for choice in range(params.n)
        ]

    def _check_limits(self, params: SamplingParams) -> None:
        limits = self._limits
        allowed = params.allowed_token_ids or ()
        for name, value, limit, what in (
            ("n", params.n, "max_n", "is {value}"),
            ("logprobs", params.logprobs or 0, "max_logprobs", "is {value}"),
            ("prompt_logprobs", params.prompt_logprobs or 0, "max_logprobs", "is {value}"),
            ("stop", len(params.stop), "max_stop_strings", "has {value} strings"),
            ("bad_words", len(params.bad_words), "max_bad_words", "has {value} entries"),
            ("logit_bias", len(params.logit_bias), "max_logit_bias", "has {value} entries"),
            ("allowed_token_ids", len(allowed), "max_logit_bias", "has {value} entries"),
            ("stop_token_ids", len(params.stop_token_ids), "max_logit_bias", "has {value} entries"),
            ("stop", _longest(params.stop), "max_stop_length", "has a string of {value} characters"),
            ("bad_words", _longest(params.bad_words), "max_stop_length", "has an entry of {value} characters"),
        ):
            most = getattr(limits, limit)
            if value > most:
                raise InvalidRequest(
                    f"`{name}` {what.format(value=value)}; this server allows at most {most}.",
                    fix=f"Its operator can raise the limit with --{limit.replace('_', '-')}.",
                    param=name,
                )

    def _check_values(self, params: SamplingParams) -> None:
        for name, texts in (("stop", params.stop), ("bad_words", params.bad_words)):
            for text in texts:
                check_text(name, text)
        for name, ids in (
            ("logit_bias", params.logit_bias),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("stop_token_ids", params.stop_token_ids),
        ):
            self._check_token_ids(name, ids)

    def _check_token_ids(self, name: str, ids: Iterable[int]) -> None:
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise InvalidRequest(f"`{name}` must be token ids, got {type(token).__name__}.", param=name)
            if not 0 <= token < self._vocab_size:
                raise InvalidRequest(
                    f"`{name}` has a token id that is not in the vocabulary (0 to {self._vocab_size - 1}).", param=name
                )

    def _tokens(self, prompt: str | list[int], add_special_tokens: bool, source: str) -> list[int]:
        if isinstance(prompt, str):
            self._refuse_hopeless(prompt, source)
            token_ids = self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        elif isinstance(prompt, (list, tuple)):
            # The length first: checking a million ids of a prompt that cannot fit would be wasted work.
            self._check_context(len(prompt), None, source)
            token_ids = list(prompt)
        else:
            raise InvalidRequest(
                f"A prompt must be a text or a list of token ids, got {type(prompt).__name__}.", param=source
            )
        if not token_ids:
            raise InvalidRequest("The prompt is empty.", fix="Send at least one token.", param=source)
        self._check_token_ids(source, token_ids)
        return token_ids

    def _refuse_hopeless(self, text: str, source: str) -> None:
        """Refuse by characters a text that no tokenisation could make short enough: tokenising it would take long."""
        if len(text) <= self.max_model_len * _COMPOSED:
            return
        if self._longest_token is None:
            tokenizer = self._tokenizer
            self._longest_token = max((len(tokenizer.token_bytes(t)) for t in range(tokenizer.size)), default=1) or 1
        least = len(text) // (self._longest_token * _COMPOSED)
        if least > self.max_model_len:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self.max_model_len} tokens. However, you requested at least "
                f"{least} tokens ({len(text)} characters in the {source}).",
                fix=f"Please reduce the length of the {source}.",
                param=source,
            )

    def _check_context(self, num_prompt: int, max_tokens: int | None, source: str) -> None:
        """An answer needs room for one token at least."""
        asked = num_prompt + (max_tokens or 0)
        if asked <= self.max_model_len and num_prompt < self.max_model_len:
            return
        if max_tokens is None:
            detail, fix = f"{asked} tokens in the {source}, with none left for the completion", source
        else:
            detail, fix = f"{num_prompt} in the {source}, {max_tokens} in the completion", f"{source} or completion"
        raise ContextLengthExceeded(
            f"This model's maximum context length is {self.max_model_len} tokens. However, you requested "
            f"{asked} tokens ({detail}).",
            fix=f"Please reduce the length of the {fix}.",
            param=source,
        )

    def _resolve(self, params: SamplingParams, num_prompt: int, source: str) -> SamplingParams:
        """With `max_tokens` and `seed` decided."""
        self._check_context(num_prompt, params.max_tokens, source)
        max_tokens = params.max_tokens or self.max_model_len - num_prompt
        if params.min_tokens > max_tokens:
            raise InvalidRequest(
                f"`min_tokens` is {params.min_tokens}, but the context leaves {max_tokens} tokens for the answer.",
                param="min_tokens",
            )
        seed = params.seed if params.seed is not None else self._seed
        if seed is None:
            seed = secrets.randbits(64)
        return dataclasses.replace(params, max_tokens=max_tokens, seed=seed % 2**64)

    def _structure(self, wanted: StructuredOutputs) -> StructuredOutputs:
        """Validated, and with a schema as text: the wire carries no integer above 64 bits, text carries any."""
        for name in ("regex", "grammar"):
            check_text(f"structured_outputs.{name}", getattr(wanted, name) or "")
        for choice in wanted.choice or ():
            check_text("structured_outputs.choice", choice)
        if self._validate_grammar is None:
            raise InvalidRequest("Structured outputs are not available here.", param="structured_outputs")
        self._validate_grammar(wanted)
        if wanted.json is None or isinstance(wanted.json, str):
            check_text("structured_outputs.json", wanted.json or "")
            return wanted
        return dataclasses.replace(wanted, json=json.dumps(wanted.json))

    def _bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Each word's tokens at the start of a text and after a space: most vocabularies spell the two differently."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.strip() or word
            for text in (bare, " " + bare):
                ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
                if ids and all(0 <= token < self._vocab_size for token in ids):
                    found[ids] = None
        return tuple(found)


def check_text(name: str, text: Any) -> None:
    """Raises InvalidRequest unless `text` is a string of whole characters: JSON can write half of a surrogate pair."""
    try:
        if isinstance(text, str):
            text.encode()
            return
    except UnicodeEncodeError:
        raise InvalidRequest(f"`{name}` holds half of a surrogate pair, which is no character.", param=name) from None
    raise InvalidRequest(f"`{name}` must be a text, got {type(text).__name__}.", param=name)


def _longest(texts: tuple[str, ...]) -> int:
    return max(map(len, texts), default=0)


def _check_int(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not -INT32 <= value <= INT32:
        raise InvalidRequest(f"`{name}` must be a 32-bit integer.", param=name)


def _sampling_defaults(generation: dict[str, Any]) -> dict[str, Any]:
    """What generation_config.json says of sampling; a value we would refuse is left out, with a warning."""
    defaults: dict[str, Any] = {}
    for name in _GENERATION_DEFAULTS:
        value = generation.get(name)
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
        except InvalidRequest as error:
            log.warning("generation_config.json: %s The default is used.", error.message)
        else:
            defaults[name] = value
    return defaults

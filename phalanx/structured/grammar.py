"""Answers that follow a grammar: which tokens may come next, by the llguidance library.

A `GrammarCompiler` belongs to one tokenizer; it checks and compiles what requests ask for (JSON Schema, any JSON
object, a regular expression, a choice of texts, a Lark or GBNF grammar). A `Grammar` is the state of one answer.
What a request sends is bounded in size and depth before the library sees it, and the library in the work it may do.

Does not know logits; `fill_mask` gives a bit mask that the sampler applies. Keeps nothing on disk and fetches nothing.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import Protocol

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from phalanx.config import LimitsConfig
from phalanx.errors import InvalidRequest, PhalanxError
from phalanx.sampling_params import StructuredOutputs
from phalanx.structured.json_schema import checked_schema

_KEPT = 32
"""Compiled grammars that are kept for reuse; the least recently used goes first."""


class Vocabulary(Protocol):
    """What is needed of a tokenizer (`phalanx.text.tokenizer.Tokenizer` has it)."""

    @property
    def size(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def to_json(self) -> str: ...


class Grammar:
    """Where one answer is in its grammar. Replaying the same tokens into a new one gives the same state."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, width: int, eos_token_ids: tuple[int, ...]):
        self._matcher = matcher
        self._words = -(-vocab_size // 32)
        self._vocab_size = vocab_size
        self._buffer = None if width == vocab_size else np.zeros(-(-width // 32), dtype=np.int32)
        self._eos = frozenset(eos_token_ids)
        self._after_end = 0

    @property
    def terminated(self) -> bool:
        """Nothing but an end-of-text token may follow."""
        return self._matcher.is_stopped()

    def accept(self, token_id: int) -> bool:
        """Go on by one token. False when the grammar does not allow it; the state is then unchanged."""
        if self._matcher.is_stopped():
            if token_id not in self._eos:
                return False
            self._after_end += 1
            return True
        return 0 <= token_id < self._vocab_size and self._matcher.try_consume_tokens([token_id]) == 1

    def fill_mask(self, out: NDArray[np.int32]) -> None:
        """Write which tokens may come next: `out` is int32 [ceil(vocab / 32)], bit t % 32 of word t // 32 is token t.

        Raises InvalidRequest when the grammar has become too complex to go on with.
        """
        if out.dtype != np.int32 or out.shape != (self._words,) or not out.flags["C_CONTIGUOUS"]:
            raise ValueError(f"a mask must be {self._words} contiguous int32 words")
        target = out if self._buffer is None else self._buffer
        self._matcher.unsafe_compute_mask_ptr(target.ctypes.data, target.nbytes)
        if self._matcher.is_error():
            raise InvalidRequest(
                f"The grammar cannot be followed further: {_reason(self._matcher.get_error())}",
                param="structured_outputs",
            )
        if self._buffer is not None:
            out[:] = self._buffer[: self._words]
            if self._vocab_size % 32:
                out[-1] &= np.int32((1 << (self._vocab_size % 32)) - 1)

    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted tokens. Raises ValueError when there were fewer."""
        undone = min(count, self._after_end)
        self._after_end -= undone
        if count > undone and not self._matcher.rollback(count - undone):
            raise ValueError(f"cannot undo {count} tokens")


class GrammarCompiler:
    """Checks and compiles for one tokenizer and one width of logits. Safe to use from several threads at once."""

    def __init__(self, tokenizer: Vocabulary, vocab_size: int, limits: LimitsConfig | None = None):
        """`vocab_size` is the width of the model's logits, which may differ from the tokenizer's size."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._width = max(vocab_size, tokenizer.size)
        self._limits = limits or LimitsConfig()
        self._eos = tuple(i for i in tokenizer.eos_token_ids if i < vocab_size)
        self._lock = threading.Lock()
        self._shared: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    def validate(self, wanted: StructuredOutputs) -> None:
        """Raises InvalidRequest when `wanted` is too large, too deep, malformed or too complex.

        Takes milliseconds as a rule, most of it without Python's lock: call it in a thread, off the event loop."""
        self._prototype(wanted)

    def compile(self, wanted: StructuredOutputs) -> Grammar:
        """The start state for one answer. Raises InvalidRequest as `validate` does."""
        return Grammar(self._prototype(wanted).deep_copy(), self._vocab_size, self._width, self._eos)

    def _prototype(self, wanted: StructuredOutputs) -> llguidance.LLMatcher:
        """A matcher at its start, from which answers are copied."""
        grammar, param = to_llguidance(wanted, self._limits)
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
                return known
        matcher = llguidance.LLMatcher(self._llguidance(), grammar, log_level=0, limits=_parser_limits())
        if matcher.is_error():
            raise InvalidRequest(
                f"The grammar cannot be used: {_reason(matcher.get_error())}",
                param=param,
                code="invalid_json_schema" if wanted.json is not None else None,
            )
        with self._lock:
            self._compiled[grammar] = matcher
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return matcher

    def _llguidance(self) -> llguidance.LLTokenizer:
        """The vocabulary in the library's form, made when first needed (0.2 s for 50,000 tokens)."""
        with self._lock:
            if self._shared is None:
                if not self._eos:
                    raise InvalidRequest(
                        "Structured outputs need a tokenizer with an end-of-text token.", param="structured_outputs"
                    )
                try:
                    self._shared = llguidance.LLTokenizer(
                        self._tokenizer.to_json(), n_vocab=self._width, eos_token=list(self._eos)
                    )
                except ValueError as error:
                    raise PhalanxError(f"Structured outputs cannot use this tokenizer: {_reason(str(error))}") from None
            return self._shared


def to_llguidance(wanted: StructuredOutputs, limits: LimitsConfig) -> tuple[str, str]:
    """What `wanted` asks for as the library's grammar text, and the parameter's name. Raises InvalidRequest."""
    size, depth = limits.max_grammar_bytes, limits.max_grammar_depth
    matcher = llguidance.LLMatcher
    if wanted.json is not None:
        param = "structured_outputs.json"
        schema = checked_schema(wanted.json, max_bytes=size, max_depth=depth, param=param)
        return json.dumps({"grammars": [{"json_schema": json.loads(schema)}]}), param
    if wanted.json_object:
        return matcher.grammar_from_json_schema({"type": "object"}), "structured_outputs.json_object"
    if wanted.choice is not None:
        param = "structured_outputs.choice"
        if not all(wanted.choice):
            raise InvalidRequest("`choice` must not contain an empty string.", param=param)
        _check_size("choice", sum(map(len, wanted.choice)) + len(wanted.choice), size, param)
        return matcher.grammar_from_lark("start: " + " | ".join(map(_literal, dict.fromkeys(wanted.choice)))), param
    if wanted.regex is not None:
        param = "structured_outputs.regex"
        _check_size("regex", len(wanted.regex), size, param)
        _check_nesting("regex", wanted.regex, depth, param)
        return matcher.grammar_from_regex(wanted.regex), param
    param, text = "structured_outputs.grammar", wanted.grammar or ""
    _check_size("grammar", len(text), size, param)
    _check_nesting("grammar", text, depth, param)
    try:
        return matcher.grammar_from_lark(any_to_lark(text)), param
    except Exception as error:  # its own exception type, and whatever a broken grammar trips in it
        raise InvalidRequest(f"The grammar is not valid: {_reason(str(error))}", param=param) from None


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _check_size(name: str, size: int, most: int, param: str) -> None:
    if size > most:
        raise InvalidRequest(f"`{name}` is larger than {most} bytes.", fix="Send a smaller one.", param=param)


def _check_nesting(name: str, text: str, most: int, param: str) -> None:
    """Brackets open at the same time, wherever they stand: an upper bound of the nesting that a parser can meet."""
    depth = 0
    for char in text:
        if char in "([{":
            depth += 1
            if depth > most:
                raise InvalidRequest(f"`{name}` is nested deeper than {most} levels.", fix="Flatten it.", param=param)
        elif char in ")]}" and depth:
            depth -= 1


def _parser_limits() -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(max_lexer_states=50_000, max_grammar_size=100_000, verbose_errors=False)


def _reason(message: str) -> str:
    """The library's message on one line, without the grammar it may quote at length."""
    return " ".join(message.split())[:200]

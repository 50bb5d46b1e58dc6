"""Answers that follow a grammar: which tokens may come next, by the llguidance library.

A `GrammarCompiler` belongs to one tokenizer; it checks and compiles what requests ask for (JSON Schema, any JSON
object, a regular expression, a choice of texts, a Lark or GBNF grammar). A `Grammar` is the state of one answer.

What a request sends is first bounded in size and depth, then tried in a process that can be killed, and only then
compiled where it is used, with bounds on the work that each step may take. Nothing is kept on disk or fetched.

Does not know logits: `fill_mask` gives a bit mask, and the sampler applies it.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from copy import copy
from typing import Any, Protocol

import llguidance
import numpy as np
from numpy.typing import NDArray

from phalanx.config import LimitsConfig
from phalanx.errors import InvalidRequest, PhalanxError
from phalanx.killable import Gone, KillablePool, Late
from phalanx.sampling_params import StructuredOutputs
from phalanx.structured.translate import Wanted, checked, parser_limits, reason, translate

_KEPT = 32
"""Compiled grammars kept for reuse; the least recently used goes first."""
_KEPT_VERDICTS = 1024
_TRIAL_S = 5.0
"""Processor time in which a grammar must be compiled. Real ones take milliseconds, the largest half a second."""
_MEMORY = 3 << 30
"""Bytes of address space of a process that tries grammars, vocabulary included."""


class Vocabulary(Protocol):
    """What is needed of a tokenizer (`phalanx.text.tokenizer.Tokenizer` has it)."""

    size: int
    eos_token_ids: tuple[int, ...]

    def to_json(self) -> str: ...


class Grammar:
    """Where one answer is in its grammar. Replaying the same tokens into a new one gives the same state."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, width: int, eos_token_ids: tuple[int, ...]):
        """`width` is how many tokens `matcher` knows, at least `vocab_size`, the width of logits and masks."""
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
        """Go on by one token. False when the grammar does not allow it; the state is then unchanged.

        Raises InvalidRequest when the grammar has become too complex to go on with.
        """
        if self._matcher.is_stopped():
            self._check()
            if token_id not in self._eos:
                return False
            self._after_end += 1
            return True
        accepted = 0 <= token_id < self._vocab_size and self._matcher.try_consume_tokens([token_id]) == 1
        self._check()
        return accepted

    def fill_mask(self, out: NDArray[np.int32]) -> None:
        """Write which tokens may come next: `out` is int32 [ceil(vocab / 32)], bit t % 32 of word t // 32 is token t.

        Raises InvalidRequest when the grammar has become too complex to go on with.
        """
        if out.dtype != np.int32 or out.shape != (self._words,) or not out.flags["C_CONTIGUOUS"]:
            raise ValueError(f"a mask must be {self._words} contiguous int32 words")
        target = out if self._buffer is None else self._buffer
        self._matcher.unsafe_compute_mask_ptr(target.ctypes.data, target.nbytes)
        self._check()
        if self._buffer is not None:
            out[:] = self._buffer[: self._words]
            if self._vocab_size % 32:
                out[-1] &= np.uint32((1 << (self._vocab_size % 32)) - 1).astype(np.int32)

    def fork(self) -> Grammar:
        """Another state at the same place; neither sees what happens to the other."""
        other = copy(self)
        other._matcher = self._matcher.deep_copy()
        other._buffer = None if self._buffer is None else np.zeros_like(self._buffer)
        return other

    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted tokens. Raises ValueError when there were fewer."""
        undone = min(count, self._after_end)
        self._after_end -= undone
        if count > undone and not self._matcher.rollback(count - undone):
            raise ValueError(f"cannot undo {count} tokens")

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidRequest(
                f"The grammar cannot be followed further: {reason(self._matcher.get_error())}",
                fix="Simplify it.",
                param="structured_outputs",
            )


class GrammarCompiler:
    """Checks and compiles for one tokenizer and one width of logits. Safe to use from several threads at once.

    A front end calls `validate` before it passes a request on; an engine only calls `compile`, for what has passed.
    """

    def __init__(self, tokenizer: Vocabulary, vocab_size: int, limits: LimitsConfig | None = None):
        """`vocab_size` is the width of the model's logits, which may differ from the tokenizer's size."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._width = max(vocab_size, tokenizer.size)
        self._limits = limits or LimitsConfig()
        self._eos = tuple(i for i in tokenizer.eos_token_ids if i < vocab_size)
        self._lock = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[Wanted, llguidance.LLMatcher] = OrderedDict()
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._trials = KillablePool(
            "phalanx.structured.grammar_worker", size=2, memory_bytes=_MEMORY, setup=self._worker_setup
        )

    def validate(self, structured: StructuredOutputs) -> None:
        """Raises InvalidRequest when it is too large, too deep, malformed, or takes too much time or memory, and
        Unavailable when the machine is too busy to try it.

        Takes milliseconds as a rule and waits for another process: call it in a thread. The first call starts that
        process (about half a second). Equal wishes are tried once, unless their trial did not come to an end: that
        may have been the machine's fault.
        """
        wanted = checked(structured, self._limits)
        key = hashlib.sha256(f"{wanted.kind}\0{wanted.text}".encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            verdict = self._verdicts.get(key)
        if verdict is None:
            try:
                verdict = self._trial(wanted)
            except Late:
                raise _refused(
                    f"it takes longer than {_TRIAL_S:g} seconds of processor time to compile", wanted
                ) from None
            except Gone:
                raise _refused("it is too complex", wanted) from None
            with self._lock:
                self._verdicts[key] = verdict
                while len(self._verdicts) > _KEPT_VERDICTS:
                    self._verdicts.popitem(last=False)
        if verdict:
            raise _refused(verdict, wanted)

    def compile(self, structured: StructuredOutputs) -> Grammar:
        """The start state for one answer, of something that `validate` accepts. Raises InvalidRequest."""
        wanted = checked(structured, self._limits)
        with self._lock:
            known = self._compiled.get(wanted)
            if known is not None:
                self._compiled.move_to_end(wanted)
        if known is None:
            known = self._prototype(wanted)
        return Grammar(known.deep_copy(), self._vocab_size, self._width, self._eos)

    def close(self) -> None:
        """End the process that `validate` started. Idempotent; happens by itself when the object goes."""
        self._trials.close()

    def _trial(self, wanted: Wanted) -> str:
        """Why `wanted` is refused; empty when it is not. Raises Late and Gone."""
        return str(self._trials.ask({"kind": wanted.kind, "text": wanted.text}, _TRIAL_S)["error"])

    def _worker_setup(self) -> dict[str, Any]:
        return {"tokenizer": self._tokenizer.to_json(), "width": self._width, "eos": list(self._ends())}

    def _ends(self) -> tuple[int, ...]:
        if not self._eos:
            raise InvalidRequest(
                "Structured outputs need a tokenizer with an end-of-text token.", param="structured_outputs"
            )
        return self._eos

    def _prototype(self, wanted: Wanted) -> llguidance.LLMatcher:
        """A matcher at its start, from which answers are copied."""
        try:
            grammar = translate(wanted.kind, wanted.text)
        except ValueError as error:
            raise _refused(str(error), wanted) from None
        matcher = llguidance.LLMatcher(self._shared(), grammar, log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise _refused(reason(matcher.get_error()), wanted)
        with self._lock:
            self._compiled[wanted] = matcher
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return matcher

    def _shared(self) -> llguidance.LLTokenizer:
        """The vocabulary in the library's form, made when first needed (0.2 s for 50,000 tokens)."""
        with self._lock:
            if self._vocabulary is None:
                try:
                    self._vocabulary = llguidance.LLTokenizer(
                        self._tokenizer.to_json(), n_vocab=self._width, eos_token=list(self._ends())
                    )
                except ValueError as error:
                    raise PhalanxError(f"Structured outputs cannot use this tokenizer: {reason(str(error))}") from None
            return self._vocabulary


def _refused(why: str, wanted: Wanted) -> InvalidRequest:
    what = {"json": "JSON Schema"}.get(wanted.kind, f"`{wanted.kind}`")
    code = "invalid_json_schema" if wanted.kind == "json" else None
    return InvalidRequest(f"The {what} cannot be used: {why}.", param=wanted.param, code=code)

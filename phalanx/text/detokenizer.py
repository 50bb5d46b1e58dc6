"""Turns the tokens of one answer into text while they come, and finds its stop strings.

Guarantees: never emits a part of a character; the text does not depend on how the tokens are grouped into pushes, and
without stop strings equals decoding all of them at once; a stop string is found wherever tokens cut it, and text that
may be the beginning of one is held back until it is known not to be. Time per token is constant on average.

Does not decide what happens to the request: the caller looks at `stopped_by`.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from phalanx.text.tokenizer import Tokenizer

_PIECE_LIMIT = 32
"""Tokens after which text of an unknown decoder is taken as it is, even if its last character seems unfinished."""


class Detokenizer:
    """State of one answer. Not for use by two threads at once."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        prompt_token_ids: Sequence[int] | None = None,
    ):
        """`min_tokens`: stop strings that the first so many tokens complete do not count.

        `prompt_token_ids`: what the answer continues. A SentencePiece style decoder removes a space at the very
        beginning of a text, which the answer is only when the prompt decodes to nothing; and a prompt of raw ids may
        end within a character. None means that there is some text before.
        """
        self.stopped_by: str | None = None
        """The stop string that ended the text."""
        self.tokens_used = 0
        """Tokens up to and including the one that completed the stop string; all tokens while there is none."""
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._pieces: _BytePieces | _TextPieces
        if tokenizer.bytes is not None:
            self._pieces = _BytePieces(tokenizer, prompt_token_ids, self._skipped)
        else:
            self._pieces = _TextPieces(tokenizer, prompt_token_ids, skip_special_tokens)
        self._stops = [_StopMatcher(text) for text in stop]
        self._first_chars = frozenset(text[0] for text in stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` make certain. Tokens after a stop string are ignored."""
        if not self._stops:
            self.tokens_used += len(token_ids)
            if len(token_ids) == 1:  # so it is for nearly all
                return "" if token_ids[0] in self._skipped else self._pieces.push(token_ids[0])
            return "".join([self._pieces.push(i) for i in token_ids if i not in self._skipped])
        emitted: list[str] = []
        for token_id in token_ids:
            if self.stopped_by is not None:
                break
            self.tokens_used += 1
            if token_id not in self._skipped and (text := self._pieces.push(token_id)):
                emitted.append(self._released(text))
        return "".join(emitted)

    def finish(self) -> str:
        """The text still held back, an unfinished character as U+FFFD. Nothing after a stop string."""
        if self.stopped_by is not None:
            return ""
        rest = self._pieces.finish()
        if self._stops and rest:
            rest = self._released(rest)
        held, self._held = self._held, ""
        return rest + held

    def _released(self, text: str) -> str:
        """Take `text` in; what of the held text and of it can be no part of a stop string (or all before one)."""
        if not self._held and self._first_chars.isdisjoint(text):
            return text
        pending = self._held + text
        for at, char in enumerate(text, len(self._held) + 1):
            done = [stop for stop in self._stops if stop.push(char)]
            if done and self.tokens_used > self._min_tokens:
                found = max(done, key=lambda stop: len(stop.text)).text
                self.stopped_by, self._held = found, ""
                return pending[: at if self._include_stop else at - len(found)]
        keep = max(stop.matched for stop in self._stops)
        self._held = pending[len(pending) - keep :] if keep else ""
        return pending[: len(pending) - keep]


class _StopMatcher:
    """Knuth, Morris and Pratt's automaton (1977) for one stop string, fed a character at a time."""

    def __init__(self, text: str):
        self.text = text
        self.matched = 0
        """Characters at the end of what was fed that may begin `text`; always fewer than `text` has."""
        self._fallback = [0] * len(text)
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self._fallback[length - 1]
            length += text[i] == text[length]
            self._fallback[i] = length

    def push(self, char: str) -> bool:
        """Whether `text` ends at this character."""
        while self.matched and char != self.text[self.matched]:
            self.matched = self._fallback[self.matched - 1]
        self.matched += char == self.text[self.matched]
        if self.matched < len(self.text):
            return False
        self.matched = self._fallback[-1]
        return True


class _BytePieces:
    """For tokenizers whose tokens are pieces of bytes: an incremental UTF-8 decoder."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] | None, skipped: frozenset[int]):
        if tokenizer.bytes is None:
            raise ValueError("this tokenizer's tokens are not pieces of bytes")
        self._bytes = tokenizer.bytes
        self._rest = b""
        """Of a character that is not finished."""
        self._strip = 0
        if prompt is not None:
            before = b"".join(self._bytes[i] for i in prompt[-8:] if i not in skipped)
            self._decode(before)  # leaves only the bytes of an unfinished character behind
            if not before and all(i in skipped or not self._bytes[i] for i in prompt):
                self._strip = self._bytes.strip_left

    def push(self, token_id: int) -> str:
        data = self._bytes[token_id]
        if self._strip and data:
            kept = data
            while self._strip and kept.startswith(b" "):
                kept, self._strip = kept[1:], self._strip - 1
            if kept:
                self._strip = 0
            data = kept
        return self._decode(data)

    def _decode(self, data: bytes, final: bool = False) -> str:
        data = self._rest + data
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._rest = data[used:]
        return text

    def finish(self) -> str:
        return self._decode(b"", final=True)


class _TextPieces:
    """For any other decoder: decode the last few tokens with and without the new one, and take the difference."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] | None, skip_special_tokens: bool):
        self._backend = tokenizer.backend
        self._skip = skip_special_tokens
        self._ids = list(prompt[-8:]) if prompt is not None else []
        self._seen = self._text()
        self._since = 0

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        self._since += 1
        text = self._text()
        if len(text) <= len(self._seen) or (text.endswith("�") and self._since < _PIECE_LIMIT):
            if self._since >= _PIECE_LIMIT:
                self._restart()
            return ""
        new = text[len(self._seen) :]
        self._restart()
        return new

    def finish(self) -> str:
        return self._text()[len(self._seen) :]

    def _text(self) -> str:
        return self._backend.decode(self._ids, skip_special_tokens=self._skip)

    def _restart(self) -> None:
        self._ids = self._ids[-8:]
        self._seen = self._text()
        self._since = 0

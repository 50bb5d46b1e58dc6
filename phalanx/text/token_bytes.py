"""Which bytes each token stands for, worked out from a tokenizer's decoder.

Text is what the bytes of its tokens spell in UTF-8, with U+FFFD for what is not UTF-8. That makes decoding the same
for any grouping of the tokens, so a stream can be cut anywhere. Covers byte-level BPE (GPT-2, Llama 3, Qwen, OPT) and
SentencePiece style decoders (Llama 2, Mistral, Phi-3, Gemma). `TokenBytes.of` answers None for any other decoder;
text of such a tokenizer is decoded by the `tokenizers` library itself.
"""

from __future__ import annotations

import json
import re
from typing import Any, Protocol


class Backend(Protocol):
    """The part of `tokenizers.Tokenizer` that is used here."""

    def id_to_token(self, id: int) -> str | None: ...

    def to_str(self) -> str: ...


def byte_alphabet() -> dict[str, int]:
    """The printable stand-ins of GPT-2's byte-level BPE: character to byte. Printable Latin-1 bytes stand for
    themselves, the others are numbered from U+0100 on (Radford et al., 2019, "Language Models are Unsupervised
    Multitask Learners", published encoder)."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [byte for byte in range(256) if byte not in set(itself)]
    return {chr(byte): byte for byte in itself} | {chr(0x100 + i): byte for i, byte in enumerate(other)}


_ALPHABET = byte_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes(dict[int, bytes]):
    """Token id to bytes, each computed once. Unknown ids have no bytes."""

    def __init__(
        self,
        backend: Backend,
        *,
        byte_level: bool,
        replacements: tuple[tuple[str, str], ...] = (),
        byte_fallback: bool = False,
        strip_left: int = 0,
    ):
        self._backend = backend
        self._byte_level = byte_level
        self._replacements = replacements
        self._byte_fallback = byte_fallback
        self.strip_left = strip_left
        """Spaces that decoding removes from the very beginning of a text."""

    def __missing__(self, token_id: int) -> bytes:
        data = self[token_id] = self._bytes_of(token_id)
        return data

    def _bytes_of(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            try:
                return bytes(_ALPHABET[char] for char in token)
            except KeyError:
                return token.encode("utf-8")
        for old, new in self._replacements:
            token = token.replace(old, new)
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.encode("utf-8")

    @classmethod
    def of(cls, backend: Backend, decoder: dict[str, Any] | None) -> TokenBytes | None:
        """From the `decoder` entry of a tokenizer.json; None when it is of another kind."""
        steps = _flatten(decoder)
        if [step.get("type") for step in steps] == ["ByteLevel"]:
            return cls(backend, byte_level=True)
        replacements: list[tuple[str, str]] = []
        fallback, strip = False, 0
        for step in steps:
            match step:
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not strip:
                    replacements.append((old, new))
                case {"type": "ByteFallback"}:
                    fallback = True
                case {"type": "Fuse"}:
                    pass
                case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                    strip = start
                case {"type": "Metaspace", "replacement": str(old)} if not strip:
                    replacements.append((old, " "))
                    strip = 0 if step.get("prepend_scheme") == "never" else 1
                case _:
                    return None
        if not steps:
            return None
        return cls(
            backend, byte_level=False, replacements=tuple(replacements), byte_fallback=fallback, strip_left=strip
        )


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder.get("decoders", []) for step in _flatten(inner)]
    return [decoder]


def decoder_of(backend: Backend) -> dict[str, Any] | None:
    """The `decoder` entry of the tokenizer's JSON form."""
    found: dict[str, Any] | None = json.loads(backend.to_str()).get("decoder")
    return found

"""A SentencePiece `tokenizer.model`, for models that come without a tokenizer.json.

Reads the file's protocol buffer itself (only the few fields that matter, every length checked against the bytes that
are there) and follows the model's own settings, so that ids are those of the SentencePiece library. Covers BPE models
without a table of character replacements, which Llama, Mistral, Phi-3 and Gemma have; others are refused.

Format: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from phalanx.errors import FormatError, UnsupportedModel
from phalanx.text import bpe

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_UNIGRAM, _BPE = 1, 2  # model types; the first is the format's default


@dataclass
class Model:
    """The fields of `ModelProto` that matter, with the format's defaults."""

    pieces: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    model_type: int = _UNIGRAM
    byte_fallback: bool = False
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    pad_id: int = -1
    has_charsmap: bool = False
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True


def read_vocabulary(data: bytes, name: str, *, add_prefix_space: bool | None = None) -> bpe.Vocabulary:
    """The content of the file `name`. `add_prefix_space` overrides the model's own setting. Raises FormatError, and
    UnsupportedModel for another kind of model."""
    model = parse(data, name)
    if add_prefix_space is not None:
        model.add_dummy_prefix = add_prefix_space
    backend = bpe.build(lambda: _backend(model), name)
    plain = {bpe.NORMAL, bpe.USER_DEFINED, bpe.UNUSED, bpe.BYTE}
    backend.add_special_tokens(
        [bpe.special(piece) for piece, kind in zip(model.pieces, model.types, strict=True) if kind not in plain]
    )
    ids = {"unk_token": model.unk_id, "bos_token": model.bos_id, "eos_token": model.eos_id, "pad_token": model.pad_id}
    named = {key: model.pieces[i] for key, i in ids.items() if 0 <= i < len(model.pieces)}
    return bpe.Vocabulary(backend, named, [model.eos_id] if "eos_token" in named else [])


def parse(data: bytes, name: str) -> Model:
    """Raises FormatError when `data` is not a SentencePiece model."""
    model = Model()
    try:
        for number, value in _fields(data):
            if number == 1:
                _read_piece(model, _bytes(value))
            elif number == 2:
                _read_trainer(model, _bytes(value))
            elif number == 3:
                _read_normalizer(model, _bytes(value))
    except (ValueError, IndexError, struct.error, OverflowError):
        raise FormatError(
            f"{name} is not a SentencePiece model.",
            fix="Fetch the file again, or name a folder with a tokenizer.json with --tokenizer.",
        ) from None
    if not model.pieces or not 0 <= model.unk_id < len(model.pieces) or len(set(model.pieces)) != len(model.pieces):
        raise FormatError(f"{name} has no usable vocabulary.", fix="Fetch the file again.")
    if model.model_type != _BPE or model.has_charsmap:
        raise UnsupportedModel(
            f"{name} is a SentencePiece model of a kind that is not read here (Unigram, or replacing characters).",
            fix="Name a folder or hub id with the model's tokenizer.json with --tokenizer.",
        )
    return model


def _read_piece(model: Model, data: bytes) -> None:
    piece, score, kind = "", 0.0, bpe.NORMAL
    for number, value in _fields(data):
        if number == 1:
            piece = _bytes(value).decode("utf-8")
        elif number == 2:
            score = struct.unpack("<f", _bytes(value))[0]
        elif number == 3:
            kind = _int(value)
    model.pieces.append(piece)
    model.scores.append(score)
    model.types.append(kind)


def _read_trainer(model: Model, data: bytes) -> None:
    names = {40: "unk_id", 41: "bos_id", 42: "eos_id", 43: "pad_id"}
    for number, value in _fields(data):
        if number == 3:
            model.model_type = _int(value)
        elif number == 35:
            model.byte_fallback = bool(_int(value))
        elif number in names:
            unsigned = _int(value)
            setattr(model, names[number], unsigned - (1 << 64) if unsigned >> 63 else unsigned)


def _read_normalizer(model: Model, data: bytes) -> None:
    names = {3: "add_dummy_prefix", 4: "remove_extra_whitespaces", 5: "escape_whitespaces"}
    for number, value in _fields(data):
        if number == 2:
            model.has_charsmap = bool(_bytes(value))
        elif number in names:
            setattr(model, names[number], bool(_int(value)))


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of one message in order: number and value. Fixed-width values stay bytes. Raises ValueError."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            size, at = _varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError("unknown wire type")
        if size > len(data) - at:
            raise ValueError("a field is longer than its message")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number is too long")


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a field has another type than it should")
    return value


def _int(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("a field has another type than it should")
    return value


def _backend(model: Model) -> Tokenizer:
    """The model's own steps, in SentencePiece's order: trim, put a space in front, write spaces as stand-ins, set
    user-defined pieces apart, then merge."""
    pieces = list(zip(model.pieces, model.scores, model.types, strict=True))
    apart = [piece for piece, _, kind in pieces if kind == bpe.USER_DEFINED]
    backend = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(model.pieces)},
            merges=bpe.merges_by_rank({piece: -score for piece, score, kind in pieces if kind == bpe.NORMAL}),
            unk_token=model.pieces[model.unk_id],
            fuse_unk=True,
            byte_fallback=model.byte_fallback,
            ignore_merges=bool(apart),
        )
    )
    steps: list[Any] = []
    if model.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.add_dummy_prefix:
        steps.append(normalizers.Prepend(" "))
    if model.escape_whitespaces:
        steps.append(normalizers.Replace(" ", bpe.SPACE))
    backend.normalizer = normalizers.Sequence(steps)
    if apart:
        pattern = "|".join(map(re.escape, sorted(apart, key=len, reverse=True)))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    back: list[Any] = [decoders.Replace(bpe.SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.add_dummy_prefix:
        back.append(decoders.Strip(content=" ", left=1, right=0))
    backend.decoder = decoders.Sequence(back)
    return backend

"""Text to token ids and back, for every way a checkpoint may carry its vocabulary.

Reads, in this order: `tokenizer.json` (the `tokenizers` library's own file); Qwen-1's `qwen.tiktoken`; GPT-2 style
`vocab.json` + `merges.txt`; a SentencePiece `tokenizer.model`; and the vocabulary inside a GGUF file. Beside them it
reads `tokenizer_config.json`, `special_tokens_map.json`, `added_tokens.json` and the chat template, wherever it is.

Does not cover streaming (`detokenizer`), rendering of templates (`chat_template`), or code that a repository brings:
none is ever run.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken

from phalanx.checkpoint.locate import inside, locate_tokenizer
from phalanx.errors import CheckpointError, FormatError
from phalanx.text import bpe, gguf_vocab, qwen_tiktoken, sentencepiece_model
from phalanx.text.token_bytes import TokenBytes, decoder_of

if TYPE_CHECKING:
    from phalanx.checkpoint.locate import Checkpoint

_log = logging.getLogger(__name__)

_MAX_FILE = 512 * 2**20
"""Bytes of the largest vocabulary file that is read; the biggest published ones are about 35 MB."""
_MAX_JSON = 32 * 2**20
_QWEN = "qwen.tiktoken"
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A vocabulary with everything that requests need of it. Safe to use from several threads at once.

    Ids of the model's output that the vocabulary does not know (a padded head) decode to nothing.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
    ):
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        """`bos_token`, `eos_token`, … as templates see them."""
        self.chat_template = chat_template
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.size: int = max(vocabulary.values(), default=-1) + 1
        """Every id below it may be known; none from it on is."""
        self.special_ids: frozenset[int] = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.bos_token_id: int | None = vocabulary.get(self.special_tokens.get("bos_token", ""))
        eos = vocabulary.get(self.special_tokens.get("eos_token", ""))
        self.eos_token_ids: tuple[int, ...] = tuple(
            dict.fromkeys([*([] if eos is None else [eos]), *(i for i in eos_token_ids if i >= 0)])
        )
        """Tokens that end an answer, the tokenizer's own one first."""
        self.bytes: TokenBytes | None = TokenBytes.of(backend, decoder_of(backend))
        """None when the decoder is not one whose tokens are pieces of bytes."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Special tokens written out in `text` become those tokens. Lone surrogates become U+FFFD."""
        # Of the library's calls only the batch ones let other threads run meanwhile.
        encode = self.backend.encode_batch_fast
        try:
            return encode([text], add_special_tokens=add_special_tokens)[0].ids
        except (UnicodeEncodeError, TypeError):  # the library takes only what UTF-8 can hold
            mended = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return encode([mended], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids` as a whole. What is not UTF-8 becomes U+FFFD."""
        if self.bytes is None:
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        if skip_special_tokens:
            ids = [i for i in ids if i not in self.special_ids]
        data = b"".join(map(self.bytes.__getitem__, ids))
        return self.strip_start(data).decode("utf-8", "replace")

    def strip_start(self, data: bytes) -> bytes:
        """`data`, the beginning of a text, without the spaces that decoding removes there."""
        count = self.bytes.strip_left if self.bytes is not None else 0
        while count and data.startswith(b" "):
            data, count = data[1:], count - 1
        return data

    def token_bytes(self, token_id: int) -> bytes:
        """The token's raw bytes; empty for an unknown id."""
        if self.bytes is None:
            return self.token_text(token_id).encode("utf-8")
        return self.bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """The token alone as text; U+FFFD where it is only a part of a character."""
        if self.bytes is None:
            return self.backend.decode([token_id], skip_special_tokens=False)
        return self.bytes[token_id].decode("utf-8", "replace")

    def to_json(self) -> str:
        """The content of a tokenizer.json with the same behaviour."""
        return self.backend.to_str()


def load_tokenizer(checkpoint: Checkpoint, tokenizer: str | None = None, revision: str | None = None) -> Tokenizer:
    """The checkpoint's tokenizer, or the one at `tokenizer` (a folder or a hub id, at `revision`).

    Raises CheckpointError when there is none, or when a file contradicts itself or the others (FormatError).
    """
    eos = eos_ids(checkpoint.config, checkpoint.generation_config)
    if tokenizer is not None:
        return from_folder(locate_tokenizer(tokenizer, revision=revision), checkpoint.config, eos)
    if checkpoint.gguf is None:
        return from_folder(checkpoint.folder, checkpoint.config, eos)
    found = gguf_vocab.read_vocabulary(checkpoint.gguf.metadata)
    return Tokenizer(
        found.backend,
        special_tokens=found.special_tokens,
        eos_token_ids=[*found.eos_token_ids, *eos],
        chat_template=found.chat_template,
    )


def from_folder(folder: Path, config: dict[str, Any] | None = None, eos_token_ids: Iterable[int] = ()) -> Tokenizer:
    """The tokenizer whose files are in `folder`. `config` is the model's config.json; `eos_token_ids` end answers
    beside the tokenizer's own. Raises CheckpointError."""
    files = _Files(folder)
    settings = files.json("tokenizer_config.json")
    named = _named_tokens(files.json("special_tokens_map.json") | settings)
    found = _vocabulary(files, settings)
    named = found.special_tokens | named
    _complete_added_tokens(found.backend, files, settings, named)
    if not files.has("tokenizer.json"):
        _bos_and_eos(found.backend, settings, named)
    ends = [*found.eos_token_ids, *eos_token_ids] or eos_ids(config or {}, {})
    if "eos_token" not in named and ends and (token := found.backend.id_to_token(ends[0])):
        named["eos_token"] = token
    template = _chat_template(files, settings) or found.chat_template
    return Tokenizer(found.backend, special_tokens=named, eos_token_ids=ends, chat_template=template)


def _vocabulary(files: _Files, settings: dict[str, Any]) -> bpe.Vocabulary:
    if data := files.read("tokenizer.json"):
        text = data.decode("utf-8", "replace")
        return bpe.Vocabulary(bpe.build(lambda: tokenizers.Tokenizer.from_str(text), "tokenizer.json"))
    if data := files.read(_QWEN):
        return qwen_tiktoken.read_vocabulary(data, _QWEN)
    if (vocabulary := files.json("vocab.json")) and (merges := files.read("merges.txt")) is not None:
        return bpe.Vocabulary(_vocab_and_merges(vocabulary, merges, settings))
    if data := files.read("tokenizer.model"):
        prefix = settings.get("add_prefix_space")
        settings.setdefault("add_bos_token", True)
        return sentencepiece_model.read_vocabulary(
            data, "tokenizer.model", add_prefix_space=prefix if isinstance(prefix, bool) else None
        )
    raise CheckpointError(
        f"There is no tokenizer in {files.folder}: neither tokenizer.json, {_QWEN}, vocab.json with merges.txt, nor "
        "tokenizer.model.",
        fix="Put the model's tokenizer files there, or name a folder or hub id that has them with --tokenizer.",
    )


class _Files:
    """A folder's files by name, none larger than `_MAX_FILE`, none from outside the folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def has(self, name: str) -> bool:
        return inside(self.folder, name) is not None

    def read(self, name: str, limit: int = _MAX_FILE) -> bytes | None:
        """The whole file; None when there is none. Raises CheckpointError."""
        path = inside(self.folder, name)
        if path is None:
            return None
        try:
            size = path.stat().st_size
            if size > limit:
                raise FormatError(f"{path} has {size} bytes, more than the {limit} that such a file may have.")
            return path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from None

    def json(self, name: str) -> dict[str, Any]:
        """The object in the file; empty when there is no file. Raises CheckpointError."""
        data = self.read(name, _MAX_JSON)
        if data is None:
            return {}
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise FormatError(f"{self.folder / name} does not hold a JSON object.", fix="Fetch the file again.")
        return value


def eos_ids(config: dict[str, Any], generation_config: dict[str, Any]) -> list[int]:
    """The end-of-text ids that generation_config.json and config.json name, each an id or a list of ids."""
    found: list[int] = []
    text_config = config.get("text_config")
    for source in (generation_config, config, text_config if isinstance(text_config, dict) else {}):
        value = source.get("eos_token_id")
        found += [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)]
    return list(dict.fromkeys(found))


def _content(token: Any) -> str | None:
    """A token as the files write it: its text, or an object with its text as `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _named_tokens(source: dict[str, Any]) -> dict[str, str]:
    return {name: text for name in _NAMED if (text := _content(source.get(name)))}


def _chat_template(files: _Files, settings: dict[str, Any]) -> str | None:
    """The template, from its own file or from tokenizer_config.json; of several named ones the one called default."""
    if data := files.read("chat_template.jinja", _MAX_JSON):
        return data.decode("utf-8", "replace")
    for source in (files.json("chat_template.json"), settings):
        value = source.get("chat_template")
        if isinstance(value, list):
            value = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        if isinstance(value, dict):
            value = value.get("default") or next(iter(value.values()), None)
        if isinstance(value, str) and value:
            return value
    return None


def _vocab_and_merges(vocabulary: dict[str, Any], merges: bytes, settings: dict[str, Any]) -> tokenizers.Tokenizer:
    if not all(isinstance(i, int) and i >= 0 for i in vocabulary.values()):
        raise FormatError("vocab.json must map tokens to ids.", fix="Fetch the file again.")
    pairs: list[tuple[str, str]] = []
    for line in merges.decode("utf-8", "replace").split("\n"):
        if not (line := line.rstrip("\r")) or line.startswith("#version"):
            continue
        left, _, right = line.partition(" ")
        if not left or not right or " " in right:
            raise FormatError("merges.txt must have two tokens on each line.", fix="Fetch the file again.")
        pairs.append((left, right))
    pre = "qwen2" if "qwen2" in str(settings.get("tokenizer_class", "")).lower() else "gpt-2"
    prefix = settings.get("add_prefix_space") is True
    return bpe.build(
        lambda: bpe.byte_level_bpe(vocabulary, pairs, pre, add_prefix_space=prefix), "vocab.json and merges.txt"
    )


def _complete_added_tokens(
    backend: tokenizers.Tokenizer, files: _Files, settings: dict[str, Any], named: dict[str, str]
) -> None:
    """Add the tokens that only the side files know. A file cannot move a token to another id."""
    wanted: dict[int, AddedToken] = {}
    for text, token_id in files.json("added_tokens.json").items():
        if isinstance(token_id, int) and text:
            wanted[token_id] = AddedToken(text, normalized=False, special=False)
    declared = settings.get("added_tokens_decoder")
    for key, entry in (declared if isinstance(declared, dict) else {}).items():
        if key.isdecimal() and isinstance(entry, dict) and (content := _content(entry)):
            wanted[int(key)] = AddedToken(content, **{flag: entry.get(flag) is True for flag in _FLAGS})
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token_id, token in sorted(wanted.items()):
        if token.content in known:
            continue
        current = backend.token_to_id(token.content)
        if current is None and token_id != backend.get_vocab_size(with_added_tokens=True):
            _log.warning("The added token %r cannot have its id %d; it is left out.", token.content, token_id)
            continue
        known.add(token.content)
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
    for text in named.values():  # a named token is special even where no list says so
        if backend.token_to_id(text) is not None and text not in known:
            backend.add_special_tokens([bpe.special(text)])


def _bos_and_eos(backend: tokenizers.Tokenizer, settings: dict[str, Any], named: dict[str, str]) -> None:
    """Honour `add_bos_token` and `add_eos_token`, except with a tokenizer.json: that says itself what is added, and
    transformers goes by it too."""
    wanted = {name: settings.get(f"add_{name}") for name in ("bos_token", "eos_token")}
    if any(value is not None for value in wanted.values()):
        bos, eos = (named.get(name) if value is True else None for name, value in wanted.items())
        bpe.surround(backend, bos, eos)

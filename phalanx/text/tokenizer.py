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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken, processors

from phalanx.errors import CheckpointError, FormatError
from phalanx.text.token_bytes import TokenBytes, decoder_of

if TYPE_CHECKING:
    from phalanx.checkpoint.locate import Checkpoint

_log = logging.getLogger(__name__)

_MAX_FILE = 512 * 2**20
"""Bytes of the largest vocabulary file that is read; the biggest published ones are about 35 MB."""
_MAX_JSON = 32 * 2**20
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
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError):  # the library takes only what UTF-8 can hold
            mended = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return self.backend.encode(mended, add_special_tokens=add_special_tokens).ids

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
        from phalanx.checkpoint.locate import locate_tokenizer

        return from_folder(locate_tokenizer(tokenizer, revision=revision), checkpoint.config, eos)
    if checkpoint.gguf is not None:
        from phalanx.text.gguf_vocab import gguf_tokenizer

        return gguf_tokenizer(checkpoint.gguf.metadata, eos)
    return from_folder(checkpoint.folder, checkpoint.config, eos)


def from_folder(folder: Path, config: dict[str, Any] | None = None, eos_token_ids: Iterable[int] = ()) -> Tokenizer:
    """The tokenizer whose files are in `folder`. `config` is the model's config.json. Raises CheckpointError."""
    config = config or {}
    settings = _read_json(folder / "tokenizer_config.json")
    named = _named_tokens(_read_json(folder / "special_tokens_map.json") | settings)
    template = _chat_template(folder, settings)
    if (file := folder / "tokenizer.json").is_file():
        text = read_bounded(file).decode("utf-8", "replace")
        backend = build(lambda: tokenizers.Tokenizer.from_str(text), file.name)
    elif file := _first(folder, "*.tiktoken"):
        from phalanx.text.qwen_tiktoken import CHATML, QWEN_TOKENS, qwen_tokenizer

        backend = qwen_tokenizer(read_bounded(file))
        named = QWEN_TOKENS | named
        template = template or CHATML
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        backend = _byte_level_files(folder, settings)
    elif (file := folder / "tokenizer.model").is_file():
        from phalanx.text.sentencepiece_model import sentencepiece_tokenizer

        backend, pieces = sentencepiece_tokenizer(read_bounded(file), add_prefix_space=settings.get("add_prefix_space"))
        named = pieces | named
        settings = {"add_bos_token": True, "add_eos_token": False} | settings
    else:
        raise CheckpointError(
            f"There is no tokenizer in '{folder}': looked for tokenizer.json, *.tiktoken, vocab.json with merges.txt, "
            "and tokenizer.model.",
            fix="Put the model's tokenizer files there, or name a folder or hub id that has them with --tokenizer.",
        )
    _complete_added_tokens(backend, folder, settings, named)
    _bos_and_eos(backend, settings, named)
    eos_token_ids = list(eos_token_ids) or eos_ids(config, {})
    if "eos_token" not in named and eos_token_ids and (token := backend.id_to_token(eos_token_ids[0])):
        named["eos_token"] = token
    return Tokenizer(backend, special_tokens=named, eos_token_ids=eos_token_ids, chat_template=template)


def eos_ids(config: dict[str, Any], generation_config: dict[str, Any]) -> list[int]:
    """The end-of-text ids that generation_config.json and config.json name, each an id or a list of ids."""
    found: list[int] = []
    text_config = config.get("text_config")
    for source in (generation_config, config, text_config if isinstance(text_config, dict) else {}):
        value = source.get("eos_token_id")
        found += [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)]
    return list(dict.fromkeys(found))


def build(make: Callable[[], tokenizers.Tokenizer], what: str) -> tokenizers.Tokenizer:
    """`make()`, with whatever the `tokenizers` library throws at a bad vocabulary turned into FormatError."""
    try:
        return make()
    except BaseException as error:  # a Rust panic is not an Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        detail = " ".join(str(error).split())[:300]
        raise FormatError(
            f"The vocabulary in {what} cannot be used: {detail}",
            fix="Fetch the file again, or name a folder with a tokenizer.json with --tokenizer.",
        ) from None


def read_bounded(path: Path, limit: int = _MAX_FILE) -> bytes:
    """The whole file. Raises CheckpointError when it cannot be read or is larger than `limit` bytes."""
    try:
        size = path.stat().st_size
        if size > limit:
            raise FormatError(f"'{path}' has {size} bytes, more than the {limit} that such a file may have.")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"'{path}' cannot be read: {error.strerror or error}.") from None


def template_processor(bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> Any:
    """A post-processor that puts `bos` before and `eos` after every text; each is (token, id) or None."""
    single = [*([f"{bos[0]}:0"] if bos else []), "$A:0", *([f"{eos[0]}:0"] if eos else [])]
    pair = [*single, *([f"{bos[0]}:1"] if bos else []), "$B:1", *([f"{eos[0]}:1"] if eos else [])]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=[t for t in (bos, eos) if t])


def _first(folder: Path, pattern: str) -> Path | None:
    return next(iter(sorted(folder.glob(pattern))), None)


def _read_json(path: Path) -> dict[str, Any]:
    """The object in the file; empty when there is no file. Raises FormatError."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_bounded(path, _MAX_JSON))
    except (ValueError, RecursionError):
        raise FormatError(f"'{path}' is not valid JSON.", fix="Fetch the file again.") from None
    if not isinstance(value, dict):
        raise FormatError(f"'{path}' must hold a JSON object.", fix="Fetch the file again.")
    return value


def _content(token: Any) -> str | None:
    """A token as the files write it: its text, or an object with its text as `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _named_tokens(source: dict[str, Any]) -> dict[str, str]:
    return {name: text for name in _NAMED if (text := _content(source.get(name)))}


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """The template, from its own file or from tokenizer_config.json; of several named ones the one called default."""
    if (file := folder / "chat_template.jinja").is_file():
        return read_bounded(file, _MAX_JSON).decode("utf-8", "replace")
    for source in (_read_json(folder / "chat_template.json"), settings):
        value = source.get("chat_template")
        if isinstance(value, list):
            value = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        if isinstance(value, dict):
            value = value.get("default") or next(iter(value.values()), None)
        if isinstance(value, str) and value:
            return value
    return None


def _byte_level_files(folder: Path, settings: dict[str, Any]) -> tokenizers.Tokenizer:
    from phalanx.text.gguf_vocab import byte_level_bpe

    vocabulary = _read_json(folder / "vocab.json")
    if not all(isinstance(i, int) for i in vocabulary.values()):
        raise FormatError(f"'{folder / 'vocab.json'}' must map tokens to ids.", fix="Fetch the file again.")
    lines = read_bounded(folder / "merges.txt").decode("utf-8", "replace").split("\n")
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    if any(len(pair) != 2 for pair in merges):
        raise FormatError(f"'{folder / 'merges.txt'}' must have two tokens a line.", fix="Fetch the file again.")
    pre = "qwen2" if "qwen2" in str(settings.get("tokenizer_class", "")).lower() else "gpt-2"
    prefix = settings.get("add_prefix_space") is True
    return build(lambda: byte_level_bpe(vocabulary, merges, pre, add_prefix_space=prefix), "vocab.json and merges.txt")


def _complete_added_tokens(
    backend: tokenizers.Tokenizer, folder: Path, settings: dict[str, Any], named: dict[str, str]
) -> None:
    """Add the tokens that only the side files know. A file may not move a token to another id."""
    wanted: dict[int, AddedToken] = {}
    for text, token_id in _read_json(folder / "added_tokens.json").items():
        if isinstance(token_id, int):
            wanted[token_id] = AddedToken(text, normalized=False, special=False)
    declared = settings.get("added_tokens_decoder")
    for key, entry in (declared if isinstance(declared, dict) else {}).items():
        if key.isdecimal() and isinstance(entry, dict) and (content := _content(entry)):
            flags = {
                name: entry.get(name) is True for name in ("lstrip", "rstrip", "normalized", "single_word", "special")
            }
            wanted[int(key)] = AddedToken(content, **flags)
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token_id, token in sorted(wanted.items()):
        if token.content in known:
            continue
        current = backend.token_to_id(token.content)
        if current is None and token_id != backend.get_vocab_size(with_added_tokens=True):
            _log.warning(
                "The added token %r should have id %d, which the vocabulary cannot give it; it is left out.",
                token.content,
                token_id,
            )
            continue
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
    for text in named.values():  # a named token is special even where no list says so
        if backend.token_to_id(text) is not None and text not in known:
            backend.add_special_tokens([AddedToken(text, normalized=False, special=True)])


def _bos_and_eos(backend: tokenizers.Tokenizer, settings: dict[str, Any], named: dict[str, str]) -> None:
    """Honour `add_bos_token` and `add_eos_token`; without either, the post-processor stays as it is."""
    wanted = {name: settings.get(f"add_{name}") for name in ("bos_token", "eos_token")}
    if all(value is None for value in wanted.values()):
        return
    tokens = {}
    for name, value in wanted.items():
        token = named.get(name)
        token_id = backend.token_to_id(token) if token else None
        tokens[name] = (token, token_id) if value is True and token and token_id is not None else None
    backend.post_processor = template_processor(tokens["bos_token"], tokens["eos_token"])

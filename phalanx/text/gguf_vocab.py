"""The vocabulary inside a GGUF file, as a tokenizer with the same ids as the model's own tokenizer.json.

Two kinds: byte-level BPE (`gpt2`), whose way of cutting text is only named in the file (`tokenizer.ggml.pre`, see
`bpe.SPLITS`), and SentencePiece style BPE (`llama`), with scores instead of merges.

Does not cover WordPiece (`bert`), Unigram (`t5`) and RWKV vocabularies: such models are not served.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from phalanx.errors import FormatError, UnsupportedModel
from phalanx.text import bpe

_log = logging.getLogger(__name__)

_NAMED = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",  # the format's own spelling
}
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
"""Control tokens that end an answer whatever else the file says: files often name only one of several."""
_ELSEWHERE = "Name a folder or hub id that has the model's tokenizer.json with --tokenizer."
_AGAIN = "Fetch or convert the file again."


def read_vocabulary(metadata: Mapping[str, Any]) -> bpe.Vocabulary:
    """The tokenizer that the metadata of a GGUF file describes.

    Raises FormatError when entries contradict each other, UnsupportedModel for a kind that is not known.
    """
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise FormatError("The GGUF file has no vocabulary (`tokenizer.ggml.tokens`).", fix=_ELSEWHERE)
    types = _parallel(metadata, "token_type", len(tokens), int) or [bpe.NORMAL] * len(tokens)
    if kind == "gpt2":
        backend, bos_by_default = _byte_level(metadata, tokens)
    elif kind == "llama":
        backend, bos_by_default = _sentencepiece(metadata, tokens, types), True
    else:
        raise UnsupportedModel(
            f"The GGUF file's vocabulary is of kind '{str(kind)[:40]}'; known are gpt2 and llama.", fix=_ELSEWHERE
        )
    named = {
        name: tokens[i] for name, key in _NAMED.items() if (i := _token_id(metadata, key, len(tokens))) is not None
    }
    _add_tokens(backend, tokens, types, set(named.values()), phi3=metadata.get("general.architecture") == "phi3")
    bpe.surround(
        backend,
        named.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", bos_by_default) is True else None,
        named.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) is True else None,
    )
    ends = [i for key in ("eos", "eot", "eom") if (i := _token_id(metadata, key, len(tokens))) is not None]
    control = {token: i for i, token in enumerate(tokens) if types[i] == bpe.CONTROL}
    template = metadata.get("tokenizer.chat_template")
    return bpe.Vocabulary(
        backend,
        special_tokens=named,
        eos_token_ids=[*ends, *(control[token] for token in _TURN_ENDS if token in control)],
        chat_template=template if isinstance(template, str) and template else None,
    )


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[Tokenizer, bool]:
    """The tokenizer, and whether texts begin with a BOS token when the file does not say."""
    pre = metadata.get("tokenizer.ggml.pre")
    if pre is None:
        _log.warning("The GGUF file does not say how text is cut (tokenizer.ggml.pre); GPT-2's way is assumed.")
        pre = "default"
    if pre not in bpe.SPLITS:
        raise UnsupportedModel(
            f"The GGUF file cuts text in a way named '{str(pre)[:40]}', which is not known here.", fix=_ELSEWHERE
        )
    merges = _merges(metadata)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix") is True
    vocabulary = _first_ids(tokens)
    backend = bpe.build(lambda: bpe.byte_level_bpe(vocabulary, merges, pre, add_prefix_space=prefix), "the GGUF file")
    return backend, pre in bpe.WHOLE_WORDS_FIRST


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int]) -> Tokenizer:
    scores = _parallel(metadata, "scores", len(tokens), float)
    gemma = str(metadata.get("general.architecture", "")).startswith("gemma")
    if gemma:  # the file spells runs of spaces with spaces; merges make them of the stand-in
        tokens = [bpe.SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    vocabulary = _first_ids(tokens)
    merges = _merges(metadata)
    if not merges:
        if scores is None:
            raise FormatError("The GGUF file's vocabulary has neither scores nor merges.", fix=_AGAIN)
        # Gemma's scores do not follow its merges, the order of its tokens does; runs of spaces are user-defined there.
        usable = (bpe.NORMAL, bpe.USER_DEFINED) if gemma else (bpe.NORMAL,)
        merges = bpe.merges_by_rank(
            {token: float(i) if gemma else -scores[i] for token, i in vocabulary.items() if types[i] in usable}
        )
    unknown = _token_id(metadata, "unknown", len(tokens))
    if unknown is None:
        unknown = next((i for i, kind in enumerate(types) if kind == bpe.UNKNOWN), None)
    unk_token = None if unknown is None else tokens[unknown]
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", not gemma) is True
    return bpe.build(lambda: bpe.sentencepiece_bpe(vocabulary, merges, unk_token, prefix_space=prefix), "the GGUF file")


def _add_tokens(
    backend: Tokenizer, tokens: Sequence[str], types: Sequence[int], named: set[str], *, phi3: bool
) -> None:
    """Control tokens are special, user-defined ones are found whole in the text; merges make neither.

    Phi-3's special tokens, all but three, swallow the spaces that follow them. No entry of the file says so.
    """
    bare = {"<unk>", "<s>", "<|endoftext|>"}
    known = backend.get_vocab(with_added_tokens=False)
    special, plain = [], []
    for token, kind in zip(tokens, types, strict=True):
        if not token or token not in known:  # a run of spaces of Gemma, which has another spelling
            continue
        if kind in (bpe.CONTROL, bpe.UNKNOWN) or token in named:
            special.append(bpe.special(token, rstrip=phi3 and token not in bare))
        elif kind == bpe.USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False, rstrip=phi3))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _first_ids(tokens: Sequence[str]) -> dict[str, int]:
    """Token to id; of equal tokens the first counts."""
    vocabulary: dict[str, int] = {}
    for i, token in enumerate(tokens):
        vocabulary.setdefault(token, i)
    return vocabulary


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for line in metadata.get("tokenizer.ggml.merges") or ():
        left, _, right = line.partition(" ") if isinstance(line, str) else ("", "", "")
        if not left or not right or " " in right:
            raise FormatError("A merge in the GGUF file (`tokenizer.ggml.merges`) is not two tokens.", fix=_AGAIN)
        merges.append((left, right))
    return merges


def _parallel(metadata: Mapping[str, Any], key: str, size: int, kind: type[int] | type[float]) -> list[Any] | None:
    """An array with one number for each token; None when the file has none. Raises FormatError."""
    values = metadata.get(f"tokenizer.ggml.{key}")
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != size or not all(isinstance(v, (int, kind)) for v in values):
        raise FormatError(f"`tokenizer.ggml.{key}` of the GGUF file must hold {size} numbers.", fix=_AGAIN)
    return values


def _token_id(metadata: Mapping[str, Any], key: str, size: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{key}_token_id")
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < size else None

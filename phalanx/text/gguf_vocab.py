"""The vocabulary inside a GGUF file, as a tokenizer with the same ids as the model's own tokenizer.json.

Two kinds: byte-level BPE (`gpt2`), whose way of cutting text into words is only named in the file
(`tokenizer.ggml.pre`) and kept here as a table; and SentencePiece style BPE (`llama`), with scores instead of merges.
Also builds the byte-level tokenizers that other files describe.

Does not cover WordPiece (`bert`), Unigram (`t5`) and RWKV vocabularies: those models are not served.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from phalanx.errors import FormatError, UnsupportedModel
from phalanx.text import tokenizer as base
from phalanx.text.token_bytes import byte_alphabet

_log = logging.getLogger(__name__)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Token types, numbered alike in GGUF and in SentencePiece."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHER = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(ending: str, number: str) -> str:
    """Words that end where lower case turns to upper case, each with an optional `ending`."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{_UPPER}*{_LOWER}+{ending}|{start}{_UPPER}+{_LOWER}*{ending}"
    return words + "|" + number + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_LLAMA3 = (_WORDS + r"\p{N}{1,3}" + _OTHER + _TAIL,)
_QWEN2 = (_WORDS + r"\p{N}" + _OTHER + _TAIL,)
_QWEN35 = (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _TAIL,)
_SMOLLM = (_DIGIT, GPT2)

SPLITS: dict[str, tuple[str, ...]] = {
    "default": (GPT2,),
    **dict.fromkeys(("gpt-2", "phi-2", "jina-es", "jina-de", "mpt", "olmo", "jais", "trillion"), (GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _SMOLLM),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "dbrx", "smaug-bpe", "glm4",
         "chatglm-bpe", "midm-2.0"), _LLAMA3,
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "kormo"), _QWEN2),
    "qwen35": _QWEN35,
    "tekken": (_cased("", r"\p{N}"),),
    **dict.fromkeys(("gpt-4o", "llama4"), (_cased(_CONTRACTIONS + "?", r"\p{N}{1,3}"),)),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", _DIGIT),
}  # fmt: skip
"""`tokenizer.ggml.pre` to the patterns that cut a text into words, applied one after the other. They are those of the
models' published tokenizer.json files."""

_WHOLE_WORDS_FIRST = {
    "llama3",
    "llama-v3",
    "llama-bpe",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "tekken",
}
"""A word that is a token is that token, whatever the merges would make of it."""
_NFC = {"qwen2", "qwen35"}
_BOS_BY_DEFAULT = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
_NAMED = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",
}


def gguf_tokenizer(metadata: Mapping[str, Any], eos_token_ids: Iterable[int] = ()) -> base.Tokenizer:
    """The tokenizer that `metadata` of a GGUF file describes.

    Raises FormatError when the entries contradict each other, UnsupportedModel for a kind that is not known.
    """
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, Sequence) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise FormatError(
            "The GGUF file has no vocabulary (`tokenizer.ggml.tokens`).",
            fix="Name a folder or hub id that has the tokenizer with --tokenizer.",
        )
    types = _parallel(metadata, "token_type", len(tokens)) or [NORMAL] * len(tokens)
    if kind == "gpt2":
        backend, add_bos = _byte_level(metadata, tokens)
    elif kind == "llama":
        backend, add_bos = _sentencepiece(metadata, tokens, types), True
    else:
        raise UnsupportedModel(
            f"The GGUF file's vocabulary is of kind '{kind}'; known are gpt2 and llama.",
            fix="Name a folder or hub id with a tokenizer.json with --tokenizer.",
        )
    named = {
        name: tokens[i] for name, key in _NAMED.items() if (i := _token_id(metadata, key, len(tokens))) is not None
    }
    _add_tokens(backend, tokens, types, set(named.values()), rstrip=metadata.get("general.architecture") == "phi3")
    flags = {
        "bos_token": metadata.get("tokenizer.ggml.add_bos_token", add_bos),
        "eos_token": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    around = {
        name: (named[name], tokens.index(named[name])) if flags[name] and name in named else None for name in flags
    }
    backend.post_processor = base.template_processor(around["bos_token"], around["eos_token"])
    ends = [i for key in ("eos", "eot", "eom") if (i := _token_id(metadata, key, len(tokens))) is not None]
    control = {token: i for i, token in enumerate(tokens) if types[i] == CONTROL}
    ends += [control[token] for token in _TURN_ENDS if token in control]
    template = metadata.get("tokenizer.chat_template")
    return base.Tokenizer(
        backend,
        special_tokens=named,
        eos_token_ids=[*ends, *eos_token_ids],
        chat_template=template if isinstance(template, str) and template else None,
    )


def byte_level_bpe(
    vocabulary: dict[str, int], merges: Iterable[tuple[str, ...]], pre: str, *, add_prefix_space: bool = False
) -> Tokenizer:
    """A byte-level BPE whose words are cut as `SPLITS[pre]` says. Raises whatever `tokenizers` does."""
    model = models.BPE(
        vocab=vocabulary,
        merges=list(merges),
        fuse_unk=False,
        byte_fallback=False,  # type: ignore[arg-type]
        ignore_merges=pre in _WHOLE_WORDS_FIRST,
    )
    backend = Tokenizer(model)
    if pre in _NFC:
        backend.normalizer = normalizers.NFC()
    cuts: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in SPLITS[pre]]
    if add_prefix_space:  # the library's own cut, which puts the space before cutting
        cuts = [pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)]
    else:
        cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    backend.decoder = decoders.ByteLevel()
    return backend


def merges_by_rank(ranks: Mapping[str, float], mergeable: set[str]) -> list[tuple[str, str]]:
    """The merges of a vocabulary without any: each token from every two tokens that make it, lowest rank first.

    This is how SentencePiece's BPE uses its scores (rank = -score); among the ways to make the same token, the longer
    left part comes first, as in Hugging Face's conversion.
    """
    found: list[tuple[float, int, int, str, str]] = []
    for order, (token, rank) in enumerate(ranks.items()):
        if token not in mergeable:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in mergeable and right in mergeable:
                found.append((rank, order, -cut, left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[Tokenizer, bool]:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre is None:
        _log.warning("The GGUF file does not say how its words are cut (`tokenizer.ggml.pre`); GPT-2's way is assumed.")
        pre = "default"
    if pre not in SPLITS:
        raise UnsupportedModel(
            f"The GGUF file cuts words in a way named '{pre}', which is not known here.",
            fix="Name a folder or hub id with the model's tokenizer.json with --tokenizer.",
        )
    lines = metadata.get("tokenizer.ggml.merges") or ()
    merges = [tuple(line.split(" ")) if isinstance(line, str) else () for line in lines]
    if any(len(pair) != 2 for pair in merges):
        raise FormatError(
            "The GGUF file's merges (`tokenizer.ggml.merges`) must be two tokens each.", fix="Fetch the file again."
        )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix") is True
    vocabulary = _first_ids(tokens)
    backend = base.build(lambda: byte_level_bpe(vocabulary, merges, pre, add_prefix_space=prefix), "the GGUF file")
    return backend, pre in _BOS_BY_DEFAULT


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    scores = _parallel(metadata, "scores", len(tokens))
    architecture = str(metadata.get("general.architecture", ""))
    gemma = architecture.startswith("gemma")
    if gemma:  # runs of spaces are written as spaces in the file, but are merged as the stand-in
        tokens = ["▁" * len(token) if " " in token and not token.strip(" ") else token for token in tokens]
    vocabulary = _first_ids(tokens)
    lines = metadata.get("tokenizer.ggml.merges")
    if lines:
        merges = [tuple(line.split(" ")) if isinstance(line, str) else () for line in lines]
    else:
        if scores is None:
            raise FormatError("The GGUF file's vocabulary has neither scores nor merges.", fix="Fetch the file again.")
        # Gemma's scores do not follow its merges; the order of the tokens does.
        ranks = {token: float(i) if gemma else -float(scores[i]) for token, i in vocabulary.items()}
        usable = (NORMAL, USER_DEFINED) if gemma else (NORMAL,)
        merges = merges_by_rank(ranks, {token for token, i in vocabulary.items() if types[i] in usable})  # type: ignore[assignment]
    if any(len(pair) != 2 for pair in merges):
        raise FormatError(
            "The GGUF file's merges (`tokenizer.ggml.merges`) must be two tokens each.", fix="Fetch the file again."
        )
    unknown = _token_id(metadata, "unknown", len(tokens))
    unk_token = (
        tokens[unknown]
        if unknown is not None
        else next((t for t, k in zip(tokens, types, strict=True) if k == UNKNOWN), None)
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", not gemma))
    style = "gemma" if gemma else "phi3" if architecture == "phi3" else "llama"
    return base.build(
        lambda: sentencepiece_bpe(vocabulary, merges, unk_token, style=style, add_prefix_space=prefix), "the GGUF file"
    )


def sentencepiece_bpe(
    vocabulary: dict[str, int],
    merges: Iterable[tuple[str, ...]],
    unk_token: str | None,
    *,
    style: str = "llama",
    add_prefix_space: bool = True,
) -> Tokenizer:
    """A SentencePiece style BPE with byte fallback. `style` is `llama` (a space is put before the text unless it begins
    with one), `phi3` (before every piece between special tokens, always) or `gemma` (never)."""
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=list(merges),
            unk_token=unk_token,
            fuse_unk=True,  # type: ignore[arg-type]
            byte_fallback=True,
        )
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if style == "llama":
        scheme = "first" if add_prefix_space else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    elif style == "phi3" and add_prefix_space:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.normalizer = normalizers.Replace(" ", "▁")
    if add_prefix_space and style != "gemma":
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _add_tokens(
    backend: Tokenizer, tokens: Sequence[str], types: Sequence[int], named: set[str], *, rstrip: bool
) -> None:
    """Control tokens are special, user-defined ones are found whole in the text; neither is ever made by merges.

    Phi-3's special tokens, except a few, swallow the spaces that follow them; only its name tells that.
    """
    bare = {"<unk>", "<s>", "<|endoftext|>"}
    special, plain = [], []
    known = backend.get_vocab()
    alphabet = set(byte_alphabet())
    for token, kind in zip(tokens, types, strict=True):
        if token not in known or not token:
            continue
        if kind in (CONTROL, UNKNOWN) or token in named:
            special.append(AddedToken(token, normalized=False, special=True, rstrip=rstrip and token not in bare))
        elif kind == USER_DEFINED and not (set(token) == {"▁"} and not alphabet >= set(token)):
            plain.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _first_ids(tokens: Sequence[str]) -> dict[str, int]:
    """Token to id; of two equal tokens the first counts."""
    vocabulary: dict[str, int] = {}
    for i, token in enumerate(tokens):
        vocabulary.setdefault(token, i)
    return vocabulary


def _parallel(metadata: Mapping[str, Any], key: str, size: int) -> Sequence[Any] | None:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if values is None:
        return None
    if len(values) != size:
        raise FormatError(
            f"The GGUF file has {size} tokens but {len(values)} entries in `tokenizer.ggml.{key}`.",
            fix="Fetch the file again.",
        )
    result: Sequence[Any] = values
    return result


def _token_id(metadata: Mapping[str, Any], key: str, size: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{key}_token_id")
    return int(value) if isinstance(value, int) and 0 <= value < size else None

"""Tokenizers built from their parts: a vocabulary, merges, and the way a model cuts text into words.

Covers byte-level BPE (GPT-2 and its descendants) and SentencePiece style BPE with byte fallback. What the parts are is
the business of the readers: `gguf_vocab`, `qwen_tiktoken`, `sentencepiece_model`, `tokenizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from phalanx.errors import FormatError

SPACE = "▁"
"""SentencePiece's stand-in for a space (U+2581)."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of tokens, numbered alike in GGUF and in SentencePiece."""


@dataclass
class Vocabulary:
    """What a vocabulary file says: the tokenizer itself and what belongs to it."""

    backend: Tokenizer
    special_tokens: dict[str, str] = field(default_factory=dict)
    """`bos_token`, `eos_token`, … to the token's text."""
    eos_token_ids: list[int] = field(default_factory=list)
    chat_template: str | None = None


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_OTHER = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(ending: str, number: str) -> str:
    """Words end where lower case turns to upper case, each with an optional `ending`."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{_UPPER}*{_LOWER}+{ending}|{start}{_UPPER}+{_LOWER}*{ending}|"
    return words + number + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL


_DIGIT = r"\p{N}"
_GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
_SMOLLM = (_DIGIT, *_GPT2)
_LLAMA3 = (_WORDS + r"\p{N}{1,3}" + _OTHER + _TAIL,)
_QWEN2 = (_WORDS + _DIGIT + _OTHER + _TAIL,)
_QWEN35 = (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _TAIL,)
_LLAMA3_NAMES = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0"),
    *("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"),
)

SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _SMOLLM),
    **dict.fromkeys(_LLAMA3_NAMES, _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "kormo"), _QWEN2),
    "qwen35": _QWEN35,
    "tekken": (_cased("", _DIGIT),),
    **dict.fromkeys(("gpt-4o", "llama4"), (_cased(_CONTRACTIONS + "?", r"\p{N}{1,3}"),)),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", _DIGIT),
}
"""A model's way of cutting text, by its name in GGUF files (`tokenizer.ggml.pre`): patterns applied one after another,
as in the published tokenizer.json files."""

WHOLE_WORDS_FIRST = frozenset([*_LLAMA3_NAMES[:8], "tekken"])
"""Ways with which a word that is a token becomes that token, whatever the merges would make of it."""

_COMPOSED = frozenset(["qwen2", "qwen35"])
"""Ways whose text is brought into Unicode's composed form (NFC) first."""


def byte_level_bpe(
    vocabulary: Mapping[str, int],
    merges: Iterable[tuple[str, str]],
    pre: str,
    *,
    add_prefix_space: bool = False,
    whole_words_first: bool | None = None,
) -> Tokenizer:
    """A byte-level BPE whose words are cut as `SPLITS[pre]` says. Raises whatever `tokenizers` does: see `build`."""
    first = pre in WHOLE_WORDS_FIRST if whole_words_first is None else whole_words_first
    backend = Tokenizer(models.BPE(vocab=dict(vocabulary), merges=list(merges), ignore_merges=first))
    if pre in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    if add_prefix_space:  # the space comes before the cut, which only the library's own form of GPT-2's way does
        cuts: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)]
    else:
        cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in SPLITS[pre]]
        cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    backend.decoder = decoders.ByteLevel()
    return backend


def sentencepiece_bpe(
    vocabulary: Mapping[str, int], merges: Iterable[tuple[str, str]], unk_token: str | None, *, prefix_space: bool
) -> Tokenizer:
    """A SentencePiece style BPE with byte fallback; `prefix_space` puts a space before the text, and before each text
    that follows a special token, and removes it again when decoding. Raises whatever `tokenizers` does."""
    model = models.BPE(
        vocab=dict(vocabulary), merges=list(merges), unk_token=unk_token, fuse_unk=True, byte_fallback=True
    )
    backend = Tokenizer(model)
    escape = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), escape]) if prefix_space else escape
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix_space:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def merges_by_rank(ranks: Mapping[str, float]) -> list[tuple[str, str]]:
    """The merges that a vocabulary implies: each token from every two tokens that make it, lowest rank first.

    This is how SentencePiece's BPE works on its scores (rank = -score). Among the ways to make the same token the one
    with the longer left part comes first, as in Hugging Face's conversion.
    """
    found: list[tuple[float, int, int, str, str]] = []
    for order, (token, rank) in enumerate(ranks.items()):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                found.append((rank, order, -cut, left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def surround(backend: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Put `bos` before and `eos` after every text; None, or a token that is not in the vocabulary, puts nothing."""
    ids = {token: backend.token_to_id(token) for token in (bos, eos) if token}
    known = [(token, i) for token, i in ids.items() if i is not None]
    before = [bos] if bos in dict(known) else []
    after = [eos] if eos in dict(known) else []
    backend.post_processor = processors.TemplateProcessing(
        single=[*(f"{token}:0" for token in before), "$A:0", *(f"{token}:0" for token in after)],
        pair=[*(f"{t}:0" for t in before), "$A:0", *(f"{t}:0" for t in after), "$B:1", *(f"{t}:1" for t in after)],
        special_tokens=known,
    )


def special(token: str, *, rstrip: bool = False) -> AddedToken:
    return AddedToken(token, normalized=False, special=True, rstrip=rstrip)


def build(make: Callable[[], Tokenizer], what: str) -> Tokenizer:
    """`make()`, with whatever the `tokenizers` library throws at a bad vocabulary turned into FormatError."""
    try:
        return make()
    except BaseException as error:  # a Rust panic is not an Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        detail = " ".join(str(error).split())[:300]
        raise FormatError(
            f"The vocabulary in {what} cannot be used: {str(detail).rstrip('.')}.",
            fix="Fetch the file again, or name a folder with a tokenizer.json with --tokenizer.",
        ) from None

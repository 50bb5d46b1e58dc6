"""Hard strings for tokenizers, and small vocabularies trained on the spot to try them on."""

from __future__ import annotations

import base64
import functools
import itertools
import random
from pathlib import Path

PLAIN = [
    "",
    "a",
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog. It's fine; we'll see, they've gone, I'd say 'S and 'LL.",
    "  leading",
    "trailing   ",
    " one",
    "two  spaces   three    four",
    "tabs\tand\t\ttabs \t mixed",
    "\n",
    "\n\n\n",
    "lines\nand\r\nmore\r\n\r\nlines\n  indented\n\t\ttabbed\n",
    "1",
    "12 123 1234 12345 3.14159 -7 1e-10 0x1F ١٢٣ ½ Ⅷ ²",
    "314159265358979323846264338327950288419716939937510",
    "def f(x: int) -> int:\n    return x ** 2  # 平方\n\n\nclass A:\n\tpass\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] && !c; } // <- loop",
    '{"key": [1, 2.5e-3, null, true], "s": "a\\"b"}',
    "日本語のテキスト、漢字かな交じり文。中文字符测试：你好，世界！한국어 텍스트",
    "مرحبا بالعالم، هذا نص عربي. שלום עולם नमस्ते दुनिया สวัสดีชาวโลก",
    "Ελληνικά Кириллица ŠČĆŽ ﬁ ﬂ Ǆ ẞ ß İ ı",
    "e\u0301 vs \u00e9, a\u0308\u0323 n\u0303 क्षि \u0301alone",
    "👍🏽 👨‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷 ☃️ 1️⃣ 🫠",
    "zero\u200bwidth\u200d\u2060joiner\ufeffbom\u00adsoft",
    "nul\x00in\x01side\x7f\x85\xa0nbsp\u3000wide\u2028sep\u2029par",
    "\ufffd replacement \U0010ffff \ue000 private \ufffe",
    "a" * 300,
    " " * 50 + "x" + " " * 17,
    "=-" * 40 + "____" + "~" * 33 + "....",
    "https://example.org/a/b?c=d&e=f#g user@example.com C:\\path\\to",
    "<not> </a> <tag attr='v'> & &amp; <0x41> <0xE2><0x82>",
    "▁ real lower block ▁▁ Ġ Ċ ċ",
    "Straße naïve façade coöperate Dvořák Łódź 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𠜎𠜱",
    "don't DON'T don’t 'tis y'all'd've",
]
"""Nothing in it is meant as a special token."""


def random_texts(count: int, seed: int) -> list[str]:
    """Strings of random characters from many scripts, with spaces and line breaks."""
    draw = random.Random(seed)
    ranges = [(0x20, 0x7E)] * 6 + [(0xA1, 0x17F), (0x370, 0x3FF), (0x400, 0x4FF), (0x5D0, 0x5EA), (0x620, 0x64A)]
    ranges += [(0x900, 0x97F), (0x3041, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x1F600, 0x1F64F), (0x300, 0x36F)]
    texts = []
    for _ in range(count):
        chars = []
        for _ in range(draw.randrange(1, 60)):
            low, high = draw.choice(ranges)
            chars.append(
                draw.choice([" ", " ", "\n", "  ", "\r\n", "\t"])
                if draw.random() < 0.2
                else chr(draw.randint(low, high))
            )
        texts.append("".join(chars))
    return texts


def sprinkled(texts: list[str], tokens: list[str], seed: int) -> list[str]:
    """`texts` with `tokens` put in at random places."""
    draw = random.Random(seed)
    result = []
    for text in texts:
        for _ in range(draw.randrange(1, 4)):
            at = draw.randint(0, len(text))
            text = text[:at] + draw.choice(tokens) + text[at:]
        result.append(text)
    return result


@functools.cache
def training_text() -> str:
    """A few hundred kilobytes of text of many kinds; the same on every call."""
    words = " ".join(PLAIN).split(" ")
    draw = random.Random(7)
    lines = [" ".join(draw.choice(words) for _ in range(draw.randrange(3, 12))) for _ in range(1500)]
    source = "\n".join(path.read_text("utf-8") for path in sorted(Path(__file__).parents[2].glob("phalanx/*.py")))
    return "\n".join(line for line in lines if "\0" not in line) + "\n" + source[:60_000]


def train_ranks(pattern: str, size: int) -> dict[bytes, int]:
    """Token bytes to rank, learned by byte-pair merging within the words that `pattern` cuts (as tiktoken's are)."""
    import regex

    words: dict[tuple[bytes, ...], int] = {}
    for word in regex.findall(pattern, training_text()):
        key = tuple(bytes([byte]) for byte in word.encode("utf-8"))
        words[key] = words.get(key, 0) + 1
    draw = random.Random(3)
    singles = [bytes([byte]) for byte in range(256)]
    draw.shuffle(singles)
    ranks = {token: i for i, token in enumerate(singles)}
    while len(ranks) < size:
        counts: dict[tuple[bytes, bytes], int] = {}
        for word, count in words.items():
            for pair in itertools.pairwise(word):
                counts[pair] = counts.get(pair, 0) + count
        pair = max(counts, key=lambda pair: (counts[pair], pair))
        merged = pair[0] + pair[1]
        if merged in ranks:
            raise AssertionError("a pair was learned twice")
        ranks[merged] = len(ranks)
        words = {_merge(word, pair): count for word, count in words.items()}
    return ranks


def _merge(word: tuple[bytes, ...], pair: tuple[bytes, bytes]) -> tuple[bytes, ...]:
    result: list[bytes] = []
    for part in word:
        if result and (result[-1], part) == pair:
            result[-1] = result[-1] + part
        else:
            result.append(part)
    return tuple(result)


def tiktoken_file(ranks: dict[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(token) + b" " + str(rank).encode() + b"\n" for token, rank in ranks.items())


SENTENCEPIECE = {
    "llama": {"byte_fallback": True, "remove_extra_whitespaces": False, "split_digits": True},
    "gemma": {
        "byte_fallback": True,
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["\n\n", "<table>", "▁▁▁▁"],
    },
    "plain": {},
}
"""Trainer settings of SentencePiece BPE models in the style of the families that use them."""


@functools.cache
def sentencepiece_model(style: str) -> bytes:
    import io

    import sentencepiece

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in training_text().split("\n") if line]),
        model_writer=out,
        num_threads=1,
        minloglevel=2,
        model_type="bpe",
        normalization_rule_name="identity",
        allow_whitespace_only_pieces=True,
        vocab_size=1200,
        character_coverage=0.98,
        **SENTENCEPIECE[style],
    )
    return out.getvalue()


@functools.cache
def byte_level_vocabulary(pattern: str | None, size: int = 1500) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a byte-level BPE, trained on words cut by `pattern` (None: GPT-2's way)."""
    import json

    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    cuts = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)]
    if pattern is not None:
        cuts.insert(0, pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        training_text().split("\n"),
        trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False),
    )
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]

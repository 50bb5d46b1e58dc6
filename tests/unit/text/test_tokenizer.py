"""Tokenizers from a folder's files, against transformers, sentencepiece and tiktoken."""

from __future__ import annotations

import contextlib
import json
import unicodedata
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
from tokenizers import AddedToken, pre_tokenizers, processors
from transformers import AutoTokenizer, GPT2Tokenizer

from phalanx.checkpoint.locate import Checkpoint, locate
from phalanx.errors import CheckpointError, FormatError, UnsupportedModel
from phalanx.text import bpe, qwen_tiktoken
from phalanx.text.sentencepiece_model import parse
from phalanx.text.tokenizer import eos_ids, from_folder, load_tokenizer
from tests.helpers.text_corpus import (
    PLAIN,
    byte_level_vocabulary,
    random_texts,
    sentencepiece_model,
    sprinkled,
    tiktoken_file,
    train_ranks,
)

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""As published with Qwen-1."""
TOOL_USE = {"name": "tool_use", "template": "T"}
SPECIALS = ["<|endoftext|>", "<s>", "</s>"]


def write(folder: Path, **files) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return folder


def backend(*, template=False):
    vocabulary, merges = byte_level_vocabulary(None)
    made = bpe.byte_level_bpe(vocabulary, merges, "gpt-2")
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIALS])
    if template:
        bos = ("<s>", made.token_to_id("<s>"))
        made.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[bos])
    return made


def test_tokenizer_json_with_its_settings_has_the_ids_of_transformers(tmp_path):
    texts = PLAIN + random_texts(100, 1)
    texts += sprinkled(texts, [*SPECIALS, "<tool>", "<|pad|>"], 2)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
        "pad_token": "<|pad|>",
        "added_tokens_decoder": {
            "1503": {"content": "<tool>", "special": False, "normalized": False, "lstrip": True, "rstrip": True},
            "1504": {"content": "<|pad|>", "special": True, "normalized": False},
        },
    }
    assert backend().get_vocab_size() == 1503
    for number, (template, more) in enumerate(
        [
            (False, {}),
            (True, {}),
            (True, {"add_bos_token": False}),
            (False, {"add_bos_token": True, "add_eos_token": True}),
            (True, {"add_eos_token": True}),
        ]
    ):
        folder = write(
            tmp_path / str(number),
            tokenizer__json=json.loads(backend(template=template).to_str()),
            tokenizer_config__json=settings | more,
        )
        ours, theirs = from_folder(folder), AutoTokenizer.from_pretrained(folder)
        for text in texts:
            assert ours.encode(text) == theirs(text)["input_ids"], (more, text)
            assert ours.encode(text, False) == theirs(text, add_special_tokens=False)["input_ids"], (more, text)
            ids = ours.encode(text)
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
            assert ours.decode(ids, False) == theirs.decode(ids, skip_special_tokens=False)
        assert ours.special_ids == {1500, 1501, 1502, 1504}
        assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<|pad|>"}
        assert (ours.bos_token_id, ours.eos_token_ids, ours.size) == (1501, (1502,), 1505)


def test_ends_of_text_are_united(tmp_path):
    config = {"eos_token_id": [7, 1500], "text_config": {"eos_token_id": 9}}
    assert eos_ids(config, {"eos_token_id": 8}) == [8, 7, 1500, 9]
    assert eos_ids({"eos_token_id": None}, {}) == []
    folder = write(
        tmp_path, tokenizer__json=json.loads(backend().to_str()), tokenizer_config__json={"eos_token": "</s>"}
    )
    checkpoint = Checkpoint("m", folder, "safetensors", (), {"eos_token_id": 1500}, {"eos_token_id": [1502, 3]})
    assert load_tokenizer(checkpoint).eos_token_ids == (1502, 3, 1500)


def test_without_settings_the_models_config_names_the_end(tmp_path):
    folder = write(tmp_path, tokenizer__json=json.loads(backend().to_str()))
    ours = load_tokenizer(Checkpoint("m", folder, "safetensors", (), {"eos_token_id": 1502}, {}))
    assert ours.eos_token_ids == (1502,)
    assert ours.special_tokens == {"eos_token": "</s>"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config__json": {"chat_template": "A"}}, "A"),
        ({"tokenizer_config__json": {"chat_template": [TOOL_USE, {"name": "default", "template": "D"}]}}, "D"),
        ({"tokenizer_config__json": {"chat_template": [TOOL_USE]}}, "T"),
        ({"tokenizer_config__json": {"chat_template": "A"}, "chat_template__json": {"chat_template": "J"}}, "J"),
        ({"tokenizer_config__json": {"chat_template": "A"}, "chat_template__jinja": b"F\xc3\xa9"}, "Fé"),
        ({"tokenizer_config__json": {"chat_template": 3}}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_the_chat_template_is_found_wherever_it_is(tmp_path, files, expected):
    folder = write(tmp_path, tokenizer__json=json.loads(backend().to_str()), **files)
    assert from_folder(folder).chat_template == expected


def test_padding_and_truncation_in_the_file_do_not_count(tmp_path):
    made = backend()
    made.enable_padding(length=64)
    made.enable_truncation(3)
    folder = write(tmp_path, tokenizer__json=json.loads(made.to_str()))
    assert from_folder(folder).encode("Hello there, world") == backend().encode("Hello there, world").ids


def test_vocab_and_merges_have_the_ids_of_gpt2s_own_class(tmp_path):
    vocabulary, merges = byte_level_vocabulary(None)
    vocabulary = {**vocabulary, "</s>": len(vocabulary)}
    lines = "#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in merges)
    folder = write(
        tmp_path,
        vocab__json=vocabulary,
        merges__txt=lines.encode(),
        tokenizer_config__json={"bos_token": "</s>", "eos_token": "</s>", "add_bos_token": True},
        added_tokens__json={"<extra>": len(vocabulary)},
    )
    ours = from_folder(folder)
    theirs = GPT2Tokenizer(vocab=dict(vocabulary), merges=merges, bos_token="</s>", eos_token="</s>", unk_token="</s>")
    texts = PLAIN + random_texts(200, 3)
    for text in texts + sprinkled(texts, ["</s>"], 4):
        assert ours.encode(text) == [len(vocabulary) - 1, *theirs(text, add_special_tokens=False)["input_ids"]], text
    assert ours.encode("a<extra>", False)[-1] == len(vocabulary)


def test_add_prefix_space(tmp_path):
    vocabulary, merges = byte_level_vocabulary(None)
    lines = "".join(f"{left} {right}\n" for left, right in merges)
    folder = write(
        tmp_path, vocab__json=vocabulary, merges__txt=lines.encode(), tokenizer_config__json={"add_prefix_space": True}
    )
    ours = from_folder(folder)
    assert ours.encode("Hello world") == ours.encode(" Hello world")


@pytest.fixture(scope="module")
def ranks():
    return train_ranks(QWEN_PATTERN, 700)


def test_qwens_first_vocabulary_has_the_ids_of_tiktoken(tmp_path, ranks):
    folder = write(tmp_path, qwen__tiktoken=tiktoken_file(ranks))
    ours = from_folder(folder, {"model_type": "qwen", "eos_token_id": None}, [len(ranks)])
    numbered = {token: len(ranks) + i for i, token in enumerate(qwen_tiktoken.SPECIAL_TOKENS)}
    theirs = tiktoken.Encoding("qwen", pat_str=QWEN_PATTERN, mergeable_ranks=ranks, special_tokens=numbered)
    texts = PLAIN + random_texts(600, 5)
    texts += sprinkled(texts, ["<|im_start|>", "<|im_end|>", "<|extra_0|>", "<|extra_204|>", "<|endoftext|>"], 6)
    for text in texts:
        text = unicodedata.normalize("NFC", text)
        ids = ours.encode(text)
        assert ids == theirs.encode(text, allowed_special="all"), text
        assert ours.decode(ids, False) == text
    assert ours.encode("e\u0301") == ours.encode("\u00e9")
    assert ours.size == len(ranks) + 208
    assert set(ours.eos_token_ids) == {numbered["<|endoftext|>"], numbered["<|im_end|>"]}
    assert "im_start" in ours.chat_template


@pytest.mark.parametrize(
    "content",
    [b"no base64!! 1\n", b"YQ==\n", b"YQ== one\n", b"YQ== 5\n", b"YQ== 0\nYg== 0\n", b"YQ== 0\n", b"\xff\xfe\x00"],
)
def test_a_bad_tiktoken_file(tmp_path, content):
    with pytest.raises(FormatError, match=r"qwen\.tiktoken"):
        from_folder(write(tmp_path, qwen__tiktoken=content))


@pytest.mark.parametrize("style", ["llama", "gemma", "plain"])
def test_tokenizer_model_has_the_ids_of_sentencepiece(tmp_path, style):
    data = sentencepiece_model(style)
    ours = from_folder(write(tmp_path, tokenizer__model=data))
    theirs = sentencepiece.SentencePieceProcessor(model_proto=data)
    for text in PLAIN + random_texts(300, 7):
        expected = theirs.encode(text)
        assert ours.encode(text) == [1, *expected], text
        if 0 not in expected:
            assert ours.decode(expected) == theirs.decode(expected), text
    assert ours.special_tokens == {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    assert ours.eos_token_ids == (2,)
    assert ours.encode("</s>", False) == [2]


def test_tokenizer_model_settings(tmp_path):
    files = {"tokenizer__model": sentencepiece_model("llama")}
    plain = from_folder(write(tmp_path / "a", **files))
    other = from_folder(
        write(tmp_path / "b", **files, tokenizer_config__json={"add_bos_token": False, "add_prefix_space": False})
    )
    assert other.encode(" Hello") == plain.encode("Hello")[1:]


def test_a_bad_tokenizer_model(tmp_path):
    data = sentencepiece_model("llama")
    for cut in [1, 2, 7, 100, len(data) // 2, len(data) - 1]:
        with contextlib.suppress(FormatError, UnsupportedModel):  # whole pieces may be left: then it is a model
            parse(data[:cut], "tokenizer.model")
    for bad in [b"\xff" * 20, b"PK\x03\x04", b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x02\x0a\x09", b"\x08\x01", b"{}"]:
        with pytest.raises(FormatError):
            from_folder(write(tmp_path, tokenizer__model=bad))


def test_a_unigram_model_is_refused_in_clear_words(tmp_path):
    import io

    from tests.helpers.text_corpus import training_text

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(filter(None, training_text().split("\n"))), model_writer=out, model_type="unigram",
        vocab_size=800, minloglevel=2, character_coverage=0.98, hard_vocab_limit=False,
    )  # fmt: skip
    with pytest.raises(UnsupportedModel, match="Unigram") as caught:
        from_folder(write(tmp_path, tokenizer__model=out.getvalue()))
    assert "--tokenizer" in caught.value.fix


@pytest.mark.parametrize(
    ("files", "word"),
    [
        ({}, "no tokenizer"),
        ({"tokenizer__json": b"not json"}, r"tokenizer\.json"),
        ({"tokenizer__json": {"model": {"type": "Magic"}}}, r"tokenizer\.json"),
        ({"tokenizer__json": b"\x00" * 100}, r"tokenizer\.json"),
        ({"tokenizer__json": [[]]}, r"tokenizer\.json"),
        ({"vocab__json": {"a": "b"}, "merges__txt": b"a b"}, r"vocab\.json"),
        ({"vocab__json": {"a": -1}, "merges__txt": b""}, r"vocab\.json"),
        ({"vocab__json": {"a": 0}, "merges__txt": b"a b"}, r"vocab\.json"),
        ({"vocab__json": {"a": 0}, "merges__txt": b"a b c"}, r"merges\.txt"),
        ({"tokenizer__json": b"{}", "tokenizer_config__json": b"[1]"}, "tokenizer_config"),
        ({"tokenizer__json": b"{}", "tokenizer_config__json": b"[" * 100_000}, "tokenizer_config"),
    ],
)
def test_bad_files(tmp_path, files, word):
    with pytest.raises(CheckpointError, match=word) as caught:
        from_folder(write(tmp_path, **files))
    assert caught.value.fix
    assert "\n" not in str(caught.value)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path):
    outside = write(tmp_path / "outside", tokenizer__json=json.loads(backend().to_str()))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").symlink_to(outside / "tokenizer.json")
    with pytest.raises(CheckpointError, match="outside"):
        from_folder(tmp_path / "model")


def test_another_tokenizer_than_the_models_own(tmp_path):
    folder = write(tmp_path, tokenizer__json=json.loads(backend().to_str()))
    ours = load_tokenizer(locate(None), str(folder))
    assert ours.encode("Hello") == backend().encode("Hello").ids


def test_lone_surrogates_are_text():
    ours = load_tokenizer(locate(None))
    assert ours.encode("a\ud800b") == ours.encode("a\ufffdb")
    assert ours.encode("\ud83d\ude00") == ours.encode("😀")


def test_ids_nobody_knows_decode_to_nothing():
    ours = load_tokenizer(locate(None))
    assert ours.decode([ours.size, ours.size + 100, 2**31 - 1]) == ""
    assert ours.token_bytes(ours.size) == b""
    assert ours.token_text(ours.size) == ""


def test_bytes_of_tokens():
    ours = load_tokenizer(locate(None))
    text = "Hi 世界 👍🏽\n"
    ids = ours.encode(text)
    assert b"".join(map(ours.token_bytes, ids)) == text.encode()
    assert ours.token_bytes(2) == b"<|im_end|>"
    assert any("\ufffd" in ours.token_text(i) for i in ids)
    for token_id in range(0, ours.size, 7):
        assert ours.token_text(token_id) == ours.backend.decode([token_id], skip_special_tokens=False)


def test_other_decoders_are_left_to_the_library(tmp_path):
    from tokenizers import Tokenizer, decoders, models

    made = Tokenizer(models.WordPiece({"[UNK]": 0, "hel": 1, "##lo": 2, "world": 3}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece()
    ours = from_folder(write(tmp_path, tokenizer__json=json.loads(made.to_str())))
    assert ours.bytes is None
    assert ours.decode(ours.encode("hello world")) == "hello world"
    assert ours.token_bytes(3) == b"world"

"""Vocabularies inside GGUF files: ids equal to the model's own tokenizer and to Hugging Face's readings."""

from __future__ import annotations

import pytest
import sentencepiece
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as HFTokenizer
from transformers import AutoTokenizer, Qwen2Tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

from phalanx.checkpoint.locate import locate
from phalanx.errors import FormatError, UnsupportedModel
from phalanx.text import bpe
from phalanx.text.gguf_vocab import read_vocabulary
from phalanx.text.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.text_corpus import (
    PLAIN,
    SENTENCEPIECE,
    byte_level_vocabulary,
    random_texts,
    sentencepiece_model,
    sprinkled,
)

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tokenizer_of(metadata: dict) -> Tokenizer:
    found = read_vocabulary(metadata)
    return Tokenizer(found.backend, special_tokens=found.special_tokens, eos_token_ids=found.eos_token_ids)


def byte_level_metadata(pre: str, **more) -> dict:
    vocabulary, merges = byte_level_vocabulary(None if pre in ("gpt-2", "smollm") else bpe.SPLITS[pre][-1])
    tokens = [*sorted(vocabulary, key=vocabulary.__getitem__), *SPECIALS, "<think>"]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(vocabulary) + [3, 3, 3, 4],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": len(vocabulary) + 1,
        "tokenizer.ggml.eos_token_id": len(vocabulary) + 2,
        "tokenizer.ggml.add_bos_token": False,
        **more,
    }


def sentencepiece_metadata(
    style: str, architecture: str = "llama", **more
) -> tuple[dict, sentencepiece.SentencePieceProcessor]:
    processor = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(style))
    size = processor.vocab_size()
    kinds = []
    for i in range(size):
        user = processor.id_to_piece(i) in SENTENCEPIECE[style].get("user_defined_symbols", [])
        kinds.append(
            2
            if processor.is_unknown(i)
            else 3
            if processor.is_control(i)
            else 6
            if processor.is_byte(i)
            else 4
            if user
            else 1
        )
    return {
        "general.architecture": architecture,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in range(size)],
        "tokenizer.ggml.scores": [processor.get_score(i) for i in range(size)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **more,
    }, processor  # fmt: skip


@pytest.fixture(scope="module")
def demo():
    return locate(None)


def test_the_demo_model_has_the_ids_of_transformers(demo):
    ours = load_tokenizer(demo)
    theirs = AutoTokenizer.from_pretrained(demo.folder, gguf_file=demo.weight_files[0].name)
    # As in the model's own tokenizer.json; transformers leaves the digits out when it reads a GGUF file.
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    texts = PLAIN + random_texts(400, 1)
    texts += sprinkled(texts[:200], ["<|im_start|>", "<|im_end|>", "<repo_name>", "<|endoftext|>"], 2)
    for text in texts:
        assert ours.encode(text) == theirs(text)["input_ids"], text
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == text
    assert ours.eos_token_ids[0] == 2
    assert ours.bos_token_id == 1
    assert ours.size == 49152
    assert len(ours.special_ids) == 17
    assert ours.chat_template == theirs.chat_template


def test_each_way_of_cutting_gives_the_ids_of_transformers():
    for pre in ["gpt-2", "llama-bpe", "deepseek-r1-qwen", "qwen35", "tekken", "gpt-4o", "dbrx"]:
        metadata = byte_level_metadata(pre)
        reference, _ = convert_gguf_tokenizer(
            "llama",
            {
                "tokenizer_type": "gpt2",
                "pre_tokenizer_type": pre,
                "tokens": metadata["tokenizer.ggml.tokens"],
                "token_type": metadata["tokenizer.ggml.token_type"],
                "merges": metadata["tokenizer.ggml.merges"],
            },
        )
        ours = tokenizer_of(metadata)
        ours.backend.model.ignore_merges = False  # transformers leaves this out for all of them
        if pre == "qwen35":
            ours.backend.normalizer = normalizers.Sequence([])  # and this
        texts = PLAIN + random_texts(200, 3)
        for text in texts + sprinkled(texts, [*SPECIALS, "<think>"], 4):
            assert ours.encode(text) == reference.encode(text).ids, (pre, text)
            assert ours.decode(ours.encode(text), False) == text, (pre, text)


def test_qwen2_has_the_ids_of_its_own_class_with_composed_text():
    metadata = byte_level_metadata("qwen2")
    vocabulary, merges = byte_level_vocabulary(bpe.SPLITS["qwen2"][0])
    reference = Qwen2Tokenizer(vocab=dict(vocabulary), merges=merges)
    ours = tokenizer_of(metadata)
    for text in PLAIN + random_texts(300, 5):
        assert ours.encode(text) == reference(text)["input_ids"], text


def test_a_word_that_is_a_token_is_that_token():
    """Llama 3's vocabulary has tokens that its merges do not reach."""
    metadata = byte_level_metadata("llama-bpe")
    at = metadata["tokenizer.ggml.tokens"].index(SPECIALS[0])
    metadata["tokenizer.ggml.tokens"].insert(at, "Ġzqzqzq")
    metadata["tokenizer.ggml.token_type"].insert(at, 1)
    assert tokenizer_of(metadata).encode("a zqzqzq")[1] == at
    assert at not in tokenizer_of(metadata | {"tokenizer.ggml.pre": "qwen2"}).encode("a zqzqzq")


def test_digits_are_cut_for_smollm():
    ours = tokenizer_of(byte_level_metadata("smollm"))
    assert [ours.token_text(i) for i in ours.encode("12 345")] == ["1", "2", " ", "3", "4", "5"]


def test_a_sentencepiece_vocabulary_has_the_ids_of_the_library():
    metadata, processor = sentencepiece_metadata("llama", **{"tokenizer.ggml.add_bos_token": False})
    ours = tokenizer_of(metadata)
    for text in PLAIN + random_texts(300, 6):
        expected = processor.encode(text)
        assert ours.encode(text) == expected, text
        if 0 not in expected:
            assert ours.decode(expected) == processor.decode(expected)


def test_a_sentencepiece_vocabulary_has_the_ids_of_llamas_tokenizer_json():
    """As published for Llama 2, Mistral and TinyLlama: a space before the text and after every special token."""
    metadata, _ = sentencepiece_metadata("llama")
    tokens = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    scores = metadata["tokenizer.ggml.scores"]
    pairs = [
        (-scores[i], t[:cut], t[cut:]) for t, i in vocabulary.items() for cut in range(len(t) - 1, 0, -1)
        if {t[:cut], t[cut:]} <= vocabulary.keys() and metadata["tokenizer.ggml.token_type"][i] == 1
    ]  # fmt: skip
    merges = [pair[1:] for pair in sorted(pairs, key=lambda pair: pair[0])]
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    reference = HFTokenizer(model)
    reference.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    reference.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    reference.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in ("<unk>", "<s>", "</s>")])
    ours = tokenizer_of(metadata)
    texts = PLAIN + random_texts(200, 7)
    for text in texts + sprinkled(texts, ["<s>", "</s>", "[INST]"], 8):
        expected = reference.encode(text).ids
        assert ours.encode(text) == [1, *expected], text  # BOS by default
        assert ours.decode(expected) == reference.decode(expected), text
        assert ours.decode(expected, False) == reference.decode(expected, skip_special_tokens=False), text


def test_gemma_vocabulary():
    metadata, processor = sentencepiece_metadata("gemma", "gemma2")
    metadata["tokenizer.ggml.tokens"] = [
        " " * len(t) if t and set(t) == {"▁"} and len(t) > 1 else t for t in metadata["tokenizer.ggml.tokens"]
    ]
    reference, _ = convert_gguf_tokenizer(
        "gemma2",
        {
            "tokenizer_type": "llama",
            "tokens": metadata["tokenizer.ggml.tokens"],
            "scores": metadata["tokenizer.ggml.scores"],
            "token_type": metadata["tokenizer.ggml.token_type"],
        },
    )
    reference.pre_tokenizer = None  # never splits: the normaliser before it has replaced every space
    ours = tokenizer_of(metadata | {"tokenizer.ggml.add_bos_token": False})
    for text in PLAIN + random_texts(300, 9):
        assert ours.encode(text) == reference.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ours.encode(text), False) == text.replace("▁", " ")
        if "  " not in text and "<" not in text and "\n\n" not in text:
            assert ours.encode(text) == processor.encode(text), text


def test_phi3_special_tokens_swallow_spaces():
    metadata, _ = sentencepiece_metadata("llama", "phi3")
    tokens = metadata["tokenizer.ggml.tokens"] + ["<|user|>", "<|end|>"]
    kinds = metadata["tokenizer.ggml.token_type"] + [3, 3]
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    metadata["tokenizer.ggml.scores"] = metadata["tokenizer.ggml.scores"] + [0.0, 0.0]
    ours = tokenizer_of(metadata)
    assert ours.encode("<|user|>\n Hello<|end|>\n") == ours.encode("<|user|>Hello<|end|>")
    assert ours.encode("<s> Hello") != ours.encode("<s>Hello")
    assert ours.backend.token_to_id("<|end|>") in ours.eos_token_ids


def test_bos_and_eos_flags():
    metadata, _ = sentencepiece_metadata("llama")
    plain = tokenizer_of(metadata).encode("Hello", add_special_tokens=False)
    flags = {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}
    assert tokenizer_of(metadata).encode("Hello") == [1, *plain]
    assert tokenizer_of(metadata | flags).encode("Hello") == [*plain, 2]
    byte_level = byte_level_metadata("gpt-2")
    del byte_level["tokenizer.ggml.add_bos_token"]
    assert tokenizer_of(byte_level).encode("a") == tokenizer_of(byte_level).encode("a", False)
    llama3 = byte_level | {"tokenizer.ggml.pre": "llama-bpe"}
    assert tokenizer_of(llama3).encode("a")[0] == byte_level["tokenizer.ggml.bos_token_id"]


def test_turn_ends_end_answers_even_when_the_file_names_one_only():
    ours = tokenizer_of(byte_level_metadata("gpt-2"))
    first = ours.backend.token_to_id("<|im_end|>")
    assert ours.eos_token_ids == (first, ours.backend.token_to_id("<|endoftext|>"))


def test_a_missing_way_of_cutting_is_gpt2s_with_a_warning(caplog):
    metadata = byte_level_metadata("gpt-2")
    expected = tokenizer_of(metadata).encode("It's 12 o'clock")
    del metadata["tokenizer.ggml.pre"]
    assert tokenizer_of(metadata).encode("It's 12 o'clock") == expected
    assert "tokenizer.ggml.pre" in caplog.text


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        ({"tokenizer.ggml.pre": "no-such-way"}, UnsupportedModel, "no-such-way"),
        ({"tokenizer.ggml.model": "bert"}, UnsupportedModel, "bert"),
        ({"tokenizer.ggml.model": None}, UnsupportedModel, "None"),
        ({"tokenizer.ggml.tokens": []}, FormatError, "no vocabulary"),
        ({"tokenizer.ggml.tokens": [1, 2]}, FormatError, "no vocabulary"),
        ({"tokenizer.ggml.token_type": [1]}, FormatError, "token_type"),
        ({"tokenizer.ggml.token_type": ["x"] * 9999}, FormatError, "token_type"),
        ({"tokenizer.ggml.merges": ["a b c"]}, FormatError, "merge"),
        ({"tokenizer.ggml.merges": ["ab"]}, FormatError, "merge"),
        ({"tokenizer.ggml.merges": [7]}, FormatError, "merge"),
        ({"tokenizer.ggml.merges": ["nothere either"]}, FormatError, "vocabulary"),
        ({"tokenizer.ggml.model": "llama"}, None, ""),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.merges": []}, FormatError, "scores"),
        ({"tokenizer.ggml.bos_token_id": 10**9, "tokenizer.ggml.eos_token_id": -1}, None, ""),
        ({"tokenizer.ggml.chat_template": 3, "tokenizer.ggml.add_bos_token": "yes"}, None, ""),
    ],
)  # fmt: skip
def test_bad_metadata(change, error, word):
    metadata = byte_level_metadata("gpt-2") | change
    if error is None:
        tokenizer_of(metadata).encode("text")
    else:
        with pytest.raises(error, match=word) as caught:
            tokenizer_of(metadata)
        assert caught.value.fix


def test_equal_tokens_do_not_move_others():
    metadata = byte_level_metadata("gpt-2")
    metadata["tokenizer.ggml.tokens"][-1] = metadata["tokenizer.ggml.tokens"][5]
    ours = tokenizer_of(metadata)
    assert ours.encode(ours.token_text(5)) == [5]
    assert ours.decode([len(metadata["tokenizer.ggml.tokens"]) - 1]) == ""

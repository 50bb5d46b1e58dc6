"""A tokenizer with one token per byte and a few longer ones: no files, no network, awkward on purpose."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from phalanx.text.tokenizer import Tokenizer

WORDS = ("the", "stop", "hello", "world")
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


def byte_tokenizer(*, bos: bool = False) -> Tokenizer:
    """256 byte tokens, `WORDS` with and without a space before them, and the specials `<eos>` and `<bos>`.

    With `bos`, texts begin with `<bos>`.
    """
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        for end in range(2, len(word) + 1):
            piece = word[:end]
            if piece not in vocab:
                vocab[piece] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    for word in WORDS:
        vocab["Ġ" + word] = len(vocab)
        merges.append(("Ġ", word))
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>", "<bos>"])
    if bos:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", backend.token_to_id("<bos>"))]
        )
    special = {"eos_token": "<eos>", "bos_token": "<bos>"}
    return Tokenizer(backend, special_tokens=special, chat_template=CHAT_TEMPLATE)

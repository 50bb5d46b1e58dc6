"""The vocabulary of the first Qwen models (`qwen.tiktoken`) as a byte-level BPE.

The file has a line for each token: its bytes in base64 and its rank, which is also its id. tiktoken joins, again and
again, the two neighbours whose join has the lowest rank; as merges that is every way to make a token of two others, in
the order of ranks. The special tokens and the chat format are in the model's code, not in its files; they are here.
"""

from __future__ import annotations

import base64
import binascii

from phalanx.errors import FormatError
from phalanx.text import bpe
from phalanx.text.token_bytes import byte_alphabet

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))
"""They follow the ranks, in this order."""

CHATML = (
    "{% if messages and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The chat format of Qwen-Chat: ChatML with a default system message."""


def read_vocabulary(data: bytes, name: str) -> bpe.Vocabulary:
    """The content of the file `name`. Raises FormatError."""
    ranks = _ranks(data, name)
    spelling = {byte: char for char, byte in byte_alphabet().items()}
    tokens = {"".join(map(spelling.__getitem__, token)): rank for token, rank in ranks.items()}
    found: list[tuple[int, int, int, str, str]] = []
    for token, rank in tokens.items():
        for cut in range(1, len(token)):
            left, right = tokens.get(token[:cut]), tokens.get(token[cut:])
            if left is not None and right is not None:
                found.append((rank, left, right, token[:cut], token[cut:]))
    merges = [(left, right) for *_, left, right in sorted(found)]
    backend = bpe.build(lambda: bpe.byte_level_bpe(tokens, merges, "qwen2", whole_words_first=True), name)
    backend.add_special_tokens([bpe.special(token) for token in SPECIAL_TOKENS])
    ends = [i for token in ("<|im_end|>", "<|endoftext|>") if (i := backend.token_to_id(token)) is not None]
    return bpe.Vocabulary(backend, {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}, ends, CHATML)


def _ranks(data: bytes, name: str) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        try:
            text, rank = line.split()
            token = base64.b64decode(text, validate=True)
            ranks[token] = int(rank)
        except (ValueError, binascii.Error):
            raise FormatError(
                f"Line {number} of {name} is not a token in base64 and its rank.", fix="Fetch the file again."
            ) from None
    if sorted(ranks.values()) != list(range(len(ranks))) or b"" in ranks:
        raise FormatError(f"The ranks in {name} are not 0, 1, 2, … without gaps.", fix="Fetch the file again.")
    if missing := 256 - sum(bytes([byte]) in ranks for byte in range(256)):
        raise FormatError(f"{name} lacks {missing} of the 256 single bytes.", fix="Fetch the file again.")
    return ranks

"""Qwen 3 (dense): Llama's recipe with an RMS norm over each head of query and key."""

from __future__ import annotations

from phalanx.checkpoint.rules import WeightTable
from phalanx.models.families import llama
from phalanx.models.families.fields import Fields
from phalanx.models.families.qwen2 import windows
from phalanx.models.spec import DecoderSpec


def read(fields: Fields) -> DecoderSpec:
    bias = fields.boolean("attention_bias", False)
    # The family's heads are 128 wide when a config leaves it out, whatever the hidden size.
    filled = Fields({"head_dim": 128, **{k: v for k, v in fields.values.items() if v is not None}})
    return llama.llama_like(
        filled, family="qwen3", windows=windows(fields), qkv_bias=bias, out_bias=bias, qk_norm=True
    )  # fmt: skip


def weights(spec: DecoderSpec) -> WeightTable:
    return llama.table(spec, llama.ATTENTION | llama.QK_NORM | llama.MLP | llama.NORMS)


def gguf_weights(spec: DecoderSpec) -> WeightTable:
    rules = llama.GGUF_ATTENTION | llama.GGUF_QK_NORM | llama.GGUF_MLP | llama.GGUF_NORMS
    return llama.gguf_table(spec, rules)

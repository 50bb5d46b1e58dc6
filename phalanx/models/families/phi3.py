"""Phi-3: Llama's recipe with fused query-key-value and gate-up matrices, longrope, and partly rotated heads."""

from __future__ import annotations

from phalanx.checkpoint.rules import WeightTable
from phalanx.models.families import llama
from phalanx.models.families.fields import Fields
from phalanx.models.spec import DecoderSpec

_QKV = tuple(f"attention.{x}.{{kind}}" for x in "qkv")
_GATE_UP = ("mlp.gate.{kind}", "mlp.up.{kind}")


def read(fields: Fields) -> DecoderSpec:
    window = fields.optional_integer("sliding_window")
    bias = fields.boolean("attention_bias", False)
    windows = [window] * fields.integer("num_hidden_layers")
    return llama.llama_like(fields, family="phi3", windows=windows, qkv_bias=bias, out_bias=bias, eps=1e-5)


def weights(spec: DecoderSpec) -> WeightTable:
    layer: dict[str, str | tuple[str, ...]] = {
        "self_attn.qkv_proj.{kind}": _QKV,
        "self_attn.o_proj.{kind}": "attention.out.{kind}",
        "mlp.gate_up_proj.{kind}": _GATE_UP,
        "mlp.down_proj.{kind}": "mlp.down.{kind}",
    }
    return llama.table(spec, layer | llama.NORMS)


def gguf_weights(spec: DecoderSpec) -> WeightTable:
    layer: dict[str, str | tuple[str, ...]] = {
        "attn_qkv.{kind}": _QKV,
        "attn_output.{kind}": "attention.out.{kind}",
        "ffn_up.{kind}": _GATE_UP,
        "ffn_down.{kind}": "mlp.down.{kind}",
    }
    return llama.gguf_table(spec, layer | llama.GGUF_NORMS)

"""Qwen 1 (Qwen-7B, Qwen-14B-Chat and their kin): fused attention with a bias, no other biases, `w2` the gate.

Beyond `seq_length` tokens the family has two aids, each as its config says: queries grow with the logarithm of their
position (`use_logn_attn`), and the rotary base grows with the prompt's length in powers of two (`use_dynamic_ntk`).
"""

from __future__ import annotations

from phalanx.checkpoint.rules import WeightTable, rule
from phalanx.errors import UnsupportedModel
from phalanx.models.families import llama
from phalanx.models.families.fields import Fields
from phalanx.models.spec import (
    AttentionSpec,
    CheckpointType,
    DecoderSpec,
    DynamicPowerScaling,
    EmbeddingSpec,
    GatedMlp,
    NormSpec,
    PreNormLayer,
    RopeSpec,
)

_KEYS = {"num_key_value_heads": "num_attention_heads", "head_dim": "kv_channels", "embedding_size": "hidden_size"}

_SWITCHES: dict[str, CheckpointType] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def read(fields: Fields) -> DecoderSpec:
    if not fields.boolean("no_bias", True):
        raise UnsupportedModel("Qwen 1 models with `no_bias` false are not supported.")
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.integer("kv_channels", fields.head_dim(hidden, heads))
    trained = fields.integer("seq_length", 2048)
    dim = int(head_dim * fields.number("rotary_pct", 1.0))
    scaling = DynamicPowerScaling(trained) if fields.boolean("use_dynamic_ntk", True) else None
    attention = AttentionSpec(
        heads, heads, head_dim, head_dim**-0.5, RopeSpec(dim, fields.number("rotary_emb_base", 10000.0), scaling),
        qkv_bias=True, log_positions=trained if fields.boolean("use_logn_attn", True) else None,
    )  # fmt: skip
    norm = NormSpec("rms", fields.number("layer_norm_epsilon", 1e-6))
    # `intermediate_size` counts both halves of the gated layer.
    layer = PreNormLayer(attention, GatedMlp(fields.integer("intermediate_size") // 2, "silu"), norm, norm)
    return DecoderSpec(
        family="qwen",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        layers=(layer,) * fields.integer("num_hidden_layers"),
        embedding=EmbeddingSpec(hidden),
        final_norm=norm,
        max_positions=fields.integer("max_position_embeddings", trained),
        checkpoint_dtype=_dtype(fields),
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
    )


def _dtype(fields: Fields) -> CheckpointType:
    """The family's own configs name their type by three switches; with none set, the weights are bfloat16."""
    for switch, dtype in _SWITCHES.items():
        if fields.boolean(switch, False):
            return dtype
    return fields.dtype() if fields.values.get("dtype") or fields.values.get("torch_dtype") else "bfloat16"


def weights(spec: DecoderSpec) -> WeightTable:
    at = "h.{layer}."
    to = "layers.{layer}."
    rules = [
        rule("wte.weight", "embedding.weight"),
        rule("ln_f.weight", "final_norm.weight"),
        rule(at + "ln_1.weight", to + "attention_norm.weight"),
        rule(at + "ln_2.weight", to + "mlp_norm.weight"),
        rule(at + "attn.c_attn.{kind}", [to + f"attention.{x}.{{kind}}" for x in "qkv"]),
        rule(at + "attn.c_proj.weight", to + "attention.out.weight"),
        rule(at + "mlp.w1.weight", to + "mlp.up.weight"),
        rule(at + "mlp.w2.weight", to + "mlp.gate.weight"),
        rule(at + "mlp.c_proj.weight", to + "mlp.down.weight"),
    ]
    return llama.finished(
        spec, rules, "lm_head.weight", prefixes=("transformer.",), ignored=("*rotary_emb.*", "*logn_tensor"), keys=_KEYS
    )


def gguf_weights(spec: DecoderSpec) -> WeightTable:
    qkv = {"attn_qkv.{kind}": tuple(f"attention.{x}.{{kind}}" for x in "qkv")}
    out = {"attn_output.weight": "attention.out.weight"}
    return llama.gguf_table(spec, qkv | out | llama.GGUF_MLP | llama.GGUF_NORMS)

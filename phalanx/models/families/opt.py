"""OPT: learned positions that start at row 2, layer norms, ReLU. The 350m model norms after each sum instead of before
each part, and has a narrow token table with projections in and out."""

from __future__ import annotations

from phalanx.checkpoint.rules import WeightTable, rule
from phalanx.models.families import llama
from phalanx.models.families.fields import Fields
from phalanx.models.spec import (
    AttentionSpec,
    DecoderSpec,
    EmbeddingSpec,
    NormSpec,
    PlainMlp,
    PostNormLayer,
    PreNormLayer,
)

_OFFSET = 2
_KEYS = {
    "num_key_value_heads": "num_attention_heads", "head_dim": "hidden_size", "intermediate_size": "ffn_dim",
    "embedding_size": "word_embed_proj_dim",
}  # fmt: skip


def read(fields: Fields) -> DecoderSpec:
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.head_dim(hidden, heads)
    bias = fields.boolean("enable_bias", True)
    before = fields.boolean("do_layer_norm_before", True)
    norm = NormSpec("layer", 1e-5, affine=fields.boolean("layer_norm_elementwise_affine", True))
    attention = AttentionSpec(heads, heads, head_dim, head_dim**-0.5, qkv_bias=bias, out_bias=bias)
    mlp = PlainMlp(fields.integer("ffn_dim"), fields.activation("activation_function", "relu"), bias)
    layer = (PreNormLayer if before else PostNormLayer)(attention, mlp, norm, norm)
    positions = fields.integer("max_position_embeddings", 2048)
    width = fields.integer("word_embed_proj_dim", hidden)
    return DecoderSpec(
        family="opt",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        layers=(layer,) * fields.integer("num_hidden_layers"),
        embedding=EmbeddingSpec(width, positions=positions + _OFFSET, position_offset=_OFFSET),
        final_norm=norm if before and not fields.boolean("_remove_final_layer_norm", False) else None,
        max_positions=positions,
        checkpoint_dtype=fields.dtype(),
        tie_embeddings=fields.boolean("tie_word_embeddings", True),
    )


def weights(spec: DecoderSpec) -> WeightTable:
    at, to = "layers.{layer}.", "layers.{layer}."
    rules = [rule("embed_tokens.weight", "embedding.weight"), rule("embed_positions.weight", "positions.weight")]
    if spec.embedding.width != spec.hidden_size:
        rules += [rule(f"project_{way}.weight", f"project_{way}.weight") for way in ("in", "out")]
    names = {
        f"self_attn.{theirs}.{{kind}}": f"attention.{ours}.{{kind}}"
        for theirs, ours in (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("out_proj", "out"))
    }
    names |= {"fc1.{kind}": "mlp.up.{kind}", "fc2.{kind}": "mlp.down.{kind}"}
    if spec.layers[0].attention_norm.affine:
        names |= {"self_attn_layer_norm.{kind}": "attention_norm.{kind}", "final_layer_norm.{kind}": "mlp_norm.{kind}"}
        if spec.final_norm is not None:
            rules.append(rule("final_layer_norm.{kind}", "final_norm.{kind}"))
    rules += [rule(at + theirs, to + ours) for theirs, ours in names.items()]
    prefixes = ("model.decoder.", "decoder.")
    return llama.finished(spec, rules, "lm_head.weight", prefixes=prefixes, keys=_KEYS)
